"""A cell of the grid, and one run of it: a configuration with a name that says which."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from flower_desloc.config import Config, ConfigError, load
from flower_desloc.tools.study.sweep import Sweep


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination of the axes' values."""

    labels: Mapping[str, str]
    """Axis -> the value's label."""
    config: str
    """Preset or path of a YAML file."""
    overrides: tuple[str, ...]
    sweep: Sweep | None = None

    @property
    def name(self) -> str:
        """The labels, for people."""
        return ", ".join(self.labels.values()) or self.config

    @property
    def slug(self) -> str:
        """The labels, for a folder.

        >>> Cell(labels={"method": "DES-LOC", "K": "16 steps"}, config="", overrides=()).slug
        'des-loc_16-steps'
        """
        return "_".join(map(_slug, self.labels.values())) or "all"

    def is_possible(self, position: int) -> bool:
        """Return whether the swept setting may have its value there: a share ends at 1."""
        try:
            self.run(0, position)
        except ConfigError:
            return False
        return True

    def run(self, seed: int, position: int | None = None) -> "Run":
        """Return the run with a seed, at a position of the sweep."""
        value = None
        changes = [f"run.seed={seed}"]
        if self.sweep is not None and position is not None:
            value = self.sweep.value(position)
            changes.append(f"{self.sweep.key}={value}")
        return Run(self, seed, value, load_once(self.config, (*self.overrides, *changes)))


@dataclass(frozen=True)
class Run:
    """One run of a cell. Two runs with the same configuration have the same folder."""

    cell: Cell
    seed: int
    value: float | None
    """Of the setting that the cell sweeps."""
    settings: Config
    """As the study's files say, without the run's own name."""

    @cached_property
    def folder(self) -> str:
        """Name of the run's folder in its cell's: the tuned value, the seed, the fingerprint."""
        tuned = ""
        if self.cell.sweep is not None and self.value is not None:
            tuned = f"{self.cell.sweep.key.rpartition('.')[2]}-{self.value:g}-"
        return f"{tuned}seed-{self.seed}-{fingerprint(self.settings)}"

    @cached_property
    def config(self) -> Config:
        """What is run; its name is the cell's, by which a report knows which runs are alike."""
        return named(self.settings, self.cell.slug[:80])

    @property
    def title(self) -> str:
        """What the run is, for people."""
        tuned = ""
        if self.cell.sweep is not None and self.value is not None:
            tuned = f", {self.cell.sweep.key}={self.value:g}"
        return f"{self.cell.name}{tuned}, seed {self.seed}"


def named(config: Config, name: str) -> Config:
    """Return ``config`` with another name of the run."""
    return dataclasses.replace(config, run=dataclasses.replace(config.run, name=name))


def fingerprint(config: Config) -> str:
    """Return eight hexadecimal digits of what differs from the defaults, the run's name aside.

    A setting that a later version adds does not change those of earlier runs.
    """
    default = dict(_leaves(dataclasses.asdict(Config())))
    changed = {
        key: value
        for key, value in _leaves(dataclasses.asdict(config))
        if key != "run.name" and (key not in default or default[key] != value)
    }
    return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:8]


@cache
def load_once(config: str, overrides: tuple[str, ...]) -> Config:
    """Load a configuration; plans, which ask for all of them, are made anew after every run."""
    return load(config, overrides)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _slug(label: str) -> str:
    # FAVG+OPT and FAVG-OPT are two methods.
    plain = label.lower().replace("+", "-plus-")
    return re.sub(r"[^a-z0-9.]+", "-", plain).strip("-.")
