"""Measured cost of DES-LOC's rare averages: loss above that of Local (docs/ladder.md)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from flower_desloc.core.schedule import PARAMS, Period
from flower_desloc.plan.measured import GAPS

NEAR: Final = 4
"""Distance up to which a measurement says something of a run."""

PERIOD: Final = 16
"""K_x of all measurements."""


@dataclass(frozen=True)
class MeasuredGap:
    """Held-out loss of DES-LOC above Local with the same optimizer, paired by seed, in per cent."""

    preset: str
    """Whose periods, bound and formats it had: ``desloc_adam``, ``desloc_adopt`` or ``lean``."""
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

    def distance(self, num_params: float, tokens: float, period: int) -> float:
        """Return by what factor a run differs in size, a worker's batch or K_x; 1 is equal."""
        ratios = self.params / num_params, self.tokens / tokens, PERIOD / period
        return math.exp(math.hypot(*map(math.log, ratios)))


@lru_cache(maxsize=1)
def measured() -> tuple[MeasuredGap, ...]:
    """Return every measured gap."""
    return tuple(MeasuredGap(*each) for each in GAPS)


def nearest(
    optimizer: str,
    periods: Mapping[str, Period],
    num_params: float,
    tokens: float,
    *,
    bound: bool,
) -> list[tuple[float, MeasuredGap]]:
    """Return the measurements with this optimizer, each with its distance, the nearest first.

    ``tokens`` are those of a worker and step. A run that averages the first moment with the
    parameters is compared with ``lean``, others with ``desloc_adam`` and ``desloc_adopt``. Empty
    for Adam without a bound there (``sync_bound``), which can spike, and for runs that average all
    streams together, or never the parameters.
    """
    period = periods.get(PARAMS)
    if not isinstance(period, int) or len(set(periods.values())) == 1:
        return []
    name = "adam" if optimizer == "adamw" else optimizer
    is_lean = periods.get("exp_avg") == period
    if is_lean and name == "adam" and not bound:
        return []
    found = [g for g in measured() if g.optimizer == name and (g.preset == "lean") == is_lean]
    apart = [(gap.distance(num_params, tokens, period), gap) for gap in found]
    return sorted(apart, key=lambda each: each[0])
