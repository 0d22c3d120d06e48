"""E_m[.]: the mean over clients of the streams that are due."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Stream = Mapping[str, Tensor]
"""Tensors of one stream under their parameters' names."""


class Mean:
    """Weighted mean of streams that arrive one client at a time.

    Holds one running mean per tensor, whatever the number of clients. Floating-point addition is
    not associative, so the mean depends on the order of the calls to :meth:`add`: call it in an
    order that does not depend on who finished first.

    Half precision is averaged in fp32, all else in its own type; the mean is returned in the
    type the tensors came in.

    Beside the mean it keeps what the drift between clients needs (:meth:`drift`): the squares of
    the steps the mean made (Welford). Nothing cancels, and clients that are equal are their mean.
    """

    def __init__(self, reference: Mapping[str, Stream] | None = None) -> None:
        self.count = 0
        self._weight = 0.0
        self._reference = reference or {}
        self._means: dict[str, dict[str, Tensor]] = {}
        self._dtypes: dict[str, dict[str, torch.dtype]] = {}
        self._squares: dict[str, float] = {}

    def add(self, streams: Mapping[str, Stream], weight: float = 1.0) -> None:
        """Add one client's streams.

        Raises ``ValueError`` when ``weight`` is not a positive finite number, or when the streams
        or tensors are not those of the first client.
        """
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"a client's weight must be positive and finite, got {weight}")
        if self.count == 0:
            self._means = {name: _zeros(stream) for name, stream in streams.items()}
            self._dtypes = {n: {k: t.dtype for k, t in s.items()} for n, s in streams.items()}
            self._squares = dict.fromkeys(streams, 0.0)
        require_same(streams, self._means)
        self._weight += weight
        share = weight / self._weight
        for name, stream in streams.items():
            for key, tensor in stream.items():
                mean = self._means[name][key]
                step = tensor - mean
                mean.add_(step, alpha=share)
                self._squares[name] += weight * (1 - share) * _squared_distance(step, None)
        self.count += 1

    def result(self) -> dict[str, dict[str, Tensor]]:
        """Return the mean of every stream; raises ``ValueError`` when nothing was added."""
        if self.count == 0:
            raise ValueError("no client's streams to average")
        return {
            name: {key: mean.to(self._dtypes[name][key], copy=True) for key, mean in means.items()}
            for name, means in self._means.items()
        }

    def drift(self, mean: Mapping[str, Stream]) -> dict[str, "Drift"]:
        """Return how far the clients were apart, given the ``mean`` that :meth:`result` gave."""
        drifts = {}
        for name, stream in mean.items():
            reference = self._reference.get(name, {})
            moved = sum(_squared_distance(t, reference.get(key)) for key, t in stream.items())
            norm = math.sqrt(sum(_squared_distance(t, None) for t in stream.values()))
            spread = math.sqrt(self._squares[name] / self._weight)
            drifts[name] = Drift(spread=spread, moved=math.sqrt(moved), norm=norm)
        return drifts


@dataclass(frozen=True)
class Drift:
    """Euclidean norms over one stream at one sync.

    ``spread`` is the root mean square over clients of ``|s_m - s|``; ``moved`` is the distance
    from the last mean; ``norm`` is ``|s|``. Relative drift is ``spread / norm``, the relative rate
    of change (paper, section 4.1) ``moved / |last mean|``.
    """

    spread: float
    moved: float
    norm: float


def _zeros(stream: Stream) -> dict[str, Tensor]:
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
    return {k: torch.zeros_like(t, dtype=wide.get(t.dtype, t.dtype)) for k, t in stream.items()}


def _squared_distance(tensor: Tensor, reference: Tensor | None) -> float:
    difference = tensor if reference is None else tensor - reference
    norm = float(torch.linalg.vector_norm(difference, dtype=torch.float64))
    return norm * norm  # ** raises where this is infinite


def require_same(streams: Mapping[str, Stream], expected: Mapping[str, Stream]) -> None:
    """Raise ``ValueError`` unless these are the expected streams and tensors, by name and shape."""
    _require_same_names("streams", streams, expected)
    for name, stream in streams.items():
        _require_same_names(f"tensors of {name!r}", stream, expected[name])
        for key, tensor in stream.items():
            if tensor.shape != expected[name][key].shape:
                raise ValueError(
                    f"{key!r} of stream {name!r} has shape {tuple(tensor.shape)}, "
                    f"expected {tuple(expected[name][key].shape)}"
                )


def _require_same_names(what: str, got: Iterable[str], expected: Iterable[str]) -> None:
    if set(got) != set(expected):
        raise ValueError(f"{what} are {sorted(got)}, expected {sorted(expected)}")
