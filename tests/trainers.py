"""Federations of clients whose loop is another library's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from federation import assert_same
from flower_path import Grid
from torch import Tensor, nn

from flower_desloc import DesLoc, Observer, SyncSchedule, to_record

STEPS = 12
EVERY_STEP = {"params": 1, "exp_avg": 1, "exp_avg_sq": 1}
DESYNCED = {"params": 2, "exp_avg": 4, "exp_avg_sq": 8}
RARELY = {"params": 4, "exp_avg": 6, "exp_avg_sq": 12}
"""Of these windows one ends with an epoch, if that has three or six steps."""

ABSENCES: dict[str, Callable[[int, int], bool]] = {
    "nobody": lambda m, step: m == 2,
    "some": lambda m, step: (m == 1 and step == 2) or (m == 2 and step < 4),
}


class After(Observer):
    def __init__(self, *acts: Callable[[int], object]) -> None:
        self.acts = acts

    def window(self, record: Any) -> None:
        for act in self.acts:
            act(record.step)


def disturb(step: int) -> None:
    """Draw from the global generators, as other clients and the server in a process may."""
    torch.manual_seed(step)
    np.random.seed(step)


def federated(
    app: Any,
    folder: Path,
    periods: dict[str, int],
    start: nn.Module,
    num_clients: int = 1,
    after: Callable[[int], object] = disturb,
    num_steps: int = STEPS,
    absent: Callable[[int, int], bool] = lambda m, step: False,
    **options: Any,
) -> dict[str, dict[str, Tensor]]:
    """Return the last averages."""
    grid = Grid(app, num_clients, folder / "state")

    def leave(step: int) -> None:
        grid.away = {m for m in range(num_clients) if absent(m, step)}

    leave(0)
    strategy = DesLoc(SyncSchedule(periods), num_steps, run_key="run", **options)
    strategy.start(grid, to_record(start.state_dict()), observer=After(leave, after))
    return {name: dict(strategy.state.average(name)) for name in periods}


def assert_equal(one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert_same(one[name], other[name])
