"""Groups of runs that differ only in their seed, for comparisons."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from statistics import fmean, stdev
from typing import Any

from flower_desloc.app.runs.record import RunRecord

NOT_COMPARED = ("run.seed", "run.name")
"""Settings that may differ within a group."""
COLOURS = {
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
"""Preset -> its colour in every report; another gets one that is free in its report. The colours
suit any colour vision."""


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation of the finite numbers among ``count`` values."""

    mean: float | None
    std: float | None
    """None for a single number."""
    numbers: int
    """Number of finite values."""
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread":
        """Return the spread of ``values``; None is a value that was not finite.

        >>> Spread.of([1.0, 3.0, None])
        Spread(mean=2.0, std=1.4142135623730951, numbers=2, count=3)
        """
        values = list(values)
        numbers = [value for value in values if value is not None]
        mean = fmean(numbers) if numbers else None
        return cls(mean, stdev(numbers) if len(numbers) > 1 else None, len(numbers), len(values))

    def text(self, digits: int) -> str:
        """Return mean ± standard deviation, and of how many values if some are not finite.

        >>> Spread.of([1.0, 3.0]).text(2), Spread.of([1.0, None]).text(1), Spread.of([]).text(1)
        ('2.00 ± 1.41', '1.0 (1 of 2)', '')
        """
        if self.mean is None:
            return ""
        text = f"{self.mean:.{digits}f}"
        if self.std is not None:
            text += f" ± {self.std:.{digits}f}"
        partly = self.numbers < self.count
        return f"{text} ({self.numbers} of {self.count})" if partly else text


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ only in seed and name; one row and one line in a comparison."""

    label: str
    colour: str
    runs: Sequence[RunRecord]

    @property
    def counted(self) -> Sequence[RunRecord]:
        """The runs whose final values count: the completed ones; all, if none completed."""
        return [run for run in self.runs if run.status == "completed"] or self.runs

    def final(self, metric: str) -> Spread:
        """Return the final value of a held-out metric over the runs."""
        return Spread.of(run.final(metric) for run in self.counted)


def grouped(runs: Sequence[RunRecord]) -> list[SeedGroup]:
    """Return the runs in groups that differ only in their seed, each with label and colour.

    The label is the common name of the runs; groups with the same name are distinguished by the
    settings in which they differ.
    """
    by_settings: dict[str, list[RunRecord]] = {}
    for run in runs:
        by_settings.setdefault(json.dumps(_compared(run), default=str), []).append(run)
    groups = list(by_settings.values())
    names = [_common_name(group) for group in groups]
    labels = []
    for name, group in zip(names, groups, strict=True):
        same_name = [g for g, other in zip(groups, names, strict=True) if other == name]
        labels.append(f"{name} {_difference(group, same_name)}".strip())
    return [*map(SeedGroup, labels, _colours(names), groups)]


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings by dotted key, as on the command line.

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


def differing(runs: Sequence[RunRecord]) -> list[str]:
    """Return the settings in which runs differ, but for seed and name."""
    compared = [_compared(run) for run in runs]
    keys = sorted({key for each in compared for key in each})
    return [key for key in keys if any(each.get(key) != compared[0].get(key) for each in compared)]


def _compared(run: RunRecord) -> dict[str, Any]:
    return {k: v for k, v in sorted(flat(run.config).items()) if k not in NOT_COMPARED}


def _common_name(group: Sequence[RunRecord]) -> str:
    names = {run.name for run in group}
    if len(names) == 1:
        return names.pop()
    return commonprefix([*names]).rstrip("-_. 0123456789") or min(names)  # noqa: RUF071


def _difference(group: Sequence[RunRecord], same_name: Sequence[Sequence[RunRecord]]) -> str:
    others = [_compared(other[0]) for other in same_name]
    own = flat(group[0].config)
    keys = [k for k in own if k not in NOT_COMPARED and any(o.get(k) != own[k] for o in others)]
    return ", ".join(f"{key}={own[key]}" for key in keys[:3]) + (", ..." if len(keys) > 3 else "")


def _colours(names: Sequence[str]) -> list[str]:
    free = [colour for name, colour in COLOURS.items() if name not in names]
    colours: list[str] = []
    for index, name in enumerate(names):
        own = COLOURS.get(name)
        if own is None or own in colours:
            own = free.pop(0) if free else [*COLOURS.values()][index % len(COLOURS)]
        colours.append(own)
    return colours
