"""The grid of a study: its cells, and the runs of a cell."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from flower_desloc.app.config import Config, load
from flower_desloc.app.config.metric import Direction
from flower_desloc.app.config.user_code import user_modules
from flower_desloc.app.runs.groups import flat
from flower_desloc.app.study.search import Search
from flower_desloc.flower.fingerprint import code_of

_ENDS = 1 << 20
"""Bytes at each end of a file that its digest reads."""


@dataclass(frozen=True, kw_only=True)
class ScoreSpec:
    """The number of a run that counts."""

    metric: str = "loss"
    """The loss, or any metric of the task."""
    direction: Direction = "min"
    """`min`: a smaller value is better; `max`: a larger one."""
    where: str = "central"
    """`central`: the averaged model on every domain's held-out text. `federated`: on the clients'
    own. `train`: the training loss, mean over the clients and the steps of a window."""
    reduce: str = "final"
    """`final`: the last evaluation or window. `best`: the smallest or largest."""

    @property
    def sign(self) -> int:
        """The factor that makes a smaller score the better one."""
        return 1 if self.direction == "min" else -1

    def worst(self, values: Iterable[float]) -> float:
        """Return the worst of some values."""
        return max(values, key=lambda value: self.sign * value)

    @property
    def text(self) -> str:
        """The score in words."""
        of = {
            "central": f"held-out {self.metric}",
            "federated": f"held-out {self.metric} on the clients",
            "train": "training loss of the last window",
        }[self.where]
        if self.reduce == "best":
            best = "smallest" if self.direction == "min" else "largest"
            return f"{best} {of.removesuffix(' of the last window')}"
        return of if self.where == "train" else f"final {of}"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A value of a metric that a run is to reach."""

    score: ScoreSpec
    value: float

    @property
    def text(self) -> str:
        """The target in words."""
        return f"{self.score.metric} {self.value:g}"

    def is_met(self, value: float | None) -> bool:
        """Return whether a value is as good as the target."""
        sign = self.score.sign
        return value is not None and sign * value <= sign * self.value


@dataclass(frozen=True, kw_only=True)
class Study:
    """A grid of runs."""

    name: str
    axes: Mapping[str, tuple[str, ...]]
    """The labels of each axis' values."""
    cells: tuple["Cell", ...]
    seeds: tuple[int, ...]
    score: ScoreSpec
    """What a search compares."""
    shown: ScoreSpec
    """What tables and figures compare: the score, or another metric."""
    baseline: Mapping[str, str] = field(default_factory=dict)
    """The axis whose values are compared with one of them, and that one; empty without an axis."""
    target: Target | None = None

    @property
    def compared(self) -> str | None:
        """The axis whose values are compared: the longest, of several the last."""
        return max(reversed([*self.axes]), key=lambda axis: len(self.axes[axis]), default=None)

    def baseline_of(self, cell: "Cell") -> Mapping[str, str]:
        """Return the labels of the cell that ``cell`` is compared with."""
        return {**cell.labels, **self.baseline} if self.baseline else {}

    def baselines(self, text: str) -> list[dict[str, str]]:
        """Return the baselines that ``LABEL`` or ``AXIS=LABEL`` names."""
        every = ((axis, label) for axis, labels in self.axes.items() for label in labels)
        return [{axis: label} for axis, label in every if text in (label, f"{axis}={label}")]

    @property
    def baseline_text(self) -> str:
        """The baseline's label, with its axis where another axis has that label too."""
        return "".join(
            label if len(self.baselines(label)) == 1 else f"{axis}={label}"
            for axis, label in self.baseline.items()
        )


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination of the axes' values."""

    labels: Mapping[str, str]
    """The value's label on each axis."""
    config: str
    """Preset or path of a YAML file."""
    overrides: tuple[str, ...]
    own: tuple[str, ...] | None = None
    """Those of the overrides that the cell must use; None: all."""
    search: Search | None = None

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

    def load(self, *more: str) -> Config:
        """Return the cell's configuration, with ``more`` overrides.

        Of the overrides of all cells, those that this one does not use are left out.
        """
        return load_once(self.config, (*self.overrides, *more), self.own)

    def run(self, seed: int, position: int | None = None) -> "StudyRun":
        """Return the run with a seed, at a position of the search."""
        tuned, config = "", self.load()
        if self.search is not None and position is not None:
            value = self.search.value(position)
            tuned = f"{self.search.key}={value:g}"
            config = self.load(f"{self.search.key}={value}")
        named = with_run(config, name=self.slug[:80], seed=seed)
        code, files = code_once(user_modules(config)), files_once(config.data.source)
        return StudyRun(self, seed, tuned, named, code, files)


@dataclass(frozen=True)
class StudyRun:
    """One run of a cell. Runs with the same configuration, code and data have the same folder."""

    cell: Cell
    seed: int
    tuned: str
    """The key that the cell's search tunes, and its value: ``key=value``; empty without one."""
    config: Config
    """The configuration to run. Its name is the cell's, by which a report groups runs."""
    code: str = ""
    """A digest of the user's own code (``code_digest``) when the study was started."""
    files: str = ""
    """A digest of the files of ``data.source`` then (``files_once``)."""

    @cached_property
    def folder(self) -> str:
        """Name of the run's folder: the tuned value, the seed, a digest of all it depends on."""
        key, _, value = self.tuned.partition("=")
        tuned = [f"{key.rpartition('.')[2]}-{value}"] if self.tuned else []
        return "-".join(
            [*tuned, f"seed-{self.seed}", config_digest(self.config, self.code, self.files)]
        )

    @property
    def title(self) -> str:
        """Cell, tuned value and seed, for people."""
        return ", ".join(filter(None, [self.cell.name, self.tuned, f"seed {self.seed}"]))


def with_run(config: Config, **values: Any) -> Config:
    """Return ``config`` with other values in its section ``run``."""
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **values))


def config_digest(config: Config, code: str = "", files: str = "") -> str:
    """Return eight hexadecimal digits of the values that are not defaults, except the run's name.

    They also depend on ``code`` and ``files``. A key that a later version adds does not change the
    digest of earlier runs.
    """
    default = flat(dataclasses.asdict(Config()))
    changed = {
        key: value
        for key, value in flat(dataclasses.asdict(config)).items()
        if key != "run.name" and (key not in default or default[key] != value)
    }
    changed |= {name: text for name, text in (("code", code), ("files", files)) if text}
    return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:8]


def code_digest(modules: Iterable[str]) -> str:
    """Return a digest of the files of ``code_of``; empty if there is none."""
    code = code_of(modules)
    return hashlib.sha256(json.dumps(code).encode()).hexdigest() if code else ""


@cache  # a study has one version of the code: its workers keep the modules they have imported
def code_once(modules: tuple[str, ...]) -> str:
    """Return the digest of a user's modules when this process first needed it."""
    return code_digest(modules)


@cache  # as code_once: a study has one version of the data
def files_once(source: str) -> str:
    """Return a digest of local files when this process first needed it.

    It is that of their names, sizes, and first and last mebibyte; empty if ``source`` names none,
    as for a data set of the hub.
    """
    root = Path(source).expanduser()
    state = xxh3_128()
    for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
        if path.is_file():
            size = path.stat().st_size
            state.update(f"{path.relative_to(root)} {size};".encode())
            with path.open("rb") as file:
                state.update(file.read(_ENDS))
                file.seek(max(_ENDS, size - _ENDS))
                state.update(file.read(_ENDS))
    return state.hexdigest() if root.exists() else ""


@cache
def load_once(
    config: str, overrides: tuple[str, ...], must_use: tuple[str, ...] | None = None
) -> Config:
    """Load a configuration, or return it from the cache: each run's is needed many times."""
    return load(config, overrides, must_use=must_use)


def _slug(label: str) -> str:
    # FAVG+OPT and FAVG-OPT are two methods.
    plain = label.lower().replace("+", "-plus-")
    return re.sub(r"[^a-z0-9.]+", "-", plain).strip("-.")
