"""From the lines of a run to curves: what every figure draws, as plain arrays."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_desloc.runs.metrics import Line
from flower_desloc.runs.units import loss_text, percent_text
from flower_desloc.runs.loaded import Run

Array = NDArray[np.float64]

_MOST_POINTS = 400


@dataclass(frozen=True)
class Curve:
    """Values against local steps, or against what else ``x`` counts; NaN where not finite."""

    x: Array
    y: Array

    @classmethod
    def of(cls, points: Iterable[tuple[float, float | None]]) -> "Curve":
        """Return the curve through ``points``; None is NaN."""
        points = list(points)
        return cls(
            np.array([x for x, _ in points], dtype=np.float64),
            np.array([np.nan if y is None else y for _, y in points], dtype=np.float64),
        )

    def __bool__(self) -> bool:
        return bool(np.isfinite(self.y).any())

    @property
    def last(self) -> tuple[float, float]:
        """The last point that is finite."""
        index = np.flatnonzero(np.isfinite(self.y))[-1]
        return float(self.x[index]), float(self.y[index])

    def against(self, x: Array) -> "Curve":
        """Return the same values against ``x``."""
        return Curve(x, self.y)

    def thinned(self) -> "Curve":
        """Return the curve by means of blocks, where it has more points than one can see."""
        size = -(-len(self.x) // _MOST_POINTS)
        if size <= 1:
            return self
        ends = range(0, len(self.x), size)
        blocks = [(self.x[i : i + size], self.y[i : i + size]) for i in ends]
        return Curve.of([(float(x.mean()), _mean(y)) for x, y in blocks])


@dataclass(frozen=True)
class Band:
    """Several curves on the steps that any of them has."""

    x: Array
    rows: Array
    """Curves x steps; NaN where a curve has no value."""

    @classmethod
    def of(cls, curves: Sequence[Curve]) -> "Band":
        """Align the curves."""
        x = np.unique(np.concatenate([curve.x for curve in curves] or [np.empty(0)]))
        rows = np.full((len(curves), len(x)), np.nan)
        for row, curve in zip(rows, curves, strict=True):
            row[np.searchsorted(x, curve.x)] = curve.y
        there = np.isfinite(rows).any(axis=0)
        return cls(x[there], rows[:, there])

    def between(self) -> "Band":
        """Return the steps that all curves span, with straight lines between their own points.

        With coins no two seeds are evaluated after the same steps.
        """
        own = [np.isfinite(row) for row in self.rows]
        begin = max((self.x[there][0] for there in own), default=0.0)
        end = min((self.x[there][-1] for there in own), default=0.0)
        x = self.x[(self.x >= begin) & (self.x <= end)]
        rows = [
            np.interp(x, self.x[there], row[there])
            for row, there in zip(self.rows, own, strict=True)
        ]
        return Band(x, np.array(rows).reshape(len(rows), len(x)))

    def mean(self) -> Curve:
        """Return the mean over the curves that have a value."""
        return Curve(self.x, np.nanmean(self.rows, axis=0)) if self.x.size else _NOTHING

    def std(self) -> Array:
        """Return the sample standard deviation at each step; 0 where there is one value."""
        count = np.isfinite(self.rows).sum(axis=0)
        squares = np.nansum((self.rows - np.nanmean(self.rows, axis=0)) ** 2, axis=0)
        return np.asarray(np.sqrt(squares / np.maximum(count - 1, 1)))

    def quantiles(self, *shares: float) -> list[Array]:
        """Return the quantiles over curves at each step."""
        return [np.asarray(q) for q in np.nanquantile(self.rows, shares, axis=0)]


_NOTHING = Curve(np.empty(0), np.empty(0))


def mean(curves: Iterable[Curve]) -> Curve:
    """Return the mean of the curves at each step that any of them has."""
    return Band.of(list(curves)).mean()


def evaluations(run: Run, where: str) -> list[tuple[Line, Mapping[str, Any]]]:
    """Return the lines with an evaluation, and the evaluation."""
    return [
        (line, line["evaluation"][where])
        for line in run.lines
        if where in line.get("evaluation", {})
    ]


def heldout(run: Run, metric: str, where: str | None = None) -> Curve:
    """Return a held-out metric of the averaged model, by step."""
    return Curve.of(
        (line["step"], evaluation["overall"].get(metric))
        for line, evaluation in evaluations(run, where or run.where)
    )


def heldout_parts(run: Run, metric: str, where: str) -> dict[str, Curve]:
    """Return the same by domain (``central``) or client (``federated``)."""
    seen = evaluations(run, where)
    names = dict.fromkeys(name for _, evaluation in seen for name in evaluation["parts"])
    curves = {
        name: Curve.of(
            (line["step"], evaluation["parts"][name].get(metric))
            for line, evaluation in seen
            if name in evaluation["parts"]
        )
        for name in names
    }
    return {name: curve for name, curve in curves.items() if curve}


def measure(runs: Sequence[Run]) -> str:
    """Return by what clients and domains are compared: ``accuracy`` where there is one."""
    accuracies = [run.final("accuracy") is not None for run in runs]
    return "accuracy" if accuracies and all(accuracies) else "loss"


def told(value: float, metric: str) -> str:
    """Return a metric's value as text."""
    return percent_text(value) if metric == "accuracy" else loss_text(value)


def by_step(run: Run, what: str) -> dict[str, Curve]:
    """Return what each client reported of every step: ``losses``, ``grad_norms``, ..."""
    points: dict[str, list[tuple[float, float | None]]] = {}
    for line in run.windows:
        for name, client in line["clients"].items():
            points.setdefault(name, []).extend(enumerate(client.get(what, ()), line["start"] + 1))
    return {name: curve for name in run.clients if (curve := Curve.of(points.get(name, ())))}


def by_window(run: Run, what: str) -> dict[str, Curve]:
    """Return what each client reported of every window: ``update_norm``, ``param_norm``."""
    points: dict[str, list[tuple[float, float | None]]] = {}
    for line in run.windows:
        for name, client in line["clients"].items():
            points.setdefault(name, []).append((line["step"], client.get(what)))
    return {name: curve for name in run.clients if (curve := Curve.of(points.get(name, ())))}


def drift(run: Run, stream: str) -> Curve:
    """Return a stream's relative drift at each of its averages: spread / norm.

    The spread is the root mean square over clients of the distance to their mean.
    """
    return Curve.of(
        (line["step"], _ratio(drift["spread"], drift["norm"]))
        for line in run.windows
        if (drift := line.get("drift", {}).get(stream))
    )


def rate_of_change(run: Run, stream: str) -> Curve:
    """Return a stream's relative rate of change, |mean - last mean| / |last mean|.

    The paper's measure (section 4.1), from the second average on: before the first, states are
    zero.
    """
    seen = [
        (line["step"], drift)
        for line in run.windows
        if (drift := line.get("drift", {}).get(stream))
    ]
    return Curve.of(
        (step, _ratio(after["moved"], before["norm"]))
        for (_, before), (step, after) in pairwise(seen)
    )


def sent(run: Run) -> Curve:
    """Return the bytes all clients together have sent up, by step."""
    up = [sum(line["bytes_up"].values()) for line in run.lines]
    return Curve.of(zip([line["step"] for line in run.lines], np.cumsum(up), strict=True))


def at(curve: Curve, steps: Array) -> Array:
    """Return a cumulative ``curve`` at ``steps``, the last value of each step."""
    index = np.searchsorted(curve.x, steps, side="right") - 1
    return curve.y[np.maximum(index, 0)] if curve.x.size else np.zeros(len(steps))


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None  # zero has no logarithm


def _mean(values: Array) -> float | None:
    numbers = values[np.isfinite(values)]
    return float(numbers.mean()) if numbers.size else None
