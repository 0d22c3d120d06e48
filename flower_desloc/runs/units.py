"""Numbers as people read them: bytes, durations, losses, factors."""

import math
from typing import Final

TEXT: Final = "causal_lm"
"""The task whose data are measured in bytes."""
_BYTE_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")


def bytes_text(count: float) -> str:
    """Return ``count`` bytes in units of 1000.

    >>> bytes_text(9_900_000), bytes_text(132_400_000), bytes_text(512)
    ('9.9 MB', '132 MB', '512 B')
    """
    power = 0
    # 999.5 would be printed as 1000.
    while count >= 999.5 and power < len(_BYTE_UNITS) - 1:
        count /= 1000
        power += 1
    return f"{count:.{1 if power and count < 99.95 else 0}f} {_BYTE_UNITS[power]}"


def duration_text(seconds: float) -> str:
    """Return ``seconds`` as minutes and seconds, with hours in front when there are any.

    >>> duration_text(94), duration_text(3723)
    ('1:34', '1:02:03')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def loss_text(loss: float | None) -> str:
    """Return a loss with three decimals; ``-`` when there is none."""
    return "-" if loss is None else f"{loss:.3f}"


def percent_text(share: float | None) -> str:
    """Return a share of 1 in percent; ``-`` when there is none.

    >>> percent_text(0.8914)
    '89.1 %'
    """
    return "-" if share is None else f"{share:.1%}".replace("%", " %")


def figures(value: float | None) -> str:
    """Return a perplexity or a factor with three significant figures; ``-`` when there is none.

    >>> figures(2), figures(170.67), figures(17.62), figures(65000)
    ('2.00', '171', '17.6', '6.5e+04')
    """
    if value is None:
        return "-"
    if not math.isfinite(value) or value >= 1000:
        return f"{value:.3g}"
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def size_text(size: int, task: str) -> str:
    """Return the size of data: bytes of text, or a number of images."""
    return bytes_text(size) if task == TEXT else str(size)


def period_text(period: object) -> str:
    """Return a sync period: ``every 16``, or ``never``."""
    return f"every {period}" if isinstance(period, int) else str(period)
