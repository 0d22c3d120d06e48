"""Load YAML and overrides into a typed ``Config``, or raise one clear error."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf, TupleConfig
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from flower_desloc.config.app_folder import PRESETS
from flower_desloc.config.check import check, check_used, unused
from flower_desloc.config.errors import ConfigError, one_line, suggestion
from flower_desloc.config.imports import is_path
from flower_desloc.config.optimizers import OPTIMIZERS, SETTINGS, share_rates
from flower_desloc.config.schema import Config, Optimizer, Run
from flower_desloc.core.schedule import GRADIENTS, PARAMS
from flower_desloc.flower.policy import Policy

_EXTENDS = "extends"
_SYNC = "sync"
_AVERAGES = (
    "sync", "sync_mode", "sync_phase", "sync_once_at", "sync_delay", "sync_bound", "wire", "outer",
)  # fmt: skip
"""Sections and settings of averages that data parallelism does not make."""
_FIELD = re.compile(rf"\b({'|'.join(field.name for field in fields(Policy))})(?==)")
_TYPES = {
    "Integer": "an integer",
    "Float": "a number",
    "Boolean": "true or false",
    "string": "text",
}  # by OmegaConf's names

# Settings of earlier versions that nobody changed: a file that states the value which is now fixed
# can still be read.
_REMOVED: Final[dict[str, dict[str, Any]]] = {
    "model": {"initializer_range": None},
    "outer": {"betas": [0.9, 0.95], "eps": 1e-8},
    "fedadam": {"betas": [0.9, 0.99]},
}


def load(config: str, overrides: str | Sequence[str] = (), *, presets: Path = PRESETS) -> Config:
    """Return the configuration of a preset or a YAML file, with ``overrides`` applied.

    ``config`` names a file in the folder ``presets``, or is the path of a YAML file. ``overrides``
    is an OmegaConf dotlist, ``key=value`` separated by blanks or as a list. A file may build on a
    preset with ``extends: NAME``; its ``sync`` section, if it has one, replaces the preset's. A
    file or overrides that name another optimizer bring the defaults of that one, and must state its
    learning rate. If they state ``sync.gradients``, all other settings of averages are dropped.

    Raises ``ConfigError`` for a missing file, an unknown key, a wrong type or an impossible
    value.
    """
    merged: dict[str, Any] = {"run": {"name": Path(config).stem}}
    for layer in _file_layers(config, presets, seen=()):
        # A file's sync section replaces the preset's; an override changes one period.
        if _SYNC in layer:
            merged.pop(_SYNC, None)
        merged = _on_top(layer, merged)
    merged = _on_top(_dotlist(overrides), merged)
    if isinstance(merged.setdefault("optimizer", {}), dict):
        merged["optimizer"] = _with_defaults(merged["optimizer"])
    typed = _typed(merged)
    check_used(typed)
    return typed


def replaced_by_gradients(config: str, overrides: Sequence[str]) -> list[str]:
    """Return the settings of a preset that ``sync.gradients`` among ``overrides`` drops."""
    try:
        before, after = load(config), load(config, overrides)
    except ConfigError:  # the preset alone is incomplete
        return []
    if GRADIENTS in before.sync or GRADIENTS not in after.sync:
        return []
    return [key for key in _AVERAGES if getattr(before, key) != getattr(after, key)]


def dump(config: Config) -> str:
    """Return the whole configuration as YAML; ``parse`` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def parse(text: str) -> Config:
    """Return the configuration that ``dump`` wrote.

    Settings that the optimizer does not have, which earlier versions ignored, have their defaults.

    Raises ``ConfigError`` as ``load`` does.
    """
    values = _mapping(text, "the configuration")
    return _typed(_without_unused(values))


def _file_layers(config: str, presets: Path, seen: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    path = _find(config, presets, seen[-1] if seen else None)
    if str(path) in seen:
        raise ConfigError(f"{path} extends itself")
    try:
        layer = _mapping(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    parent = layer.pop(_EXTENDS, None)
    if parent is not None:
        if str(parent).endswith((".yaml", ".yml")):
            parent = path.parent / str(parent)
        yield from _file_layers(str(parent), presets, (*seen, str(path)))
    yield layer


def _find(config: str, presets: Path, child: str | None) -> Path:
    named = f"{child}: extends={config}" if child else f"config={config}"
    if config.endswith((".yaml", ".yml")):
        path = Path(config).expanduser()
        if path.is_file():
            return path
        raise ConfigError(f"{named}: no such file")
    path = presets / f"{config}.yaml"
    if path.is_file():
        return path
    names = sorted(p.stem for p in presets.glob("*.yaml"))
    raise ConfigError(
        f"{named}: no preset of that name{suggestion(config, names)}; "
        f"there are {', '.join(names)}, or give the path of a .yaml file"
    )


def _mapping(text: str, what: str) -> dict[str, Any]:
    try:
        container = OmegaConf.to_container(OmegaConf.create(text))
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{what} is not valid YAML: {_one_line(error)}") from error
    if not isinstance(container, dict):
        raise ConfigError(f"{what} must hold keys and values, got a {type(container).__name__}")
    values = {str(key): value for key, value in container.items()}
    for section, removed in _REMOVED.items():
        stated = values.get(section)
        if isinstance(stated, dict):
            values[section] = {
                key: value
                for key, value in stated.items()
                if key not in removed or value != removed[key]
            }
    return values


def _dotlist(overrides: str | Sequence[str]) -> dict[str, Any]:
    items = overrides.split() if isinstance(overrides, str) else list(overrides)
    for item in items:
        if not item.partition("=")[0] or "=" not in item:
            raise ConfigError(f"override {item!r} is not of the form key=value")
    try:
        container = OmegaConf.to_container(OmegaConf.from_dotlist(items))
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"overrides {' '.join(items)!r}: {_one_line(error)}") from error
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _refuse_unknown(layer: Mapping[str, Any], known: Any, prefix: str = "") -> None:
    for key, value in layer.items():
        if key not in known:
            names = sorted(known)
            raise ConfigError(
                f"{prefix}{key}: no such key{suggestion(key, names)}; "
                f"{prefix[:-1] or 'the configuration'} has {', '.join(names)}"
            )
        if isinstance(known[key], dict) and known[key]:
            if not isinstance(value, dict):
                raise ConfigError(f"{prefix}{key}={value}: a section; set {prefix}{key}.KEY=VALUE")
            _refuse_unknown(value, known[key], f"{prefix}{key}.")


def _on_top(layer: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``layer`` over ``base``, without what is stated there for another method only."""
    return _merge(_for_optimizer(layer, _for_gradients(layer, base)), layer)


def _for_gradients(layer: Mapping[str, Any], base: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``base`` without its averages if ``layer`` begins to average gradients instead."""
    old, new = _section(base, _SYNC), _section(layer, _SYNC)
    if GRADIENTS not in new or GRADIENTS in old:
        return base
    run, period = _section(base, "run"), old.get(PARAMS)
    if isinstance(period, int):  # a window becomes one step, and a checkpoint has as many steps
        every = period * int(run.get("checkpoint_every", Run.checkpoint_every))
        run = {**run, "checkpoint_every": every}
    return {key: value for key, value in base.items() if key not in _AVERAGES} | {"run": run}


def _for_optimizer(layer: Mapping[str, Any], base: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``base`` without the settings of its optimizer if ``layer`` names another."""
    named, stated = _section(layer, "optimizer").get("name"), _section(base, "optimizer")
    old = stated.get("name", Optimizer.name)
    if named is None or named == old:
        return base
    of_old = {*SETTINGS, "options", "lr"}
    kept = {key: value for key, value in stated.items() if key not in of_old}
    rate = stated.get("lr", Optimizer.lr)
    rate = rate if isinstance(rate, _Rate) else _Rate(rate, str(old))
    kept["lr"] = rate.value if share_rates(str(named), rate.optimizer) else rate
    return {**base, "optimizer": kept}


@dataclass(frozen=True)
class _Rate:
    """The learning rate of another optimizer, in the place of one that has to be stated."""

    value: Any
    optimizer: str


def _section(layer: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    stated = layer.get(name)
    return stated if isinstance(stated, dict) else {}


def _with_defaults(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the optimizer, those that are not stated at its own defaults."""
    name, rate = str(stated.get("name", Optimizer.name)), stated.get("lr")
    defaults = OPTIMIZERS[name].defaults if name in OPTIMIZERS else {}
    if isinstance(rate, _Rate) and not defaults and not is_path(name):
        return {**stated, "lr": rate.value}  # no such optimizer, which is refused later
    if isinstance(rate, _Rate):
        missing = [
            f"optimizer.{key}={json.dumps(value, separators=(',', ':'))}"
            for key, value in defaults.items()
            if key not in stated
        ]
        others = f"; {name}'s own defaults are {' '.join(missing)}" if missing else ""
        raise ConfigError(
            f"optimizer.name={name}: also set optimizer.lr, because the present "
            f"optimizer.lr={rate.value} was chosen for {rate.optimizer}{others}"
        )
    return {**defaults, **stated}


def _without_unused(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``values`` without settings that their optimizer does not have."""
    stated = _section(values, "optimizer")
    if "name" not in stated:
        return values
    lacking = unused(str(stated["name"]))
    return {**values, "optimizer": {k: v for k, v in stated.items() if k not in lacking}}


def _merge(base: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in layer.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _merge(old, value)
        merged[key] = value
    return merged


@cache
def _defaults() -> DictConfig:
    """Return the defaults, typed; made once, because a study loads hundreds of configurations."""
    defaults: DictConfig = OmegaConf.structured(Config)
    return defaults


def _typed(values: Mapping[str, Any]) -> Config:
    node = deepcopy(_defaults())
    _refuse_unknown(values, OmegaConf.to_container(node))
    for key, value in _leaves(values):
        try:
            OmegaConf.update(node, key, value, merge=False)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key}={value}: {_wanted(node, key, value, error)}") from error
    try:
        config = OmegaConf.to_object(node)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key}=???: needs a value") from error
    except OmegaConfBaseException as error:  # an interpolation that leads nowhere
        raise ConfigError(f"{error.full_key}: {_one_line(error)}") from error
    except ValueError as error:  # of Policy, the only section that checks itself
        raise ConfigError(_FIELD.sub(r"federation.\g<0>", str(error))) from error
    assert isinstance(config, Config)
    check(config)
    return config


def _wanted(node: Any, key: str, value: Any, error: Exception) -> str:
    """Return what ``key`` takes, where OmegaConf speaks of its own classes."""
    has = OmegaConf.select(node, key)
    if isinstance(has, DictConfig) and not isinstance(value, dict):
        return f"a section; set {key}.NAME=VALUE"
    if isinstance(has, BaseContainer) and not isinstance(value, (dict, list)):
        return f"a list; set {key}=[A,B]"
    if isinstance(has, TupleConfig) and isinstance(value, list) and len(value) != len(has):
        return f"takes {len(has)} values, got {len(value)}"
    if value is None:
        return "needs a value; leave it out for the default"
    if converted := re.search(
        r"could not be converted to (\w+)|Cannot convert .* to (string)", str(error)
    ):
        return f"must be {_TYPES[converted[1] or converted[2]]}"
    return _one_line(error)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and not prefix and key != _SYNC:
            yield from _leaves(value, f"{key}.")
        elif isinstance(value, dict):
            # federation.attendance.96=8: in a dotlist every key is a string.
            yield f"{prefix}{key}", {_as_step(k): v for k, v in value.items()}
        else:
            yield f"{prefix}{key}", value


def _as_step(key: Any) -> Any:
    return int(key) if str(key).removeprefix("-").isdecimal() else key


def _one_line(error: Exception) -> str:
    return one_line(error).partition(" full_key")[0]
