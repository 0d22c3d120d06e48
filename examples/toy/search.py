"""The search: how far from the optimum every method ends, over a grid of hyper-parameters."""

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.toy.problem import SPLITS, distance
from examples.toy.runs import processes
from examples.toy.setting import K_X, METHODS, NUM_WORKERS, Rule, Setting
from examples.toy.transcription import noise, transcribe

LAST = 8
"""Rounds at the end whose mean distance is measured: two K_v and more."""
CONVERGED = 0.2
"""A distance at which a method has arrived; it starts at 2.2."""
MARGIN = 0.2
"""Of two distances that count as one, the share by which the larger may exceed the other."""

_OTHERS = ("favg_keep_opt", "favg_reset_opt")


@dataclass(frozen=True)
class Grid:
    """What is searched, and for how long."""

    rules: Sequence[tuple[Rule, float | None]] = (("adam", None), ("adam", 5.0), ("adopt", 5.0))
    """Optimizer and clipping."""
    beta1: Sequence[float] = (0.9, 0.95, 0.99, 0.995, 0.998)
    beta2: Sequence[float] = (0.99, 0.999, 0.9999)
    rates: Sequence[float] = (0.01, 0.03, 0.1, 0.3, 1.0)
    workers: int = NUM_WORKERS
    rounds: int = 32
    seeds: int = 4

    def lines(self) -> list[list[Setting]]:
        """Return the settings; those of a line differ in their learning rate alone."""
        return [
            [Setting(rule, lr, (beta1, beta2), clip) for lr in self.rates]
            for (rule, clip), beta1, beta2 in product(self.rules, self.beta1, self.beta2)
        ]


@dataclass(frozen=True)
class Row:
    """Where one method ended under one setting."""

    rule: Rule
    clip: float | None
    beta1: float
    beta2: float
    lr: float
    split: str
    method: str
    distance: float
    """Mean over the last rounds and the seeds; infinite if a run diverged."""
    spread: float
    """Standard deviation of the seeds' means."""


def search(grid: Grid, jobs: int) -> Iterator[list[Row]]:
    """Search ``grid``; yield the rows of a line and a method as they are done."""
    parts = [(line, method, grid) for line in grid.lines() for method in METHODS]
    with processes(jobs) as pool:
        yield from pool.imap_unordered(_part, parts)


def num_parts(grid: Grid) -> int:
    """Return how often :func:`search` yields."""
    return len(grid.lines()) * len(METHODS)


def write(rows: Iterable[Row], path: Path) -> None:
    """Write rows as CSV, in an order that does not depend on who was first."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        for row in sorted(rows, key=lambda row: tuple(map(str, asdict(row).values()))):
            writer.writerow({k: _text(v) for k, v in asdict(row).items()})


@dataclass(frozen=True)
class Verdict:
    """At how many settings a claim of the paper holds on one split."""

    split: str
    settings: int
    """At which DES-LOC ends within :data:`CONVERGED` of the optimum."""
    as_local_adam: int
    """Of those, at which it ends within :data:`MARGIN` of Local Adam."""
    farther: dict[str, int]
    """Method -> at which it ends farther off than DES-LOC, by more than the margin."""
    closer: dict[str, int]
    """The same, closer by more than the margin."""


def verdicts(rows: Iterable[Row]) -> list[Verdict]:
    """Count where the claims hold, on each split."""
    ends = _ends(rows)
    found = []
    for split in SPLITS:
        there = [
            {method: end / by["desloc"] for method, end in by.items()}
            for (where, *_), by in ends.items()
            if where == split and by["desloc"] < CONVERGED
        ]
        found.append(
            Verdict(
                split=split,
                settings=len(there),
                as_local_adam=sum(_same(ratios["local_adam"]) for ratios in there),
                farther={m: sum(ratios[m] > 1 + MARGIN for ratios in there) for m in _OTHERS},
                closer={m: sum(ratios[m] < 1 / (1 + MARGIN) for ratios in there) for m in _OTHERS},
            )
        )
    return found


def where_all_hold(rows: Iterable[Row]) -> list[Setting]:
    """Return the settings at which, on both splits, all is as the paper says.

    That is: DES-LOC converges and ends where Local Adam does, the others farther off.
    """
    held: dict[tuple[Any, ...], bool] = {}
    for (_, *setting), by in _ends(rows).items():
        desloc = by["desloc"]
        holds = (
            desloc < CONVERGED
            and _same(by["local_adam"] / desloc)
            and all(by[method] > (1 + MARGIN) * desloc for method in _OTHERS)
        )
        held[*setting] = held.get((*setting,), True) and holds
    return [
        Setting(rule, lr, (beta1, beta2), clip)
        for (rule, clip, beta1, beta2, lr), holds in held.items()
        if holds
    ]


def best(rows: Iterable[Row]) -> list[Row]:
    """Return for each split and method the row that ends closest to the optimum."""
    closest: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = (row.split, row.method)
        if key not in closest or row.distance < closest[key].distance:
            closest[key] = row
    keys = [(split, method) for split in SPLITS for method in METHODS]
    return [closest[key] for key in keys if key in closest]


def _ends(rows: Iterable[Row]) -> dict[tuple[Any, ...], dict[str, float]]:
    # (split, setting) -> method -> distance
    ends: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        key = (row.split, row.rule, row.clip, row.beta1, row.beta2, row.lr)
        ends.setdefault(key, {})[row.method] = row.distance
    return ends


def _same(ratio: float) -> bool:
    return 1 / (1 + MARGIN) <= ratio <= 1 + MARGIN


def groups(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yield all rows, and those of every optimizer, learning rate and beta1, with their names."""
    yield "all", list(rows)
    for clip, rule in sorted({(row.clip or 0.0, row.rule) for row in rows}):
        clipped = f", ±{clip:g}" if clip else ""
        yield f"{rule}{clipped}", [r for r in rows if (r.clip or 0.0, r.rule) == (clip, rule)]
    for lr in sorted({row.lr for row in rows}):
        yield f"lr {lr:g}", [row for row in rows if row.lr == lr]
    for beta1 in sorted({row.beta1 for row in rows}):
        yield f"β₁ {beta1:g}", [row for row in rows if row.beta1 == beta1]


def _part(job: tuple[list[Setting], str, Grid]) -> list[Row]:
    settings, method, grid = job
    noises = _noise(grid.workers, grid.rounds, grid.seeds)
    course = transcribe(settings, METHODS[method], noises)
    # (rounds, settings, splits, seeds)
    away = distance(course.averages[-LAST:].swapaxes(0, 1))
    rows = []
    for i, setting in enumerate(settings):
        for j, split in enumerate(SPLITS):
            by_seed = away[:, i, j].mean(axis=0)
            finite = math.isfinite(by_seed.sum())
            rows.append(
                Row(
                    rule=setting.rule,
                    clip=setting.clip,
                    beta1=setting.betas[0],
                    beta2=setting.betas[1],
                    lr=setting.lr,
                    split=split,
                    method=method,
                    distance=float(by_seed.mean()) if finite else math.inf,
                    spread=float(by_seed.std()) if finite else math.inf,
                )
            )
    return rows


@cache
def _noise(workers: int, rounds: int, seeds: int) -> list[Tensor]:
    # Drawn once in every process, and in single precision: it is the same for all.
    return list(noise(workers, K_X * rounds, range(seeds), torch.float32))


def _text(cell: object) -> object:
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return "" if cell is None else cell
