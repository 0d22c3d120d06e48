"""Measured cost of DES-LOC's rare averages: loss above that of Local (research/ladder.md)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flower_desloc.app.plan.measured import GAPS
from flower_desloc.core.schedule import NEVER, PARAMS, RESET, Period

NEAR: Final = 4
"""Distance up to which a measurement says something of a run."""
SAFE: Final = 0.5
"""Per cent of loss above Local below which rare averages count as harmless."""
NOISE: Final = 8
"""Largest ratio of the gradient noise scale to a worker's batch in the measurements."""

Periods = tuple[Period, ...]
"""Of params, exp_avg and exp_avg_sq."""

_STREAMS = (PARAMS, "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class MeasuredGap:
    """Held-out loss above Local with the same optimizer, paired by seed, in per cent.

    Local averages everything when it averages the parameters.
    """

    periods: Periods
    formats: tuple[str, ...]
    """Lossy formats of params, exp_avg and exp_avg_sq; empty: fp32."""
    bound: bool
    optimizer: str
    partition: str
    params: int
    tokens: int
    """A worker and step."""
    steps: int
    seeds: int
    loss: float
    low: float
    """Lower end of the 95 % interval."""
    high: float

    @property
    def is_safe(self) -> bool:
        """Whether the whole interval is below ``SAFE``."""
        return self.high < SAFE

    def distance(self, num_params: float, tokens: float, periods: Periods) -> float:
        """Return by what factor a run differs in size, a worker's batch and periods; 1 is equal.

        The factor of K_x is squared: by domain the gap grows fivefold from K_x = 32 to 64
        (research/ladder.md), and was not shown to grow with size. Infinite if one averages a stream
        that the other never averages.
        """
        both = zip(_relative(self.periods), _relative(periods), strict=True)
        pairs = [(a, b) for a, b in both if a or b]
        if not all(a and b for a, b in pairs):
            return math.inf
        base, *others = (a / b for a, b in pairs)
        ratios = [self.params / num_params, self.tokens / tokens, base**2, *others]
        return math.exp(math.hypot(*map(math.log, ratios)))


MEASURED: Final = tuple(MeasuredGap(*each) for each in GAPS)


_SAME: Final = {
    "sync_mode": "periodic",
    "sync_delay": 0,
    "sync_phase": {},
    "sync_once_at": [],
    "federation.min_steps": 1.0,
}
"""Settings that all measurements have in common."""


def unmeasured(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the settings of a resolved configuration that no measurement has.

    A setting that is missing, in the record of an earlier version, counts as measured.
    """

    def value(key: str) -> object:
        *section, name = key.split(".")
        return (config[section[0]] if section else config).get(name, _SAME[key])

    return tuple(key for key in _SAME if value(key) != _SAME[key])


def nearest(
    optimizer: str,
    periods: Mapping[str, Period],
    num_params: float,
    tokens: float,
    *,
    bound: bool,
    formats: Mapping[str, str],
    partition: str,
    unmeasured: Sequence[str] = (),
) -> list[tuple[float, MeasuredGap]]:
    """Return the measurements with this optimizer, each with its distance, the nearest first.

    ``tokens`` are those of a worker and step. A measurement at a shorter K_x, K_u / K_x or
    K_v / K_x, of another partition, in fp32 for a run in lossy formats, or with a bound
    (``sync_bound``) for a run without, says of the run only that it is not safe; one without a
    bound for a run with it, only that it is. Otherwise its distance is infinite. So is that of
    measurements in other lossy formats, and of all if the run has ``unmeasured`` settings. Of
    equally near ones those that differ in none of these come first, and of those the one with the
    highest loss. Empty for runs that average all streams together in fp32, as Local does, never
    average the parameters, or reset a state.
    """
    three = tuple(periods.get(name, NEVER) for name in _STREAMS)
    wanted = {name: form for name, form in formats.items() if form != "fp32"}
    if three[0] == NEVER or RESET in three or (len(set(three)) == 1 and not wanted):
        return []
    name = "adam" if optimizer == "adamw" else optimizer
    bound = bound and name == "adam" and three[1:] != (NEVER, NEVER)  # otherwise it does nothing
    in_order = tuple(wanted[name] for name in _STREAMS if name in wanted)

    found = []
    for gap in (gap for gap in MEASURED if gap.optimizer == name):
        near = gap.distance(num_params, tokens, three)
        both = zip(_relative(gap.periods), _relative(three), strict=True)
        easier = (
            gap.formats != in_order
            or gap.partition != partition
            or (gap.bound and not bound)
            or any(ours < theirs for ours, theirs in both)
        )
        harder = bound and not gap.bound
        says = not unmeasured and gap.formats in (in_order, ())
        says &= not (easier if gap.is_safe else harder)
        order = not says, round(near, 3), easier, harder, -gap.high
        found.append((order, near if says else math.inf, gap))
    return [(apart, gap) for _, apart, gap in sorted(found, key=lambda each: each[0])]


def unknown(apart: float, unmeasured: Sequence[str] = (), noise_scale: float | None = None) -> str:
    """Return why the nearest measurement, at this distance, says nothing of a run; "" if it does.

    ``noise_scale`` is the run's, in batches of a worker.
    """
    if unmeasured:
        return f"no measurement has such a setting of {' and '.join(unmeasured)}"
    if math.isinf(apart):
        return "measurements differ in periods, formats, text or bound"
    if apart > NEAR:
        return "no measurement is near this run's model, batch and periods"
    if noise_scale is not None and noise_scale > NOISE:
        return f"noisier than measured, above {NOISE} times the batch"
    return ""


def _relative(periods: Periods) -> tuple[float, ...]:
    """Return K_x, and the other periods in units of K_x; 0: never."""
    params, *moments = periods
    assert isinstance(params, int)
    return params, *(period / params if isinstance(period, int) else 0 for period in moments)
