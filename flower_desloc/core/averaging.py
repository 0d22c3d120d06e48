"""Weighted mean over clients of the streams that are due (E_m in the paper)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flower_desloc.core.kinds import Kind, Kinds, kind_of
from flower_desloc.core.types import Shares, Stream, Streams

_BLOCK = 1 << 19
"""Values per operation: their difference to the mean stays in the cache."""
_ROW = 1 << 12
"""Values whose squares are summed by one thread; a sum must not depend on the thread count."""
_SMALLEST_NORM = 1e-14
"""Below this norm of a row in fp32, squares that matter have underflowed."""


class Averager(Protocol):
    """Averages the replies of one window, which are added one at a time and in a fixed order.

    ``flower_desloc.core.robust.averager`` makes one by its name.
    """

    @property
    def count(self) -> int:
        """Number of clients whose streams were added."""

    def add(self, streams: Streams, weight: float = 1.0, shares: Shares | None = None) -> None:
        """Add one client's streams; raises ``ValueError`` when they are not those of the first."""

    def result(self) -> dict[str, dict[str, Tensor]]:
        """Return the average of every stream; raises ``ValueError`` when nothing was added."""

    def drift(self, averages: Streams) -> dict[str, "Drift"]:
        """Return how far apart the clients were, given the ``averages`` from ``result``."""


class Mean:
    """Running weighted mean of streams that arrive one client at a time.

    Holds one mean per tensor and no reply, whatever the number of clients, so that a client can
    be compared with the means before it only. Floating-point addition is not
    associative, so the mean depends on the order of the calls to ``add``: call it in an order
    that does not depend on which client finished first. It does not depend on the number of
    threads.

    Half precision is averaged in fp32, all else in its own type; the mean is returned in the type
    of the replies.

    The drift between clients is computed along the way from the squared steps of the mean
    (Welford's algorithm): no cancellation, and equal clients have exactly zero drift.
    """

    def __init__(self, reference: Streams | None = None) -> None:
        self.count = 0
        self._weights: dict[str, dict[str, float]] = {}
        self._reference = reference or {}
        self._means: dict[str, dict[str, Tensor]] = {}
        self._dtypes: dict[str, dict[str, torch.dtype]] = {}
        self._squares: dict[str, dict[str, float]] = {}
        self._shared = False

    def add(self, streams: Streams, weight: float = 1.0, shares: Shares | None = None) -> None:
        """Add one client's streams, by default with its whole weight in each.

        Raises ``ValueError`` when a weight is not a positive finite number, or when the streams or
        tensors are not those of the first client.
        """
        weights = weights_of(streams, weight, shares)
        if self.count == 0:
            self._means = _copies(streams)
            self._dtypes = {n: {k: t.dtype for k, t in s.items()} for n, s in streams.items()}
            self._weights = {name: dict.fromkeys(stream, 0.0) for name, stream in streams.items()}
            self._squares = {name: dict.fromkeys(stream, 0.0) for name, stream in streams.items()}
        else:
            require_same(streams, self._means)
            if self._shared:
                self._means, self._shared = _copies(self._means), False
        for name, stream in streams.items():
            means, totals, squares = self._means[name], self._weights[name], self._squares[name]
            for key, tensor in stream.items():
                own = weights[name][key]
                totals[key] += own
                if self.count > 0:
                    share = own / totals[key]
                    squares[key] += own * (1 - share) * _move(means[key], tensor, share)
        self.count += 1

    def result(self) -> dict[str, dict[str, Tensor]]:
        """Return the mean of every stream; raises ``ValueError`` when nothing was added.

        Do not write to it. It does not change when more is added.
        """
        if self.count == 0:
            raise ValueError("no client's streams to average")
        self._shared = True
        return {
            name: {key: mean.to(self._dtypes[name][key]) for key, mean in means.items()}
            for name, means in self._means.items()
        }

    def drift(self, averages: Streams) -> dict[str, "Drift"]:
        """Return how far apart the clients were, given the means from ``result``."""
        return {
            name: Drift(
                spread=math.sqrt(self._variance(name)),
                moved=distance(stream, self._reference.get(name)),
                norm=distance(stream),
            )
            for name, stream in averages.items()
        }

    def _variance(self, name: str) -> float:
        weights = self._weights[name]
        return sum(squares / weights[key] for key, squares in self._squares[name].items())


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


def weights_of(
    streams: Streams, weight: float, shares: Shares | None
) -> dict[str, dict[str, float]]:
    """Return a client's weight by stream and tensor.

    Raises ``ValueError`` for one that is not positive and finite, or of another tensor.
    """
    if shares is None:
        shares = {name: dict.fromkeys(stream, 1.0) for name, stream in streams.items()}
    _require_same_names("weights", shares, streams)
    weights: dict[str, dict[str, float]] = {}
    for name, stream in streams.items():
        _require_same_names(f"weights of {name!r}", shares[name], stream)
        weights[name] = {key: weight * share for key, share in shares[name].items()}
        for value in weights[name].values():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"a client's weight must be positive and finite, got {value}")
    return weights


def blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return a tensor's values in 1-D pieces: views, or views of a copy if not contiguous."""
    parts: tuple[Tensor, ...] = tensor.detach().reshape(-1).split(_BLOCK)
    return parts


def distance(stream: Stream, origin: Stream | None = None) -> float:
    """Return the Euclidean norm ``|stream - origin|``, or ``|stream|`` without an origin."""
    squares = 0.0
    for key, tensor in stream.items():
        pieces, wide = blocks(tensor), _wide(tensor.dtype)
        if origin is None:
            squares += sum(_squared_norm(values.to(wide)) for values in pieces)
            continue
        others = blocks(origin[key].to(tensor.device))
        # One buffer for all: a new one for each would be returned to the system every time.
        buffer = tensor.new_empty(min(tensor.numel(), _BLOCK), dtype=wide)
        squares += sum(
            _squared_norm(torch.sub(values.to(wide), other, out=buffer[: len(values)]))
            for values, other in zip(pieces, others, strict=True)
        )
    return math.sqrt(squares)


def update_lengths(streams: Streams, last: Streams, kinds: Kinds) -> dict[str, float]:
    """Return by stream how long a client's update is, given the ``last`` averages.

    That of params and buffers is the distance from their last average, that of a moment its norm,
    and that of a second moment the root of its norm: it is a square of gradients, and grows twice
    as fast with their scale.
    """
    lengths = {}
    for name, stream in streams.items():
        kind = kind_of(name, kinds)
        is_moved = kind in (Kind.PARAMS, Kind.BUFFERS)
        norm = distance(stream, last.get(name) if is_moved else None)
        lengths[name] = norm if kind.is_signed else math.sqrt(norm)
    return lengths


def require_same(streams: Streams, expected: Streams) -> None:
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


def _copies(streams: Streams) -> dict[str, dict[str, Tensor]]:
    return {
        name: {k: t.detach().to(_wide(t.dtype), copy=True) for k, t in stream.items()}
        for name, stream in streams.items()
    }


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _move(mean: Tensor, tensor: Tensor, share: float) -> float:
    """Move ``mean`` towards ``tensor`` by ``share``, in place; return the squared distance."""
    squares = 0.0
    buffer = mean.new_empty(min(mean.numel(), _BLOCK))
    for m, t in zip(blocks(mean), blocks(tensor), strict=True):
        step = torch.sub(t, m, out=buffer[: len(m)])
        m.add_(step, alpha=share)
        squares += _squared_norm(step)
    return squares


def _squared_norm(values: Tensor) -> float:
    """Return the sum of squares of 1-D ``values``, whatever the number of threads."""
    norms = _row_norms(values)
    if not all(_SMALLEST_NORM < norm < math.inf for norm in norms):
        norms = _row_norms(values.double())
    return sum(norm * norm for norm in norms)  # ** raises where this is infinite


def _row_norms(values: Tensor) -> list[float]:
    # PyTorch reduces each row in one thread; one norm of all values would depend on their number.
    whole = len(values) // _ROW * _ROW
    norms: list[float] = torch.linalg.vector_norm(values[:whole].view(-1, _ROW), dim=1).tolist()
    if whole < len(values):
        norms.append(float(torch.linalg.vector_norm(values[whole:])))
    return norms
