"""E_m[.]: the mean over clients of the streams that are due."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flower_desloc.native import passes
from flower_desloc.native.pages import side_by_side

Stream = Mapping[str, Tensor]
"""Tensors of one stream under their parameters' names."""
Room = Callable[[Sequence[tuple[torch.dtype, torch.Size]]], list[Tensor]]
"""Gives tensors of types and shapes, which hold whatever they hold."""

_BLOCK = 1 << 18
"""Values taken at a time: what is made of them on the way does not leave the cache."""
_ROW = 1 << 12
"""Values whose squares are added in their own type; the sums of rows are added in float64."""
_SMALLEST_NORM = 1e-14
"""Of a row in fp32: below it, squares have been lost that count."""


class Mean:
    """Weighted mean of streams that arrive one client at a time.

    Holds one running mean per tensor, whatever the number of clients. Floating-point addition is
    not associative, so the mean depends on the order of the calls to :meth:`add`: call it in an
    order that does not depend on who finished first.

    Half precision is averaged in fp32, all else in its own type; the mean is returned in the
    type the tensors came in.

    Beside the mean it keeps what the drift between clients needs (:meth:`drift`): the squares of
    the steps the mean made (Welford). Nothing cancels, and clients that are equal are their mean.

    Neither depends on how many threads PyTorch has.

    What it holds on the CPU lies in tensors that ``room`` gives.
    """

    def __init__(
        self, reference: Mapping[str, Stream] | None = None, room: Room = side_by_side
    ) -> None:
        self.count = 0
        self._make_room = room
        self._weight = 0.0
        self._reference = reference or {}
        self._means: dict[str, dict[str, Tensor]] = {}
        self._dtypes: dict[str, dict[str, torch.dtype]] = {}
        self._squares: dict[str, float] = {}
        self._lent = False

    def add(self, streams: Mapping[str, Stream], weight: float = 1.0) -> None:
        """Add one client's streams.

        Raises ``ValueError`` when ``weight`` is not a positive finite number, or when the streams
        or tensors are not those of the first client.
        """
        _require_weight(weight)
        if self.count == 0:
            self._means = self._copies(streams)
            self._dtypes = _dtypes(streams)
            self._squares = dict.fromkeys(streams, 0.0)
            self._weight = weight
        else:
            require_same(streams, self._means)
            self._take_back()
            self._weight += weight
            share = weight / self._weight
            for name, stream in streams.items():
                squares = _approach(self._means[name], stream, share)
                self._squares[name] += weight * (1 - share) * squares
        self.count += 1

    def take(
        self,
        clients: Sequence[tuple[Mapping[str, Stream], float]],
        limits: Callable[[str], tuple[float, float]],
    ) -> bool:
        """Add several clients' streams and weights in one pass over memory, to the same bits.

        Whether all values of each stream are finite and within its ``limits``, the least and the
        greatest there may be, is seen on the way. If they are not, or something else is wrong with
        a client, or it cannot be done in one pass, nothing is done and False is returned:
        :meth:`add` them one by one.
        """
        expected = self._means or clients[0][0]
        total, shares = self._weight, []
        for streams, weight in clients:
            try:
                _require_weight(weight)
                require_same(streams, expected)
            except ValueError:
                return False
            total += weight
            shares.append(weight / total)
        everything = [self._means, *(streams for streams, _ in clients)]
        if not passes.can_take(t for all_ in everything for s in all_.values() for t in s.values()):
            return False
        begun = self.count > 0
        if begun:  # What is there is moved in place: it must be known before that nothing is wrong.
            each = (
                (stream, limits(name)) for streams, _ in clients for name, stream in streams.items()
            )
            if not all(_within(stream, *ends) for stream, ends in each):
                return False
            self._take_back()
        means: dict[str, dict[str, Tensor]] = {}
        squares = dict(self._squares)
        for name, stream in expected.items():
            sides = [[streams[name][key] for key in stream] for streams, _ in clients]
            if begun:
                into = list(self._means[name].values())
            else:
                into = self._make_room([(t.dtype, t.shape) for t in stream.values()])
            folded = passes.fold(into, sides, shares, begun=begun)
            assert folded is not None  # C can take them
            (low, high), ways = folded
            least, greatest = limits(name)
            if not begun and not (least <= low and high <= greatest):
                return False
            means[name] = dict(zip(stream, into, strict=True))
            squares.setdefault(name, 0.0)
            for (_, weight), share, way in zip(clients, shares, ways, strict=True):
                squares[name] += weight * (1 - share) * way
        if not begun:
            self._dtypes = _dtypes(means)
        self._means, self._squares, self._weight = means, squares, total
        self.count += len(clients)
        return True

    def result(self) -> dict[str, dict[str, Tensor]]:
        """Return the mean of every stream; raises ``ValueError`` when nothing was added.

        It is lent, not copied: only read it. Should more be added, it stays as it is.
        """
        if self.count == 0:
            raise ValueError("no client's streams to average")
        self._lent = True
        return {
            name: {key: mean.to(self._dtypes[name][key]) for key, mean in means.items()}
            for name, means in self._means.items()
        }

    def drift(self, mean: Mapping[str, Stream]) -> dict[str, "Drift"]:
        """Return how far the clients were apart, given the ``mean`` that :meth:`result` gave."""
        drifts = {}
        for name, stream in mean.items():
            norm, moved = norms(stream, self._reference.get(name))
            spread = math.sqrt(self._squares[name] / self._weight)
            drifts[name] = Drift(spread=spread, moved=moved, norm=norm)
        return drifts

    def _take_back(self) -> None:
        if self._lent:
            self._means = self._copies(self._means)
            self._lent = False

    def _copies(self, streams: Mapping[str, Stream]) -> dict[str, dict[str, Tensor]]:
        copies: dict[str, dict[str, Tensor]] = {}
        with OneThread():
            for name, stream in streams.items():
                if all(t.is_cpu for t in stream.values()):
                    own = self._make_room([(_wide(t.dtype), t.shape) for t in stream.values()])
                    for mean, t in zip(own, stream.values(), strict=True):
                        mean.copy_(t.detach())
                else:
                    own = [t.detach().to(_wide(t.dtype), copy=True) for t in stream.values()]
                copies[name] = dict(zip(stream, own, strict=True))
        return copies


class OneThread:
    """For as long as this is entered, PyTorch works on one thread.

    One pass over memory waits for memory, and threads that wait for each other at every operation
    besides are slow where the cores are shared. Nor may a sum depend on how many there are.
    """

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._before)


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


def blocks(tensor: Tensor, size: int | None = None) -> tuple[Tensor, ...]:
    """Return a tensor's values as views, ``size`` at a time and one dimension each.

    Views of a copy where the values do not lie one after the other.
    """
    parts: tuple[Tensor, ...] = tensor.detach().reshape(-1).split(size or _BLOCK)
    return parts


def distance(stream: Stream, origin: Stream | None = None) -> float:
    """Return ``|stream - origin|``, from zero unless there is an origin, of any finite values."""
    return norms(stream, origin)[1]


def norms(stream: Stream, origin: Stream | None = None) -> tuple[float, float]:
    """Return ``|stream|`` and ``|stream - origin|``, from zero unless there is an origin."""
    tensors = list(stream.values())
    origins = [origin[key].to(t.device) for key, t in stream.items()] if origin else None
    squares = passes.squared_norms(tensors, origins)
    if squares is None:
        norm = sum(_squared_distance(t, None) for t in tensors)
        pairs = zip(tensors, origins, strict=True) if origins else ()
        squares = (norm, sum(_squared_distance(*pair) for pair in pairs))
    norm, way = (math.sqrt(square) for square in squares)
    return norm, way if origins else norm


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


def _require_weight(weight: float) -> None:
    if not (math.isfinite(weight) and weight > 0):
        raise ValueError(f"a client's weight must be positive and finite, got {weight}")


def _within(stream: Stream, least: float, greatest: float) -> bool:
    """Return whether all values are; False, too, where that cannot be seen in one pass."""
    ends = passes.ends([t for t in stream.values() if t.numel() > 0])
    return ends is not None and all(least <= low and high <= greatest for low, high in ends)


def _require_same_names(what: str, got: Iterable[str], expected: Iterable[str]) -> None:
    if set(got) != set(expected):
        raise ValueError(f"{what} are {sorted(got)}, expected {sorted(expected)}")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return {torch.float16: torch.float32, torch.bfloat16: torch.float32}.get(dtype, dtype)


def _dtypes(streams: Mapping[str, Stream]) -> dict[str, dict[str, torch.dtype]]:
    return {name: {k: t.dtype for k, t in stream.items()} for name, stream in streams.items()}


def _approach(means: Stream, stream: Stream, share: float) -> float:
    """Move ``means`` that share of the way to ``stream``, in place; return the way's square."""
    into, side = [means[key] for key in stream], list(stream.values())
    folded = passes.fold(into, [side], [share], begun=True)
    if folded is None:
        with OneThread():
            return sum(_approach_one(m, t, share) for m, t in zip(into, side, strict=True))
    _, [squares] = folded
    return squares


def _approach_one(mean: Tensor, tensor: Tensor, share: float) -> float:
    room = _room(tensor)
    squares = 0.0
    for m, t in zip(blocks(mean), blocks(tensor), strict=True):
        step = torch.sub(t, m, out=room[: len(t)])
        m.add_(step, alpha=share)
        squares += _square(step, room)
    return squares


def _squared_distance(tensor: Tensor, origin: Tensor | None) -> float:
    room = _room(tensor)
    with OneThread():
        if origin is None:
            return sum(_square(room[: len(part)].copy_(part), room) for part in blocks(tensor))
        pairs = zip(blocks(tensor), blocks(origin), strict=True)
        return sum(_square(torch.sub(a, b, out=room[: len(a)]), room) for a, b in pairs)


def _room(tensor: Tensor) -> Tensor:
    """Return room for a block of the tensor's values, in whole rows."""
    size = _rows(min(tensor.numel(), _BLOCK)) * _ROW
    return torch.empty(size, dtype=_wide(tensor.dtype), device=tensor.device)


def _rows(size: int) -> int:
    return -(-size // _ROW)


def _square(values: Tensor, room: Tensor) -> float:
    """Return the sum of squares of ``values``, which ``room`` begins with."""
    rows = room[: _rows(len(values)) * _ROW]
    rows[len(values) :].zero_()
    norms: list[float] = torch.linalg.vector_norm(rows.view(-1, _ROW), dim=1).tolist()
    if not all(_SMALLEST_NORM < norm < math.inf for norm in norms):
        norms = [float(torch.linalg.vector_norm(values, dtype=torch.float64))]
    return sum(norm * norm for norm in norms)  # ** raises where this is infinite
