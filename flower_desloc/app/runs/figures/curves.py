"""Curves from the lines of a run: the data of every figure, as plain arrays."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flower_desloc.app.runs.folder import evaluations
from flower_desloc.app.runs.record import RunRecord

Array = NDArray[np.float64]
Point = tuple[float, float | None]

_MAX_POINTS = 400


@dataclass(frozen=True)
class Curve:
    """Values against local steps or another quantity; NaN where not finite."""

    x: Array
    y: Array

    @classmethod
    def of(cls, points: Iterable[Point]) -> "Curve":
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
        """The last finite point."""
        index = np.flatnonzero(np.isfinite(self.y))[-1]
        return float(self.x[index]), float(self.y[index])

    def thinned(self) -> "Curve":
        """Return the means of blocks, if the curve has more points than can be seen."""
        size = -(-len(self.x) // _MAX_POINTS)
        if size <= 1:
            return self
        ends = range(0, len(self.x), size)
        blocks = [(self.x[i : i + size], self.y[i : i + size]) for i in ends]
        return Curve.of(
            (float(x.mean()), float(np.nanmean(y)) if np.isfinite(y).any() else None)
            for x, y in blocks
        )


def aligned(curves: Iterable[Curve], *, interpolate: bool = False) -> pd.DataFrame:
    """Return one column for each curve, by step; NaN where a curve has no value.

    The steps are those that any curve has. With ``interpolate`` they are only those that all curves
    span: with coins, no two seeds are evaluated after the same steps.
    """
    # A client may state a step twice; the last value counts.
    columns = [pd.Series(curve.y, curve.x).groupby(level=0).last() for curve in curves]
    if not columns:
        return pd.DataFrame(dtype=np.float64)
    table = pd.concat(columns, axis=1).sort_index().dropna(how="all")
    if interpolate:
        table = table.interpolate("index", limit_area="inside").dropna()
    return table


def mean(curves: Iterable[Curve]) -> Curve:
    """Return the mean of the curves at each step that any of them has."""
    means = aligned(curves).mean(axis=1)
    return Curve(means.index.to_numpy(), means.to_numpy())


def heldout(run: RunRecord, metric: str, where: str | None = None) -> Curve:
    """Return a held-out metric of the averaged model by step."""
    where = where or run.where
    return Curve.of(
        (step, each["overall"].get(metric)) for step, each in evaluations(run.lines, where)
    )


def heldout_parts(run: RunRecord, metric: str, where: str) -> dict[str, Curve]:
    """Return the same for each domain (``central``) or client (``federated``)."""
    points: dict[str, list[Point]] = {}
    for step, evaluation in evaluations(run.lines, where):
        for name, metrics in evaluation["parts"].items():
            points.setdefault(name, []).append((step, metrics.get(metric)))
    return _curves(points)


def common_metric(runs: Sequence[RunRecord]) -> str:
    """Return what clients and domains are compared by: ``accuracy`` if all runs have it."""
    accuracies = [run.final("accuracy") is not None for run in runs]
    return "accuracy" if accuracies and all(accuracies) else "loss"


def reported(run: RunRecord, what: str) -> dict[str, Curve]:
    """Return what each client reported: ``losses`` by step, ``update_norm`` by window, ..."""
    points: dict[str, list[Point]] = {name: [] for name in run.clients}
    for line in run.windows:
        for name, client in line["clients"].items():
            value = client.get(what)
            by_step = enumerate(value, line["start"] + 1) if isinstance(value, list) else None
            points[name].extend(by_step or [(line["step"], value)])
    return _curves(points)


def drift(run: RunRecord) -> dict[str, Curve]:
    """Return the relative drift of each stream at each of its averages: spread / norm.

    The spread is the root mean square over clients of the distance to their mean.
    """
    return _curves(
        {
            stream: [(step, _ratio(d["spread"], d["norm"])) for step, d in _drifts(run, stream)]
            for stream in run.streams
        }
    )


def rate_of_change(run: RunRecord) -> dict[str, Curve]:
    """Return the relative rate of change of each stream, |mean - last mean| / |last mean|.

    The paper's measure (section 4.1), from the second average on: before the first, states are
    zero.
    """
    return _curves(
        {
            stream: [
                (step, _ratio(after["moved"], before["norm"]))
                for (_, before), (step, after) in pairwise(_drifts(run, stream))
            ]
            for stream in run.streams
        }
    )


def sent(run: RunRecord) -> Curve:
    """Return the bytes that all clients together have sent up, by step."""
    up = [sum(line["bytes_up"].values()) for line in run.lines]
    return Curve.of(zip([line["step"] for line in run.lines], np.cumsum(up), strict=True))


def at(curve: Curve, steps: Array) -> Array:
    """Return a cumulative ``curve`` at ``steps``, the last value of each step."""
    index = np.searchsorted(curve.x, steps, side="right") - 1
    return curve.y[np.maximum(index, 0)] if curve.x.size else np.zeros(len(steps))


def _curves(points: Mapping[str, Iterable[Point]]) -> dict[str, Curve]:
    """Return the curves that have a finite value."""
    return {name: curve for name, each in points.items() if (curve := Curve.of(each))}


def _drifts(run: RunRecord, stream: str) -> list[tuple[int, Mapping[str, Any]]]:
    return [
        (line["step"], line["drift"][stream])
        for line in run.windows
        if line.get("drift", {}).get(stream)
    ]


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None  # zero has no logarithm
