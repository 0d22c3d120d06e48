"""Averages that a minority of clients cannot control: median, trimmed mean, norm bound.

Coordinate-wise median and trimmed mean: Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust
Distributed Learning: Towards Optimal Statistical Rates" (2018, arXiv:1803.01498). A bound on the
norm of an update: Sun, Kairouz, Suresh, McMahan, "Can You Really Backdoor Federated Learning?"
(2019, arXiv:1911.07963).

Median and trimmed mean need all replies at once: ``Gathered`` keeps them, while ``Mean`` keeps
none. The bound, ``NormBound``, is a step in front of any average, and holds two replies at most.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final, Generic, TypeVar

import torch
from torch import Tensor

from flower_desloc.core.averaging import (
    Averager,
    Drift,
    Mean,
    blocks,
    distance,
    require_same,
    weights_of,
)
from flower_desloc.core.types import Shares, Streams

T = TypeVar("T")


def averager(name: str, last: Streams, *, trim: int = 0) -> Averager:
    """Return what averages a window's replies in the way of that ``name``.

    Args:
        name: One of ``AVERAGES``.
        last: The last averages, from which the clients' updates are measured.
        trim: Values that a trimmed mean leaves out on each side.

    """
    return AVERAGES[name].make(last, trim)


def trimmed_mean(tensors: Sequence[Tensor], trim: int) -> Tensor:
    """Return each coordinate's mean without its ``trim`` smallest and ``trim`` largest values.

    The result has the tensors' type; half precision is computed in fp32.

    >>> trimmed_mean([torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([90.0])], 1)
    tensor([2.])

    Raises ``ValueError`` when no value would be left.
    """
    count = len(tensors)
    if not 0 <= 2 * trim < count:
        raise ValueError(f"{trim} of {count} values on each side cannot be cut")
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    result = torch.empty_like(tensors[0], memory_format=torch.contiguous_format)
    for into, *values in zip(*(blocks(t) for t in (result, *tensors)), strict=True):
        ranked = torch.stack([value.to(wide) for value in values]).sort(dim=0).values
        into.copy_(ranked[trim : count - trim].mean(dim=0))
    return result


def coordinate_median(tensors: Sequence[Tensor]) -> Tensor:
    """Return each coordinate's median: of an even number, the mean of the middle two."""
    return trimmed_mean(tensors, (len(tensors) - 1) // 2)


class Gathered:
    """Keeps all replies until the end.

    Args:
        reference: The last averages, from which a client's update is measured.
        combine: Returns the average of a tensor from the clients' values, which all count once; by
            default the weighted mean. It returns a new tensor of their type, and changes none.

    """

    def __init__(
        self,
        reference: Streams | None = None,
        combine: Callable[[Sequence[Tensor]], Tensor] | None = None,
    ) -> None:
        self._reference = reference or {}
        self._combine = combine
        self._held: list[tuple[Streams, dict[str, dict[str, float]]]] = []

    @property
    def count(self) -> int:
        """Number of clients whose streams are kept."""
        return len(self._held)

    def add(self, streams: Streams, weight: float = 1.0, shares: Shares | None = None) -> None:
        """Add one client's streams; raises ``ValueError`` when they are not those of the first."""
        if self._held:
            require_same(streams, self._held[0][0])
        self._held.append((streams, weights_of(streams, weight, shares)))

    def result(self) -> dict[str, dict[str, Tensor]]:
        """Return the average of every stream; raises ``ValueError`` when nothing was added."""
        combine = self._combine
        if combine is None or not self._held:
            mean = Mean()
            for streams, weights in self._held:
                mean.add(streams, shares=weights)
            return mean.result()
        return {
            name: {
                key: combine([streams[name][key] for streams, _ in self._held]) for key in stream
            }
            for name, stream in self._held[0][0].items()
        }

    def drift(self, averages: Streams) -> dict[str, Drift]:
        """Return how far apart the clients were, given the ``averages`` from ``result``."""
        drifts = {}
        for name, stream in averages.items():
            total = {key: sum(weights[name][key] for _, weights in self._held) for key in stream}
            spread = math.hypot(
                *(
                    math.sqrt(weights[name][key] / total[key])
                    * distance({key: streams[name][key]}, {key: mean})
                    for streams, weights in self._held
                    for key, mean in stream.items()
                )
            )
            moved = distance(stream, self._reference.get(name))
            drifts[name] = Drift(spread=spread, moved=moved, norm=distance(stream))
        return drifts


@dataclass(frozen=True)
class Average:
    """A way to average, and what the rest of a run has to know of it."""

    make: Callable[[Streams, int], Averager]
    """Makes an ``Averager`` from the last averages and the number of values to trim."""
    is_weighted: bool = False
    """Whether clients may have weights; otherwise each counts once."""
    keeps_replies: bool = True
    """Whether all replies of a window are in memory at a time."""
    trims: bool = False


AVERAGES: Final = {
    "mean": Average(lambda last, _: Mean(last), is_weighted=True, keeps_replies=False),
    "median": Average(lambda last, _: Gathered(last, coordinate_median)),
    "trimmed_mean": Average(
        lambda last, trim: Gathered(last, partial(trimmed_mean, trim=trim)), trims=True
    ),
}
"""The averages by name."""


Lengths = Mapping[str, float]
"""By stream: how long a client's update is (``flower_desloc.core.averaging.update_lengths``)."""

_VOTES = 3  # a median of fewer than three lengths does not tell which of them is wrong


class NormBound(Generic[T]):
    """Finds the replies of a window that have a much longer update than the others.

    A stream's update is too long above ``bound`` times the median over the replies of the window so
    far. While these are fewer than three, a reply passes that is not too long compared with
    ``before``; any other is held back until there are three. So no more than two are ever held, and
    replies are decided in the order in which they arrive.

    Args:
        bound: How many medians are too long; None: none are, and no reply is measured.
        measure: Returns the lengths of a reply's updates.
        before: The median length of each stream in the last window that averaged it.

    """

    def __init__(
        self, bound: float | None, measure: Callable[[T], Lengths], before: Lengths
    ) -> None:
        self._bound, self._measure, self._before = bound or math.inf, measure, before
        self._is_off = bound is None
        self._seen: list[Lengths] = []
        self._accepted: list[Lengths] = []
        self._held: list[tuple[T, Lengths]] = []

    def judge(self, reply: T) -> list[tuple[T, str]]:
        """Return the replies that are decided now, each with why it is left out, or ""."""
        if self._is_off:
            return [(reply, "")]
        lengths = self._measure(reply)
        self._seen.append(lengths)
        self._held.append((reply, lengths))
        if len(self._seen) >= _VOTES:
            return self._decided(self._seen)
        is_plain = lengths.keys() <= self._before.keys() and not self._why(lengths, [self._before])
        return self._decided([]) if is_plain and len(self._held) == 1 else []

    def rest(self) -> list[tuple[T, str]]:
        """Return the replies that were held to the end; the lengths before count as one more."""
        votes = [*self._seen, self._before] if self._before else self._seen
        return self._decided(votes if len(votes) >= _VOTES else [])

    def medians(self) -> dict[str, float]:
        """Return the median length of each stream over the accepted replies, if there are two."""
        if len(self._accepted) < _VOTES - 1:
            return {}
        return {name: median(each[name] for each in self._accepted) for name in self._accepted[0]}

    def _decided(self, votes: Sequence[Lengths]) -> list[tuple[T, str]]:
        decided = [(reply, lengths, self._why(lengths, votes)) for reply, lengths in self._held]
        self._held = []
        self._accepted += [lengths for _, lengths, why in decided if not why]
        return [(reply, why) for reply, _, why in decided]

    def _why(self, lengths: Lengths, votes: Sequence[Lengths]) -> str:
        """Return why these lengths are too long; "" if they are not."""
        for name, own in lengths.items():
            known = [each[name] for each in votes if name in each]
            typical = median(known) if known else 0.0
            # A median of zero gives no scale: the others did not change the stream at all.
            if own > self._bound * typical > 0:
                return f"its update of {name} has the norm {own:.4g}, the median is {typical:.4g}"
        return ""
