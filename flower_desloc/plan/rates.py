"""Mean communication per step of each method, for one worker and one direction.

DES-LOC averages 1/K_x + 1/K_u + 1/K_v payloads a step, Local Adam 3/K_x. The bytes of one run, with
the last average of the parameters, are counted by :mod:`flower_desloc.core.traffic`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

from flower_desloc.core.schedule import PARAMS, Period


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
    sizes: Mapping[str, float], periods: Mapping[str, Period], *, coins: bool = False
) -> tuple[MethodRates, MethodRates, MethodRates, MethodRates]:
    """Return the rates of DDP, Local Adam, DES-LOC and FedAvg with the same period of params.

    ``sizes`` are the bytes of each stream, ``periods`` DES-LOC's. With ``coins`` each of its
    streams is averaged with probability 1/K after every step, instead of every K steps.
    """
    of_params = periods[PARAMS]
    return (
        _rates("DDP", sizes, {PARAMS: 1}),
        _rates("Local Adam", sizes, dict.fromkeys(periods, of_params)),
        _rates("DES-LOC", sizes, periods, coins=coins),
        _rates("FedAvg", sizes, {PARAMS: of_params}),
    )


def rate(period: Period) -> float:
    """Return the averages per step, 1/K; 0 for a stream that is never averaged."""
    return 1 / period if isinstance(period, int) else 0.0


def _rates(
    name: str, sizes: Mapping[str, float], periods: Mapping[str, Period], *, coins: bool = False
) -> MethodRates:
    rates = {stream: rate(period) for stream, period in periods.items()}
    return MethodRates(
        name=name,
        num_bytes=sum(sizes[stream] * share for stream, share in rates.items()),
        exchanges=sum(rates.values()),
        windows=_any_coin(rates.values()) if coins else _any_period(periods.values()),
    )


def _any_period(periods: Iterable[Period]) -> float:
    """Return the share of steps that some period divides, by inclusion and exclusion."""
    numbers = sorted({period for period in periods if isinstance(period, int)})
    return sum(
        (1 if size % 2 else -1) / math.lcm(*some)
        for size in range(1, len(numbers) + 1)
        for some in combinations(numbers, size)
    )


def _any_coin(rates: Iterable[float]) -> float:
    return 1 - math.prod(1 - share for share in rates)
