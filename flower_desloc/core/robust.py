"""Averages that a minority of clients cannot control: median, trimmed mean, norm bound.

Coordinate-wise median and trimmed mean: Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust
Distributed Learning: Towards Optimal Statistical Rates" (2018, arXiv:1803.01498). A bound on the
norm of an update: Sun, Kairouz, Suresh, McMahan, "Can You Really Backdoor Federated Learning?"
(2019, arXiv:1911.07963).

They need all replies at once: ``Gathered`` keeps them, while ``Mean`` keeps none.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from flower_desloc.core.averaging import (
    Drift,
    Mean,
    Stream,
    Weight,
    blocks,
    distance,
    require_same,
    weights_of,
)

Average = Literal["mean", "median", "trimmed_mean"]


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


def beyond(norms: Sequence[float], bound: float) -> list[int]:
    """Return the indices of the ``norms`` above ``bound`` times their median.

    >>> beyond([1.0, 1.2, 0.9, 30.0], 3.0)
    [3]
    """
    most = bound * median(norms)
    return [index for index, norm in enumerate(norms) if norm > most]


class Gathered:
    """Like ``Mean``, but keeps all replies until the end.

    Args:
        reference: The last averages, from which a client's update is measured.
        average: How ``result`` averages.
        trim: Values that a trimmed mean leaves out on each side.

    """

    def __init__(
        self,
        reference: Mapping[str, Stream] | None = None,
        average: Average = "mean",
        trim: int = 0,
    ) -> None:
        self._reference = reference or {}
        self._average, self._trim = average, trim
        self._held: list[tuple[Mapping[str, Stream], dict[str, float]]] = []

    @property
    def count(self) -> int:
        """Number of clients whose streams are kept."""
        return len(self._held)

    def add(self, streams: Mapping[str, Stream], weight: Weight = 1.0) -> None:
        """Add one client's streams; raises ``ValueError`` when they are not those of the first."""
        if self._held:
            require_same(streams, self._held[0][0])
        self._held.append((streams, weights_of(streams, weight)))

    def outliers(self, bound: float) -> dict[int, str]:
        """Return the indices of clients whose updates are too long, with the reason.

        A stream's update is its distance from the last average, or from zero; it is too long above
        ``bound`` times the median of all clients.
        """
        found: dict[int, str] = {}
        for name in self._held[0][0] if self._held else ():
            lengths = [
                distance(streams[name], self._reference.get(name)) for streams, _ in self._held
            ]
            for index in beyond(lengths, bound):
                why = f"its update of {name} has the norm {lengths[index]:.4g}, the median is "
                found.setdefault(index, f"{why}{median(lengths):.4g}")
        return found

    def drop(self, indices: Collection[int]) -> None:
        """Remove the streams of these clients."""
        self._held = [it for index, it in enumerate(self._held) if index not in indices]

    def result(self) -> dict[str, dict[str, Tensor]]:
        """Return the average of every stream; raises ``ValueError`` when nothing was added."""
        if self._average == "mean" or not self._held:
            mean = Mean()
            for streams, weights in self._held:
                mean.add(streams, weights)
            return mean.result()
        return {
            name: {
                key: self._combined([streams[name][key] for streams, _ in self._held])
                for key in stream
            }
            for name, stream in self._held[0][0].items()
        }

    def _combined(self, tensors: Sequence[Tensor]) -> Tensor:
        if self._average == "median":
            return coordinate_median(tensors)
        return trimmed_mean(tensors, self._trim)

    def drift(self, average: Mapping[str, Stream]) -> dict[str, Drift]:
        """Return how far the clients were apart, given the ``average`` that ``result`` gave."""
        drifts = {}
        for name, stream in average.items():
            total = sum(weights[name] for _, weights in self._held)
            apart = (
                math.sqrt(weights[name]) * distance(streams[name], stream)
                for streams, weights in self._held
            )
            spread = math.hypot(*apart) / math.sqrt(total)
            moved = distance(stream, self._reference.get(name))
            drifts[name] = Drift(spread=spread, moved=moved, norm=distance(stream))
        return drifts
