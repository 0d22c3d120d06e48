"""A run's folder read back, however the run ended, and runs that differ in their seed only."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from flower_desloc.setup.build import build_schedule
from flower_desloc.config import ConfigError, parse
from flower_desloc.runs.folder import RunFolder
from flower_desloc.runs.metrics import Line, read_lines
from flower_desloc.runs.summary import build
from flower_desloc.flower.observer import Plan
from flower_desloc.core.schedule import PARAMS

UNFINISHED = "unfinished"
"""Status of a run without a summary: it goes on, or was killed before it could write one."""


class NoRunError(ValueError):
    """There is no run where one was named, or its files cannot be read."""


@dataclass(frozen=True)
class Run:
    """What a run's folder says."""

    path: Path
    config: Mapping[str, Any]
    """``config.yaml``, as plain values."""
    lines: Sequence[Line]
    """``metrics.jsonl``."""
    summary: Mapping[str, Any]
    """``summary.json``, or what it would be if the run had ended with its last whole line."""

    @property
    def name(self) -> str:
        """The run's name; two runs may have the same."""
        return str(self.summary["config"]["name"])

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.summary["config"]["seed"])

    @property
    def status(self) -> str:
        """``completed``, ``failed`` or ``unfinished``."""
        return str(self.summary["status"])

    @property
    def windows(self) -> list[Line]:
        """The lines of training; round 0 is before it."""
        return [line for line in self.lines if line["round"] > 0]

    @property
    def num_steps(self) -> int:
        """Steps done, of those planned."""
        return int(self.summary["steps"])

    @property
    def streams(self) -> list[str]:
        """Every stream, in the order of the configuration; those never sent included."""
        seen = (stream for line in self.lines for stream in line["streams"])
        return list(dict.fromkeys([*self.summary["config"]["periods"], *seen]))

    @property
    def clients(self) -> list[str]:
        """Every client that took part in a window or was left out of one, in natural order."""
        seen = {name for line in self.windows for name in (*line["clients"], *line["left_out"])}
        return sorted(seen | set(self.client_data), key=natural)

    @property
    def client_data(self) -> Mapping[str, Mapping[str, int]]:
        """Client -> domain or label -> size, of the clients that say what they hold."""
        data: Mapping[str, Mapping[str, int]] = self.summary.get("client_data") or {}
        return {name: data[name] for name in sorted(data, key=natural)}

    @property
    def task(self) -> str:
        """What is learned."""
        return str(self.summary["config"]["task"])

    @property
    def where(self) -> str:
        """Where the averaged model was evaluated: ``central``, else ``federated``."""
        there = {where for line in self.lines for where in line.get("evaluation", {})}
        return "federated" if there == {"federated"} else "central"

    def final(self, metric: str) -> float | None:
        """Return a held-out metric of the last evaluation; None without one, or not finite."""
        for line in reversed(self.lines):
            if self.where in line.get("evaluation", {}):
                value = line["evaluation"][self.where]["overall"].get(metric)
                return None if value is None else float(value)
        return None


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed and name; one line in a comparison."""

    label: str
    colour: str
    runs: Sequence[Run]

    @property
    def counted(self) -> Sequence[Run]:
        """The runs whose final values count: those that completed; all, if none did."""
        return [run for run in self.runs if run.status == "completed"] or self.runs

    def final(self, metric: str) -> "Spread":
        """Return the final value of a held-out metric over the runs."""
        return Spread.of(run.final(metric) for run in self.counted)


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation of the numbers among ``count`` values."""

    mean: float | None
    std: float | None
    """None for a single value."""
    numbers: int
    """How many of the values are finite numbers; the others are in neither."""
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread":
        """Return the spread of ``values``; None is a value that was not finite.

        >>> Spread.of([1.0, 3.0, None])
        Spread(mean=2.0, std=1.4142135623730951, numbers=2, count=3)
        """
        values = list(values)
        numbers = [value for value in values if value is not None]
        if not numbers:
            return cls(None, None, 0, len(values))
        mean = math.fsum(numbers) / len(numbers)
        squares = math.fsum((value - mean) ** 2 for value in numbers)
        std = math.sqrt(squares / (len(numbers) - 1)) if len(numbers) > 1 else None
        return cls(mean, std, len(numbers), len(values))


def find(paths: Iterable[str | Path]) -> list[Path]:
    """Return the runs' folders at and below ``paths``, each once, in natural order.

    Raises :class:`NoRunError` for a path without one.
    """
    found: dict[Path, None] = {}
    for given in paths:
        path = Path(given).expanduser().resolve()
        if not path.exists():
            raise NoRunError(f"{given}: no such folder; name a run's folder, or a folder of runs")
        runs = [path] if _is_run(path) else sorted(_below(path), key=lambda run: natural(str(run)))
        if not runs:
            raise NoRunError(
                f"{given}: neither a run's folder (it has no config.yaml) nor a folder of runs"
            )
        found |= dict.fromkeys(runs)
    return list(found)


def load(path: Path) -> Run:
    """Return the run of a folder, finished or not.

    Raises :class:`NoRunError`, naming the file, when what is there cannot be read.
    """
    folder = RunFolder(path)
    text = _text(folder.config)
    try:
        config = OmegaConf.to_container(OmegaConf.create(text))
    except (OmegaConfBaseException, YAMLError) as error:
        raise NoRunError(f"{folder.config}: not a configuration: {error}") from error
    if not isinstance(config, dict):
        raise NoRunError(f"{folder.config}: not a configuration, but {type(config).__name__}")
    try:
        lines = list(read_lines(folder.metrics))
    except (OSError, ValueError) as error:
        raise NoRunError(f"{folder.metrics}: not one JSON object a line: {error}") from error
    plain = {str(key): value for key, value in config.items()}
    return Run(path, plain, lines, _summary(folder) or _unfinished(folder, text, lines))


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Return the runs in groups that differ in seed only, labelled and coloured.

    The label is the name of the group's runs; where several groups share a name, the settings in
    which they differ are added. The presets' colours are the same in every report.
    """
    by_settings: dict[str, list[Run]] = {}
    for run in runs:
        by_settings.setdefault(_but_the_seed(run), []).append(run)
    groups = list(by_settings.values())
    names = [_common_name(group) for group in groups]
    labels = [
        name if names.count(name) == 1 else f"{name} {_distinction(group, groups, names)}".strip()
        for name, group in zip(names, groups, strict=True)
    ]
    return [
        Group(label, colour, group)
        for label, colour, group in zip(labels, _colours(names), groups, strict=True)
    ]


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings by dotted key, as one would type them.

    >>> flat({"run": {"seed": 0}, "task": "causal_lm", "federation": {"attendance": {}}})
    {'run.seed': 0, 'task': 'causal_lm', 'federation.attendance': {}}
    """
    settings: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            settings |= flat(value, f"{prefix}{key}.")
        else:
            settings[f"{prefix}{key}"] = value
    return settings


def natural(text: str) -> list[Any]:
    """Return a key that sorts as people do.

    >>> sorted(["client-10", "client-9"], key=natural)
    ['client-9', 'client-10']
    """
    parts = re.split(r"(\d+)", text)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]


def _is_run(path: Path) -> bool:
    return RunFolder(path).config.is_file()


def _below(path: Path) -> Iterable[Path]:
    return {config.parent for config in path.rglob(RunFolder(path).config.name)}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NoRunError(f"{path}: cannot be read: {error}") from error


def _summary(folder: RunFolder) -> dict[str, Any] | None:
    if not folder.summary.exists():
        return None
    try:
        summary = json.loads(_text(folder.summary))
    except ValueError as error:
        raise NoRunError(f"{folder.summary}: not JSON: {error}") from error
    if not isinstance(summary, dict) or not {"status", "config", "bytes"} <= summary.keys():
        raise NoRunError(f"{folder.summary}: not the summary of a run")
    return summary


def _unfinished(folder: RunFolder, text: str, lines: Sequence[Line]) -> dict[str, Any]:
    try:
        config = parse(text)
    except ConfigError as error:
        raise NoRunError(f"{folder.config}: {error}") from error
    plan = Plan(num_steps=config.run.steps, num_windows=0, stream_bytes=_sizes(lines), clients={})
    summary = build(
        lines, config=config, schedule=build_schedule(config), plan=plan, status="failed"
    )
    return {**summary, "status": UNFINISHED}


def _sizes(lines: Iterable[Line]) -> dict[str, int]:
    """Return the size of each stream, as far as it was sent."""
    sizes: dict[str, int] = {}
    for line in lines:
        for stream, count in line["bytes_up"].items():
            # What came from a client that was left out counts as well: the least is the size.
            size = count // max(1, len(line["clients"]))
            sizes[stream] = min(size, sizes.get(stream, size))
    return {PARAMS: sizes.get("gradients", 0), **sizes}


def _but_the_seed(run: Run) -> str:
    settings = flat(run.config)
    settings.pop("run.seed", None)
    settings.pop("run.name", None)
    return json.dumps(settings, sort_keys=True, default=str)


def _common_name(group: Sequence[Run]) -> str:
    names = {run.name for run in group}
    if len(names) == 1:
        return names.pop()
    first, last = min(names), max(names)
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), None)
    return first[:same].rstrip("-_. 0123456789") or first


def _distinction(group: Sequence[Run], groups: Sequence[Sequence[Run]], names: list[str]) -> str:
    name = _common_name(group)
    alike = [flat(g[0].config) for g, other in zip(groups, names, strict=True) if other == name]
    own = flat(group[0].config)
    keys = [
        key
        for key in own
        if key not in ("run.seed", "run.name") and any(a.get(key) != own[key] for a in alike)
    ]
    return ", ".join(f"{key}={own[key]}" for key in keys[:3]) + (", ..." if len(keys) > 3 else "")


_METHOD_COLOURS = {
    "quickstart": "#0072B2",
    "desloc_adam": "#009E73",
    "desloc_sgdm": "#56B4E9",
    "local_adopt": "#D55E00",
    "local_adam": "#B8860B",
    "favg_keep_opt": "#CC79A7",
    "favg_reset_opt": "#882255",
    "ddp": "#222222",
    "diloco": "#332288",
    "fedavg": "#999933",
    "fedadam": "#8A8A8A",
}
"""Of the presets: told apart with any colour vision, in the order in which one compares them."""


def _colours(names: Sequence[str]) -> list[str]:
    free = [c for name, c in _METHOD_COLOURS.items() if name not in names]
    taken: set[str] = set()
    colours = []
    for index, name in enumerate(names):
        own = _METHOD_COLOURS.get(name)
        if own is None or own in taken:
            own = free.pop(0) if free else list(_METHOD_COLOURS.values())[index % 11]
        taken.add(own)
        colours.append(own)
    return colours
