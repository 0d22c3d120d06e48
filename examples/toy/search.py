"""Grid search over hyper-parameters: every method's final distance to the optimum."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from examples.toy.problem import SPLITS, distance
from examples.toy.runs import processes
from examples.toy.setting import K_X, METHODS, NUM_WORKERS, Rule, ToySetting
from examples.toy.transcription import noise, transcribe

LAST = 8
"""Rounds at the end whose mean distance is measured: more than two K_v."""
CONVERGED = 0.2
"""Distance at which a method counts as converged; it starts at 2.2."""
MARGIN = 0.2
"""Two distances count as equal if their ratio is at most 1 + this."""

SETTING = ["rule", "clip", "beta1", "beta2", "lr"]
"""Columns that identify a setting; a clip of 0 is none."""


@dataclass(frozen=True)
class SearchGrid:
    """The settings to search, and the size of each run."""

    rules: Sequence[tuple[Rule, float | None]] = (("adam", None), ("adam", 5.0), ("adopt", 5.0))
    """Optimizer and clipping."""
    beta1: Sequence[float] = (0.9, 0.95, 0.99, 0.995, 0.998)
    beta2: Sequence[float] = (0.99, 0.999, 0.9999)
    rates: Sequence[float] = (0.01, 0.03, 0.1, 0.3, 1.0)
    workers: int = NUM_WORKERS
    rounds: int = 32
    seeds: int = 4

    def batches(self) -> list[list[ToySetting]]:
        """Return the settings; those of a batch differ in their learning rate alone."""
        return [
            [ToySetting(rule, lr, (beta1, beta2), clip) for lr in self.rates]
            for (rule, clip), beta1, beta2 in product(self.rules, self.beta1, self.beta2)
        ]


def search(grid: SearchGrid, jobs: int, console: Console) -> pd.DataFrame:
    """Return a row for each setting, split and method; a bar on ``console`` shows the progress.

    ``distance`` is the mean over the last rounds and the seeds, infinite if a run diverged;
    ``spread`` is the standard deviation of the seeds' means.
    """
    parts = [(batch, method, grid) for batch in grid.batches() for method in METHODS]
    with processes(jobs) as pool:
        done = track(pool.imap(search_part, parts), "batches", len(parts), console=console)
        rows = pd.DataFrame([row for part in done for row in part])
    return rows.sort_values([*SETTING, "split", "method"])


def search_part(job: tuple[list[ToySetting], str, SearchGrid]) -> list[dict[str, Any]]:
    """Return the rows of one batch and method."""
    settings, method, grid = job
    noises = _noise(grid.workers, grid.rounds, grid.seeds)
    course = transcribe(settings, METHODS[method], noises)
    # (rounds, settings, splits, seeds)
    away = distance(course.averages[-LAST:].swapaxes(0, 1))
    rows = []
    for (i, setting), (j, split) in product(enumerate(settings), enumerate(SPLITS)):
        by_seed = away[:, i, j].mean(axis=0)
        finite = math.isfinite(by_seed.sum())
        beta1, beta2 = setting.betas
        rows.append(
            {
                "rule": setting.rule,
                "clip": setting.clip or 0.0,
                "beta1": beta1,
                "beta2": beta2,
                "lr": setting.lr,
                "split": split,
                "method": method,
                "distance": float(by_seed.mean()) if finite else math.inf,
                "spread": float(by_seed.std()) if finite else math.inf,
            }
        )
    return rows


def ratios(rows: pd.DataFrame) -> pd.DataFrame:
    """Return each method's distance as a multiple of DES-LOC's, by split and setting.

    Only the settings at which DES-LOC converges are included.
    """
    ends = rows.pivot(index=["split", *SETTING], columns="method", values="distance")
    ends = ends[ends["desloc"] < CONVERGED]
    return ends.div(ends["desloc"], axis=0)


def verdict(rows: pd.DataFrame, split: str) -> dict[str, int]:
    """Count the settings at which the paper's claims hold on one split."""
    some = ratios(rows)
    some = some[some.index.get_level_values("split") == split]
    kept, reset = some["favg_keep_opt"], some["favg_reset_opt"]
    return {
        "converged": len(some),
        "as_local_adam": int(_equal(some["local_adam"]).sum()),
        "kept_farther": int((kept > 1 + MARGIN).sum()),
        "kept_closer": int((kept < 1 / (1 + MARGIN)).sum()),
        "reset_farther": int((reset > 1 + MARGIN).sum()),
        "reset_closer": int((reset < 1 / (1 + MARGIN)).sum()),
    }


def where_all_hold(rows: pd.DataFrame) -> list[ToySetting]:
    """Return the settings at which all claims of the paper hold on both splits.

    DES-LOC converges and ends as far off as Local Adam; the other methods end farther off.
    """
    some = ratios(rows)
    others = some[["favg_keep_opt", "favg_reset_opt"]].min(axis=1)
    hold = some[_equal(some["local_adam"]) & (others > 1 + MARGIN)]
    both = hold.groupby(SETTING).size() == len(SPLITS)
    return [
        ToySetting(rule, lr, (beta1, beta2), clip or None)
        for rule, clip, beta1, beta2, lr in both[both].index
    ]


def best(rows: pd.DataFrame) -> pd.DataFrame:
    """Return for each split and method the row that ends closest to the optimum."""
    return rows.loc[rows.groupby(["split", "method"])["distance"].idxmin()]


def groups(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield all rows, then those of every optimizer, learning rate and beta1, with a name."""
    yield "all", rows
    for (clip, rule), some in rows.groupby(["clip", "rule"]):
        yield (f"{rule}, ±{clip:g}" if clip else str(rule)), some
    for lr, some in rows.groupby("lr"):
        yield f"lr {lr:g}", some
    for beta1, some in rows.groupby("beta1"):
        yield f"β₁ {beta1:g}", some


def _equal(ratio: pd.Series) -> pd.Series:
    return ratio.between(1 / (1 + MARGIN), 1 + MARGIN)


@cache
def _noise(workers: int, rounds: int, seeds: int) -> list[Tensor]:
    # Drawn once in every process, in single precision, and shared by all settings.
    return list(noise(workers, K_X * rounds, range(seeds), torch.float32))
