"""Flower's run config: a preset, its common settings as keys of their own, and overrides."""

import tomllib
from collections.abc import Mapping
from typing import Final

from flower_desloc.app.config.app_folder import APP_FOLDER
from flower_desloc.app.config.errors import ConfigError, suggestion
from flower_desloc.app.config.load import load
from flower_desloc.app.config.overrides import split
from flower_desloc.app.config.schema import Config

RunConfig = Mapping[str, bool | float | int | str]
"""As Flower gives it to an app."""

SETTINGS: Final = {
    "num-steps": "run.steps",
    "params-period": "sync.params",
    "exp-avg-period": "sync.exp_avg",
    "exp-avg-sq-period": "sync.exp_avg_sq",
    "learning-rate": "optimizer.lr",
    "batch-size": "data.batch_size",
    "fraction-train": "federation.fraction_train",
    "seed": "run.seed",
}
"""The setting of each key. Those that Flower's own apps have are named as there."""

_OTHERS: Final = ("config", "overrides", "output-dir")


def load_run_config(run_config: RunConfig) -> Config:
    """Return the configuration that a run config states.

    ``overrides`` win over the keys of ``SETTINGS``, and these over the preset or file that
    ``config`` names. A key that is the empty string changes nothing.

    Raises ``ConfigError`` for an unknown key, and as ``load`` does.
    """
    known = [*_OTHERS, *SETTINGS]
    for key in run_config:
        if key not in known:
            raise ConfigError(
                f"run config: {key}: no such key{suggestion(key, known)}; there are "
                f"{', '.join(known)}"
            )
    stated = {key: run_config[key] for key in SETTINGS if run_config.get(key, "") != ""}
    keys = [f"{SETTINGS[key]}={value}" for key, value in stated.items()]
    overrides = split(str(run_config.get("overrides", "")))
    try:
        return load(str(run_config["config"]), [*keys, *overrides])
    except ConfigError as error:
        if not stated:
            raise
        listed = " ".join(f"{key}={value}" for key, value in stated.items())
        raise ConfigError(f"{error} (the run config states {listed})") from error


def app_run_config() -> RunConfig:
    """Return the run config in the app's ``pyproject.toml``, which Flower's command changes."""
    text = (APP_FOLDER / "pyproject.toml").read_text(encoding="utf-8")
    found: RunConfig = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    return found
