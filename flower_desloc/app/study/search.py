"""Search for the best value of one setting: the values to try, and when to stop."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Search:
    """One setting, tried at ``anchor * factor**position`` for integer positions.

    Cells with the same anchor and factor try the same values.
    """

    key: str
    factor: float
    anchor: float
    start: int
    """The position nearest to the value in the cell's own configuration."""
    seeds: tuple[int, ...]
    """The score of a value is the mean over these seeds."""
    max_runs: int
    """Bound on the runs of one cell's search."""

    def value(self, position: int) -> float:
        """Return the value at a position, with three significant figures.

        >>> search = Search(key="optimizer.lr", factor=2**0.5, anchor=0.0021, start=0, seeds=(0,),
        ...                 max_runs=9)
        >>> [search.value(position) for position in (-1, 0, 1)]
        [0.00148, 0.0021, 0.00297]
        """
        return float(f"{self.anchor * self.factor**position:.3g}")


def untried(scores: Mapping[int, float], start: int, most: int) -> list[int]:
    """Return the positions to try next, or an empty list when the search is over.

    ``scores`` are the known scores; smaller is better, and infinity stands for divergence. The
    search begins at ``start`` and its two neighbours. It continues beyond the best position while
    it has an untried neighbour and fewer than ``most`` positions were tried. If every value
    diverged it continues downwards.

    >>> untried({}, start=0, most=9)
    [0, -1, 1]
    >>> untried({-1: 3.0, 0: 2.0, 1: 1.0}, start=0, most=9)
    [2]
    >>> untried({-1: 3.0, 0: 2.0, 1: 1.0, 2: math.inf}, start=0, most=9)
    []
    """
    wanted = [p for p in (start, start - 1, start + 1) if p not in scores]
    if not wanted:
        at = best(scores)
        beyond = [min(scores) - 1] if at is None else [at - 1, at + 1]
        wanted = [p for p in beyond if p not in scores]
    return wanted[: max(0, most - len(scores))]


def best(scores: Mapping[int, float]) -> int | None:
    """Return the position of the smallest score, the lowest of equals; None if none is finite."""
    finite = [(score, position) for position, score in scores.items() if math.isfinite(score)]
    return min(finite)[1] if finite else None


def is_bracketed(scores: Mapping[int, float]) -> bool:
    """Return whether both neighbours of the best position were tried."""
    at = best(scores)
    return at is not None and {at - 1, at + 1} <= scores.keys()
