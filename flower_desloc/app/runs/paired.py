"""Differences paired by seed, with their 95 % t-intervals."""

import math
from collections.abc import Iterable, Mapping
from statistics import fmean, stdev
from typing import NamedTuple


class Estimate(NamedTuple):
    """A mean over seeds and the reach of its 95 % t-interval, which is infinite for one seed."""

    mean: float
    reach: float = math.nan
    seeds: int = 0

    @classmethod
    def of(cls, values: Iterable[float]) -> "Estimate":
        """Return the estimate from one value for each seed."""
        values = list(values)
        n, reach = len(values), math.inf
        if n > 1:
            # Imported here: it takes half a second.
            from scipy import special

            reach = float(special.stdtrit(n - 1, 0.975)) * stdev(values) / math.sqrt(n)
        return cls(fmean(values) if values else math.nan, reach, n)

    @classmethod
    def between(cls, ours: Mapping[int, float], theirs: Mapping[int, float]) -> "Estimate":
        """Return by how much values exceed those of the same seeds."""
        both = sorted(ours.keys() & theirs.keys())
        return cls.of(ours[seed] - theirs[seed] for seed in both)

    @classmethod
    def above(cls, ours: Mapping[int, float], theirs: Mapping[int, float]) -> "Estimate":
        """Return the same in per cent."""
        return cls.of(differences(ours, theirs).values())

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.mean - self.reach

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.mean + self.reach

    @property
    def interval(self) -> str:
        """The mean, and its interval in brackets."""
        return self.text(2)

    def text(self, digits: int) -> str:
        """Return the mean, and its interval in brackets; empty without a value.

        >>> Estimate(-0.5, 0.25, 3).text(2), Estimate.of([1.0]).text(1), Estimate.of([]).text(1)
        ('-0.50 (-0.75 to -0.25)', '+1.0', '')
        """
        if not self.seeds:
            return ""
        ends = f" ({self.low:+.{digits}f} to {self.high:+.{digits}f})"
        return f"{self.mean:+.{digits}f}" + (ends if math.isfinite(self.reach) else "")

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ± {self.reach:.2f}"


def differences(ours: Mapping[int, float], theirs: Mapping[int, float]) -> dict[int, float]:
    """Return by how many per cent values exceed those of the same seeds."""
    both = sorted(ours.keys() & theirs.keys())
    return {seed: 100 * (ours[seed] / theirs[seed] - 1) for seed in both}
