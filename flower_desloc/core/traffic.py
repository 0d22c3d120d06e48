"""The bytes each method must send, counted from sizes and periods.

The paper's measure is what one worker sends up to be averaged (section 4.1, "per-worker asymptotic
communication cost"): DES-LOC sends each stream once per period, Local Adam every stream every K_x
steps, data parallelism a gradient every step. ``Uploads`` counts a run window by window,
``method_rates`` gives the means of a long run: 1/K_x + 1/K_u + 1/K_v payloads a step for
DES-LOC, 3/K_x for Local Adam.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TypeVar

from flower_desloc.core.compression import coded_bytes
from flower_desloc.core.formats import EXACT, lossy
from flower_desloc.core.kinds import Kinds, kind_of
from flower_desloc.core.schedule import BUFFERS, GRADIENTS, PARAMS, Period, SyncSchedule
from flower_desloc.core.types import Stream

_N = TypeVar("_N", int, float)


def stream_bytes(streams: Mapping[str, Stream]) -> dict[str, int]:
    """Return the payload of each stream in bytes."""
    return {name: sum(t.nbytes for t in stream.values()) for name, stream in streams.items()}


def compressed_bytes(
    streams: Mapping[str, Stream], compression: Mapping[str, str], kinds: Kinds
) -> dict[str, int]:
    """Return the bytes of each stream in a message."""
    coded = lossy(compression)
    return {
        name: sum(
            coded_bytes(coded.get(name, EXACT), tensor, signed=kind_of(name, kinds).is_signed)
            for tensor in stream.values()
        )
        for name, stream in streams.items()
    }


def window_bytes(schedule: SyncSchedule, sizes: Mapping[str, _N], num_steps: int) -> list[_N]:
    """Return what one worker sends after each window of ``num_steps`` steps."""
    return [sum(sizes[stream] for stream in w.due) for w in schedule.windows(num_steps)]


@dataclass
class Uploads:
    """Bytes sent up by all workers together, counted window by window.

    A run that was cut off, or that workers joined or left, is compared with what the other methods
    would have sent in the same windows with the same workers.
    """

    schedule: SyncSchedule
    sizes: Mapping[str, int]
    """Bytes of each stream, uncompressed."""
    compressed: Mapping[str, int]
    """Bytes of each stream as this run sends it."""
    num_steps: int
    """Steps of the whole run; at its end ``params`` are averaged."""
    desloc: dict[str, int] = field(init=False)
    local_adam: dict[str, int] = field(init=False)
    """The same with all streams on the clock of ``params``; 0 for data parallelism."""
    ddp: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.desloc = dict.fromkeys(self.schedule.periods, 0)
        self.local_adam = dict.fromkeys(self.schedule.periods, 0)

    def add(self, start: int, stop: int, workers: int = 1) -> None:
        """Count the window of the steps ``start + 1 .. stop``."""
        due = self.schedule.due(stop, self.num_steps)
        for stream in due:
            self.desloc[stream] += workers * self.compressed.get(stream, 0)
        # With coins, the coin of params decides for all streams of Local Adam.
        of_model = due & {PARAMS, BUFFERS} if PARAMS in due else ()
        every = PARAMS in self.schedule.due(stop)
        for stream in self.schedule.periods if every else of_model:
            self.local_adam[stream] += workers * self.sizes.get(stream, 0)
        self.ddp += workers * (stop - start) * self.sizes.get(PARAMS, 0)


def uploads(
    schedule: SyncSchedule,
    sizes: Mapping[str, int],
    num_steps: int,
    compressed: Mapping[str, int] | None = None,
) -> Uploads:
    """Return what one worker sends in ``num_steps`` steps; uncompressed without ``compressed``."""
    total = Uploads(schedule, sizes, compressed or sizes, num_steps)
    for window in schedule.windows(num_steps):
        total.add(window.start, window.stop)
    return total


def download_bytes(
    schedule: SyncSchedule,
    sizes: Mapping[str, int],
    compressed: Mapping[str, int],
    num_steps: int,
    *,
    federated: bool,
) -> dict[str, int]:
    """Return the bytes of each stream that one client receives in ``num_steps`` steps.

    The client takes part in every window, so it receives

    - x_0 at the start, uncompressed; the states are zero there and are not sent;
    - every average, with the next message after it; so none of those at the end of training;
    - with ``federated`` evaluation, the final model at the end: ``params``, and averaged buffers.
    """
    down = dict.fromkeys(sizes, 0)
    down[PARAMS] = sizes[PARAMS]
    for window in schedule.windows(num_steps):
        if window.stop < num_steps:
            for stream in window.due:
                # The result of a mean gradient is sent as new parameters.
                sent = PARAMS if stream == GRADIENTS else stream
                down[sent] += compressed[sent]
    if federated and num_steps > 0:
        for stream in schedule.due(num_steps, num_steps) & {PARAMS, BUFFERS}:
            down[stream] += compressed[stream]
    return down


@dataclass(frozen=True, kw_only=True)
class MethodRates:
    """Means per step of one method."""

    name: str
    num_bytes: float
    exchanges: float
    """Streams averaged. The paper's ring moves each stream in an exchange of its own."""
    windows: float
    """Share of steps after which any stream is averaged. A Flower server moves all streams that are
    due together."""


def method_rates(
    schedule: SyncSchedule,
    sizes: Mapping[str, float],
    num_steps: int,
    *,
    compressed: Mapping[str, float] | None = None,
) -> tuple[MethodRates, MethodRates, MethodRates, MethodRates]:
    """Return the rates of DDP, Local Adam, a run and FedAvg with the same averages of params.

    ``sizes`` are the bytes of each stream, ``compressed`` those that the run sends if it compresses
    them, ``schedule`` the run's. A stream is averaged 1/K times per step, also where K does not
    divide ``num_steps``, and with coins in the mean of all seeds; ``once_at`` adds its averages.
    """
    periods, phases = schedule.periods, schedule.phases
    alone = replace(
        schedule,
        periods={PARAMS: periods[PARAMS]},
        phases={PARAMS: phases[PARAMS]} if PARAMS in phases else {},
    )
    # On one clock, or by one coin, all streams are averaged together.
    _, with_params = _shares(alone, num_steps)
    return (
        _rates("DDP", sizes, {PARAMS: 1.0}, 1.0),
        _rates("Local Adam", sizes, dict.fromkeys(periods, with_params), with_params),
        _rates("this run", compressed or sizes, *_shares(schedule, num_steps)),
        _rates("FedAvg", sizes, {PARAMS: with_params}, with_params),
    )


def rate(period: Period) -> float:
    """Return the averages per step, 1/K; 0 for a stream that is never averaged."""
    return 1 / period if isinstance(period, int) else 0.0


def _rates(
    name: str, sizes: Mapping[str, float], shares: Mapping[str, float], windows: float
) -> MethodRates:
    return MethodRates(
        name=name,
        num_bytes=sum(sizes[stream] * share for stream, share in shares.items()),
        exchanges=sum(shares.values()),
        windows=windows,
    )


def _shares(schedule: SyncSchedule, num_steps: int) -> tuple[dict[str, float], float]:
    """Return the share of steps after which each stream is averaged, and any stream."""
    clock = replace(schedule, once_at=frozenset())
    regular = {stream: rate(period) for stream, period in clock.periods.items()}
    coins = clock.coin_seed is not None
    any_regular = _any_coin(regular.values()) if coins else _any_period(clock)
    if regular.get(BUFFERS):  # also averaged with params
        both = replace(
            clock,
            periods={stream: clock.periods[stream] for stream in (PARAMS, BUFFERS)},
            phases={s: phase for s, phase in clock.phases.items() if s in (PARAMS, BUFFERS)},
        )
        rates = (regular[PARAMS], regular[BUFFERS])
        regular[BUFFERS] = _any_coin(rates) if coins else _any_period(both)
    shares, windows = dict(regular), any_regular
    for step in (step for step in schedule.once_at if step <= num_steps):
        # How likely the regular averages fall on this step.
        due = regular if coins else dict.fromkeys(clock.due(step), 1.0)
        windows += (1 - (any_regular if coins else bool(due))) / num_steps
        for stream in schedule.due(step):
            shares[stream] += (1 - due.get(stream, 0.0)) / num_steps
    return shares, windows


def _any_period(schedule: SyncSchedule) -> float:
    """Return the share of steps after which any stream is due, by inclusion and exclusion.

    Streams are due together once in the least common multiple of their periods, if at all: each two
    of their phases must agree modulo the greatest common divisor of the periods.
    """
    periods, phases = schedule.periods, schedule.phases
    clocks = {(K, phases.get(s, 0)) for s, K in periods.items() if isinstance(K, int)}
    return sum(
        (1 if size % 2 else -1) / math.lcm(*(period for period, _ in some))
        for size in range(1, len(clocks) + 1)
        for some in combinations(clocks, size)
        if all((p - q) % math.gcd(K, L) == 0 for (K, p), (L, q) in combinations(some, 2))
    )


def _any_coin(rates: Iterable[float]) -> float:
    return 1 - math.prod(1 - share for share in rates)
