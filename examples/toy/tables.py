"""Tables of the toy's runs and of its search."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from rich.table import Table

from examples.toy.problem import SPLITS, Reals, distance
from examples.toy.runs import ToyResults
from examples.toy.search import CONVERGED, MARGIN, best, groups, to_setting, verdict
from examples.toy.setting import METHODS

SPLIT_NAMES = {"iid": "IID", "niid": "non-IID"}


@dataclass(frozen=True)
class FinalDistance:
    """Final distance of one method to the optimum on one split, mean and std over seeds."""

    split: str
    method: str
    federated: tuple[float, float]
    """After the last round through Flower."""
    same_round: tuple[float, float]
    """After the same round, by transcription."""
    last: tuple[float, float]
    """Mean over the second half of the rounds, by transcription, as are the next two."""
    offset: tuple[float, float]
    """Distance from the optimum to the centre of those averages."""
    sway: tuple[float, float]
    """Standard deviation of those averages about their centre."""


def final_distances(results: ToyResults) -> list[FinalDistance]:
    """Return the final distance of every method on every split."""
    found = []
    rounds = results.size.rounds
    for j, split in enumerate(SPLITS):
        for method in METHODS:
            # (rounds, seeds)
            federated = distance(results.federated[method][:, :, j].swapaxes(0, 1))
            points = results.averages[method][:, :, j].swapaxes(0, 1)
            transcribed, late = distance(points), points[:, points.shape[1] // 2 :]
            found.append(
                FinalDistance(
                    split=split,
                    method=method,
                    federated=_moments(federated[rounds]),
                    same_round=_moments(transcribed[min(rounds, len(transcribed) - 1)]),
                    last=_moments(distance(late).mean(axis=0)),
                    offset=_moments(distance(late.mean(axis=1))),
                    sway=_moments(np.sqrt(late.var(axis=1).sum(axis=0))),
                )
            )
    return found


def distances_table(found: Sequence[FinalDistance], results: ToyResults) -> Table:
    """Return the table of final distances."""
    size = results.size
    table = _table(
        "Distance to the optimum, mean ± std over seeds",
        ["split", "method"],
        [
            f"round {size.rounds}, Flower",
            f"round {min(size.rounds, size.transcribed)}, transcribed",
            f"second half of {size.transcribed} rounds",
            "of which offset",
            "sway",
        ],
    )
    for row in found:
        pairs = (row.federated, row.same_round, row.last, row.offset, row.sway)
        numbers = (f"{mean:.3f} ± {std:.3f}" for mean, std in pairs)
        table.add_row(SPLIT_NAMES[row.split], METHODS[row.method].name, *numbers)
    return table


def verdicts_table(rows: pd.DataFrame) -> Table:
    """Return the table of how often the paper's claims hold."""
    table = _table(
        f"Settings at which DES-LOC ends within {CONVERGED:g} of the optimum; of those, settings "
        f"at which another method ends more than {MARGIN:.0%} farther or closer",
        ["settings", "split"],
        ["converged", "Local Adam equal", "kept: farther, closer", "reset: farther, closer"],
    )
    for name, some in groups(rows):
        for split in SPLITS:
            count = verdict(some, split)
            table.add_row(
                name,
                SPLIT_NAMES[split],
                str(count["converged"]),
                str(count["as_local_adam"]),
                f"{count['kept_farther']}, {count['kept_closer']}",
                f"{count['reset_farther']}, {count['reset_closer']}",
            )
    return table


def best_table(rows: pd.DataFrame) -> Table:
    """Return the table of the smallest distance of every method, and its setting."""
    table = _table("Closest over all settings", ["split", "method", "distance", "setting"], [])
    for row in best(rows):
        distance = f"{row['distance']:.4f} ± {row['spread']:.4f}"
        names = (SPLIT_NAMES[row["split"]], METHODS[row["method"]].name)
        table.add_row(*names, distance, to_setting(row).describe())
    return table


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    left: dict[str, Any] = {"title_justify": "left"}
    table = Table(title=title, **left)
    for name in texts:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _moments(by_seed: Reals) -> tuple[float, float]:
    return float(by_seed.mean()), float(by_seed.std())
