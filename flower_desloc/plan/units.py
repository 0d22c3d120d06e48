"""Numbers of a plan as people read them: durations, bandwidths, factors."""

import math
from typing import Final

_DURATIONS: Final = (
    (86400, "days"),
    (3600, "h"),
    (60, "min"),
    (1, "s"),
    (1e-3, "ms"),
    (1e-6, "µs"),
)
_BANDWIDTHS: Final = ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"))


def seconds_text(seconds: float) -> str:
    """Return a duration in the unit that suits it.

    >>> seconds_text(0.0042), seconds_text(10.8), seconds_text(2.2e5)
    ('4.2 ms', '10.8 s', '2.55 days')
    """
    if not seconds:
        return "0 s"
    if not math.isfinite(seconds):
        return "for ever"
    return _in_units(seconds, _DURATIONS)


def unit_of(seconds: float) -> tuple[float, str]:
    """Return the unit that suits a duration: its seconds and its name."""
    return next((unit for unit in _DURATIONS if seconds >= unit[0]), _DURATIONS[-1])


def bandwidth_text(bytes_per_second: float) -> str:
    """Return a bandwidth in bits.

    >>> bandwidth_text(125e6), bandwidth_text(6.4e4)
    ('1 Gbit/s', '512 kbit/s')
    """
    return _in_units(8 * bytes_per_second, (*_BANDWIDTHS, (1, "bit/s")))


def number_text(value: float) -> str:
    """Return a number to three figures, without an exponent where it is large.

    >>> number_text(56.844), number_text(2396.3), number_text(0.0139)
    ('56.8', '2,396', '0.0139')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def times_text(factor: float) -> str:
    """Return how many times as much.

    >>> times_text(170.667), times_text(2), times_text(1 / 256), times_text(float("inf"))
    ('170.7x', '2.0x', '0.0039x', '-')
    """
    if not math.isfinite(factor):
        return "-"
    return f"{factor:.1f}x" if factor >= 1 else f"{factor:.2g}x"


def _in_units(value: float, units: tuple[tuple[float, str], ...]) -> str:
    # Rounded first: 59.96 s would be printed as 60 s.
    value = float(f"{value:.3g}")
    size, name = next((unit for unit in units if value >= unit[0]), units[-1])
    return f"{value / size:,.3g} {name}" if value / size < 1000 else f"{value / size:,.0f} {name}"
