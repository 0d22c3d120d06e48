"""What the toy's runs and its search come to, in numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from examples.toy.problem import SPLITS, Reals, distance
from examples.toy.runs import Ways
from examples.toy.search import CONVERGED, MARGIN, Row, Verdict
from examples.toy.setting import METHODS, Setting

SPLIT_NAMES = {"iid": "IID", "niid": "non-IID"}


@dataclass(frozen=True)
class End:
    """Where one method ended on one split: distances to the optimum, mean and std over seeds."""

    split: str
    method: str
    federated: tuple[float, float]
    """After the last round through Flower."""
    same_round: tuple[float, float]
    """The same round, transcribed."""
    last: tuple[float, float]
    """Mean over the second half of the rounds, transcribed, as are the next two."""
    offset: tuple[float, float]
    """Distance from the optimum to the middle of those averages."""
    sway: tuple[float, float]
    """Standard deviation of those averages about their middle."""


def ends(ways: Ways) -> list[End]:
    """Return where every method ended."""
    found = []
    rounds = ways.size.rounds
    for j, split in enumerate(SPLITS):
        for method in METHODS:
            # (rounds, seeds)
            through = distance(ways.federated[method][:, :, j].swapaxes(0, 1))
            points = ways.averages[method][:, :, j].swapaxes(0, 1)
            transcribed, late = distance(points), points[:, points.shape[1] // 2 :]
            found.append(
                End(
                    split=split,
                    method=method,
                    federated=_moments(through[rounds]),
                    same_round=_moments(transcribed[min(rounds, len(transcribed) - 1)]),
                    last=_moments(distance(late).mean(axis=0)),
                    offset=_moments(distance(late.mean(axis=1))),
                    sway=_moments(np.sqrt(late.var(axis=1).sum(axis=0))),
                )
            )
    return found


def ends_table(found: Sequence[End], ways: Ways) -> Table:
    """Return the table of where every method ended, as it is printed."""
    size = ways.size
    table = Table(title="Distance to the optimum, mean ± std over seeds", title_justify="left")
    for name in ("split", "method"):
        table.add_column(name)
    for name in (
        f"round {size.rounds}, Flower",
        f"round {min(size.rounds, size.transcribed)}, transcribed",
        f"second half of {size.transcribed} rounds",
        "of which offset",
        "sway",
    ):
        table.add_column(name, justify="right")
    for end in found:
        pairs = (end.federated, end.same_round, end.last, end.offset, end.sway)
        numbers = (f"{mean:.3f} ± {std:.3f}" for mean, std in pairs)
        table.add_row(SPLIT_NAMES[end.split], METHODS[end.method].name, *numbers)
    return table


def verdicts_table(named: Sequence[tuple[str, Verdict]]) -> Table:
    """Return the table of the settings at which the paper's claims hold."""
    table = Table(
        title=f"Settings at which DES-LOC ends within {CONVERGED:g} of the optimum, and of those, "
        f"at which another ends more than {MARGIN:.0%} farther off or closer",
        title_justify="left",
    )
    for name in ("settings", "split", "of them", "Local Adam as far"):
        table.add_column(name, justify="right" if name == "of them" else "left")
    for method in ("favg_keep_opt", "favg_reset_opt"):
        table.add_column(f"{METHODS[method].name}: farther, closer")
    for name, verdict in named:
        counts = (
            f"{verdict.farther[m]}, {verdict.closer[m]}"
            for m in ("favg_keep_opt", "favg_reset_opt")
        )
        split = SPLIT_NAMES[verdict.split]
        table.add_row(name, split, str(verdict.settings), str(verdict.as_local_adam), *counts)
    return table


def best_table(rows: Sequence[Row]) -> Table:
    """Return the table of how close every method comes under the setting that suits it best."""
    table = Table(title="Closest over all settings", title_justify="left")
    for name in ("split", "method", "distance", "setting"):
        table.add_column(name)
    for row in rows:
        setting = Setting(row.rule, row.lr, (row.beta1, row.beta2), row.clip)
        distance = f"{row.distance:.4f} ± {row.spread:.4f}"
        table.add_row(
            SPLIT_NAMES[row.split], METHODS[row.method].name, distance, setting.describe()
        )
    return table


def _moments(by_seed: Reals) -> tuple[float, float]:
    return float(by_seed.mean()), float(by_seed.std())
