"""A run as the command line states it: a preset and overrides, as the app will read them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import Annotated

import typer

from flower_desloc.app.cli.terminal import USAGE, fail, failing
from flower_desloc.app.config import PRESETS, Config, ConfigError, load_run_config
from flower_desloc.app.config.check import check_clients
from flower_desloc.app.config.load import replaced_by_gradients
from flower_desloc.app.config.overrides import override, split_arguments
from flower_desloc.app.config.paths import absolute_paths
from flower_desloc.app.config.run_config import app_run_config
from flower_desloc.app.setup.initial import OF_MODEL_CONFIG, with_init_from
from flower_desloc.app.setup.streams import RunStreams

# Typer 0.20 loses the help of arguments with Click 8.5: the commands' docstrings explain them.
Preset = Annotated[str, typer.Argument(show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")]
OutputDir = Annotated[
    Path,
    typer.Option(
        help="Folder in which the folder of the run or study is created.", file_okay=False
    ),
]


@dataclass(frozen=True)
class RunArguments:
    """One run of the app, validated before anything starts."""

    preset: str
    overrides: list[str]
    """With absolute paths."""
    config: Config

    @classmethod
    def parse(
        cls, preset: str, overrides: Sequence[str], nodes: int | None = None
    ) -> "RunArguments":
        """Return the run of a command line, or end the command with exit code 2.

        ``nodes`` is the number of clients, all of which are needed unless the overrides say less.
        """
        with failing(USAGE, ConfigError):
            if not preset:
                fail(USAGE, f"which preset? There are\n{listing(PRESETS)}")
            if preset.endswith((".yaml", ".yml")):
                preset = str(Path(preset).expanduser().resolve())
            words = split_arguments(overrides)
            if nodes is not None:
                given = {word.partition("=")[0] for word in words}
                if "simulation.num_clients" in given:
                    raise ConfigError("simulation.num_clients: a deployment has --nodes instead")
                words.append(f"simulation.num_clients={nodes}")
                if "federation.min_clients" not in given:
                    words.append(f"federation.min_clients={nodes}")
            config = _load(preset, words)
            if absolute := absolute_paths(config):
                words += [override(key, path) for key, path in absolute.items()]
                config = _load(preset, words)
            check_clients(config, "simulation.num_clients" if nodes is None else "--nodes")
            config = with_init_from(config)
            RunStreams(config).check()
        if replaced := replaced_by_gradients(preset, words):
            typer.echo(f"sync.gradients=1: the preset's {', '.join(replaced)} do not apply")
        if config.model.config:
            typer.echo(OF_MODEL_CONFIG)
        return cls(preset, words, config)

    def run_config(self, output_dir: Path) -> dict[str, str]:
        """Return the run config for `flwr run`."""
        return {
            "config": self.preset,
            "overrides": " ".join(self.overrides),
            "output-dir": str(output_dir),
        }


def listing(*folders: Path) -> str:
    """Return the YAML files' names, each with the first paragraph of the opening comment."""
    comments = {}
    for path in chain.from_iterable(sorted(folder.glob("*.yaml")) for folder in folders):
        lines = takewhile(lambda line: line.startswith("# "), path.read_text("utf-8").splitlines())
        comments[path.stem] = " ".join(word for line in lines for word in line.lstrip("#").split())
    width = max(map(len, comments), default=0)
    return "\n".join(f"  {name:<{width}}  {what}" for name, what in comments.items())


def require_writable(folder: Path) -> None:
    """End the command with exit code 2 unless ``folder`` exists or can be made, and is writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(USAGE, f"--output-dir {folder}: {error.strerror}; give a folder that can be made")
    if not os.access(folder, os.W_OK):
        fail(USAGE, f"--output-dir {folder}: is not writable; give another folder")


def _load(preset: str, overrides: Sequence[str]) -> Config:
    """Return the configuration as the app will load it, with the keys of its `pyproject.toml`."""
    given = {"config": preset, "overrides": " ".join(overrides)}
    return load_run_config({**app_run_config(), **given})
