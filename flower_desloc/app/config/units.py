"""Numbers as text for people: bytes, durations, bandwidths, losses, factors."""

import math
from typing import Final

from flower_desloc.app.config.schema import Model
from flower_desloc.core.schedule import SyncSchedule

TEXT: Final = "causal_lm"
"""The task whose data are measured in bytes."""
_BYTE_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")
_DURATIONS: Final = (
    (86400, "days"),
    (3600, "h"),
    (60, "min"),
    (1, "s"),
    (1e-3, "ms"),
    (1e-6, "µs"),
)
_BANDWIDTHS: Final = (
    (1e12, "Tbit/s"),
    (1e9, "Gbit/s"),
    (1e6, "Mbit/s"),
    (1e3, "kbit/s"),
    (1, "bit/s"),
)


def bytes_text(count: float) -> str:
    """Return ``count`` bytes in units of 1000.

    >>> [bytes_text(count) for count in (0, 512, 1000, 999_949, 9_900_000, 132_400_000)]
    ['0 B', '512 B', '1.0 kB', '1.0 MB', '9.9 MB', '132 MB']
    """
    power = 0
    # 999.5 would be printed as 1000.
    while count >= 999.5 and power < len(_BYTE_UNITS) - 1:
        count /= 1000
        power += 1
    return f"{count:.{1 if power and count < 99.95 else 0}f} {_BYTE_UNITS[power]}"


def precision_text(model: Model) -> str:
    """Return the type in which a model computes.

    >>> precision_text(Model(precision="bf16")), precision_text(Model())
    ('bf16', 'float32')
    """
    return model.dtype if model.precision == "full" else model.precision


def duration_text(seconds: float) -> str:
    """Return ``seconds`` as minutes and seconds, with hours in front when there are any.

    >>> duration_text(94), duration_text(3723)
    ('1:34', '1:02:03')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def seconds_text(seconds: float) -> str:
    """Return a duration in the largest unit that it fills.

    >>> seconds_text(0.0042), seconds_text(10.8), seconds_text(2.2e5)
    ('4.2 ms', '10.8 s', '2.55 days')
    """
    if not seconds:
        return "0 s"
    if not math.isfinite(seconds):
        return "forever"
    return _in_units(seconds, _DURATIONS)


def bandwidth_text(bytes_per_second: float) -> str:
    """Return a bandwidth in bits per second.

    >>> bandwidth_text(125e6), bandwidth_text(6.4e4)
    ('1 Gbit/s', '512 kbit/s')
    """
    return _in_units(8 * bytes_per_second, _BANDWIDTHS)


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


def number_text(value: float) -> str:
    """Return a number with three significant figures, or all digits of a large one.

    >>> number_text(56.844), number_text(2396.3), number_text(0.0139)
    ('56.8', '2,396', '0.0139')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def times_text(factor: float) -> str:
    """Return a ratio.

    >>> times_text(170.667), times_text(2), times_text(1 / 256), times_text(float("inf"))
    ('170.7x', '2.0x', '0.0039x', '-')
    """
    if not math.isfinite(factor):
        return "-"
    return f"{factor:.1f}x" if factor >= 1 else f"{factor:.2g}x"


def size_text(size: int, task: str) -> str:
    """Return the size of data: bytes of text, or a number of examples."""
    return bytes_text(size) if task == TEXT else str(size)


def examples_noun(task: str) -> str:
    """Return what the examples of a task are called that is not ``TEXT``."""
    return "images" if task == "image_classification" else "examples"


def schedule_text(schedule: SyncSchedule, delay: int = 0) -> str:
    """Return after which local steps each stream is averaged.

    >>> schedule_text(SyncSchedule({"params": 16, "exp_avg": 48}, phases={"exp_avg": 16}), delay=2)
    'params every 16, exp_avg every 48 from 16 steps, merged 2 steps later'
    """
    texts = [f"{stream} {schedule.period_text(stream)}" for stream in schedule.periods]
    numbers = [index for index, text in enumerate(texts) if text[-1].isdigit()]
    if numbers:
        texts[numbers[-1]] += " steps"  # others may be never, or by coin
    late = f", merged {count_text(delay, 'step')} later" if delay else ""
    return f"{', '.join(texts)}{late}"


def count_text(number: int, noun: str) -> str:
    """Return a number of things.

    >>> count_text(1, "client"), count_text(4, "client")
    ('1 client', '4 clients')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _in_units(value: float, units: tuple[tuple[float, str], ...]) -> str:
    # Rounded first: 59.96 s would be printed as 60 s.
    value = float(f"{value:.3g}")
    size, name = next((unit for unit in units if value >= unit[0]), units[-1])
    return f"{value / size:,.3g} {name}" if value / size < 1000 else f"{value / size:,.0f} {name}"
