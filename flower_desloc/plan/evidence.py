"""What DES-LOC's rare averages cost: the gaps to Local that were measured (docs/ladder.md)."""

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from flower_desloc.core.schedule import PARAMS
from flower_desloc.plan.planned_run import PlannedRun

MEASURED: Final = Path(__file__).with_name("measured.json")
"""Written by ``python benchmarks/ladder.py draw``."""

NEAR: Final = 4
"""Distance up to which a measurement says something of a run."""


@dataclass(frozen=True)
class MeasuredGap:
    """Held-out loss of DES-LOC above Local with the same optimizer, paired by seed, in per cent."""

    optimizer: str
    partition: str
    params: int
    tokens: int
    """A worker and step."""
    steps: int
    seeds: int
    loss: float
    low: float
    """Lower end of the 95 % interval."""
    high: float

    def distance(self, run: PlannedRun) -> float:
        """Return the factor between the models if the batches are equal, or the reverse; from 1."""
        assert run.tokens is not None
        ratios = self.params / run.num_params, self.tokens * run.workers / run.tokens
        return math.exp(math.hypot(*map(math.log, ratios)))


@lru_cache(maxsize=1)
def measured() -> tuple[MeasuredGap, ...]:
    """Return every measured gap."""
    return tuple(MeasuredGap(**each) for each in json.loads(MEASURED.read_text()))


def nearest(run: PlannedRun, number: int = 3) -> list[MeasuredGap]:
    """Return the measurements with the run's optimizer nearest to its size and batch.

    Empty for a run without tokens, with another optimizer, or that averages all streams together.
    """
    together = len({run.periods[s.name] for s in run.moments} | {run.periods[PARAMS]}) == 1
    if run.tokens is None or together:
        return []
    name = "adam" if run.optimizer == "adamw" else run.optimizer
    found = [gap for gap in measured() if gap.optimizer == name]
    return sorted(found, key=lambda gap: gap.distance(run))[:number]
