"""What each method sends a step, in the long run: the rates of :mod:`flower_desloc.core.traffic`.

The ledger counts one run, its last average of params included; here are the means per step that
the paper compares, 1/K_x + 1/K_u + 1/K_v payloads a step for DES-LOC, 3/K for Local Adam.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

from flower_desloc.core.schedule import PARAMS, Period


@dataclass(frozen=True, kw_only=True)
class Method:
    """The means per step of a method, for one worker and one direction.

    Parameters
    ----------
    num_bytes
        Bytes a step.
    exchanges
        Streams averaged a step. The paper's ring moves each by itself.
    windows
        Steps, a step, after which anything is averaged. A Flower server moves all that is due
        at once.

    """

    name: str
    num_bytes: float
    exchanges: float
    windows: float


def desloc(
    sizes: Mapping[str, float], periods: Mapping[str, Period], *, coins: bool = False
) -> Method:
    """Return DES-LOC's: every stream on its own clock, periodic or by coins."""
    rates = {stream: rate(period) for stream, period in periods.items()}
    return Method(
        name="DES-LOC",
        num_bytes=sum(sizes[stream] * share for stream, share in rates.items()),
        exchanges=sum(rates.values()),
        windows=_any_coin(rates.values()) if coins else _any_period(periods.values()),
    )


def local_adam(sizes: Mapping[str, float], periods: Mapping[str, Period]) -> Method:
    """Return Local Adam's: every stream on the clock of params."""
    share = rate(periods[PARAMS])
    return Method(
        name="Local Adam",
        num_bytes=share * sum(sizes[stream] for stream in periods),
        exchanges=share * len(periods),
        windows=share,
    )


def fedavg(sizes: Mapping[str, float], periods: Mapping[str, Period]) -> Method:
    """Return that of averaging params alone, on their clock."""
    share = rate(periods[PARAMS])
    return Method(name="FedAvg", num_bytes=share * sizes[PARAMS], exchanges=share, windows=share)


def ddp(sizes: Mapping[str, float]) -> Method:
    """Return data parallelism's: a gradient of the size of params every step."""
    return Method(name="DDP", num_bytes=sizes[PARAMS], exchanges=1, windows=1)


def rate(period: Period) -> float:
    """Return the averages a step, 1/K; 0 of a stream that is never averaged."""
    return 1 / period if isinstance(period, int) else 0.0


def _any_period(periods: Iterable[Period]) -> float:
    """Return the share of steps that some period divides, by inclusion and exclusion."""
    clocks = sorted({period for period in periods if isinstance(period, int)})
    signs = (1.0, -1.0) * len(clocks)
    return sum(
        sign / math.lcm(*some)
        for size, sign in zip(range(1, len(clocks) + 1), signs, strict=False)
        for some in combinations(clocks, size)
    )


def _any_coin(rates: Iterable[float]) -> float:
    return 1 - math.prod(1 - share for share in rates)
