"""Measured rules: the other periods, bound and formats for a K_x, and their cost in loss.

A loss is in per cent of the held-out loss of the method that averages everything every K_x steps,
with the same optimizer: the mean over pairs with the same seed, in brackets its 95 % interval. All
are measured on text, with 41,120 parameters unless a note has another number; ``PAGE`` has the
measurements.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from flower_desloc.app.plan.planned_run import PlannedRun, PlannedStream
from flower_desloc.app.plan.theory import half_life
from flower_desloc.core.kinds import Kind
from flower_desloc.core.schedule import PARAMS
from flower_desloc.optim.description import Family

PAGE: Final = "research/paper.md#what-half-the-bytes-cost"

SHORT_HALF_LIVES: Final = 2
"""Half-lives up to which K_x is short: 27 steps at a beta of 0.95.

Measured with Adam and non-IID data. At 1.2 half-lives a rarely averaged exp_avg costs loss, and a
rarely averaged exp_avg_sq does not; at 2.4 neither does; from 4.7 on it is the other way round.
"""

Data = Literal["IID", "non-IID"]

NOT_MEASURED: Final = "not measured"

LEAN: Final = {PARAMS: "int8", "exp_avg": "int4", "exp_avg_sq": "int8"}
"""Formats of the preset ``lean``."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What to set in one case, and what it cost where it was measured."""

    optimizer: Family
    data: Data | Literal["any"]
    half_lives: Literal["up to 2", "above 2", "any"]
    """K_x in half-lives: of the slower moment for Adam, of the first moment for ADOPT."""
    first: int
    """K_u / K_x."""
    second: int
    """K_v / K_x."""
    lean: bool = False
    """Whether to bound the first moment (``sync_bound``) and to send the formats ``LEAN``."""
    bytes_share: float | None = None
    """Bytes compared with those of the method that averages everything every K_x steps, in fp32."""
    loss: str = NOT_MEASURED
    """Per cent above that method's."""
    note: str = ""

    def multiple(self, kind: Kind) -> int:
        """Return the period of a stream as a multiple of K_x."""
        if kind is Kind.FIRST_MOMENT:
            return self.first
        return self.second if kind in (Kind.SECOND_MOMENT, Kind.MAXIMUM) else 1

    def periods(self, streams: Iterable[PlannedStream], of_params: int) -> dict[str, int]:
        """Return the periods of ``streams`` where K_x is ``of_params``."""
        return {stream.name: self.multiple(stream.kind) * of_params for stream in streams}

    @property
    def case(self) -> str:
        """The case in words."""
        data = {"any": ""}.get(self.data, f", {self.data} data")
        half_lives = {"any": ""}.get(self.half_lives, f", K_x {self.half_lives} half-lives")
        return f"{self.optimizer}{data}{half_lives}"


RULES: Final = (
    Rule(
        optimizer="Adam", data="IID", half_lives="any",
        first=1, second=6, lean=True, bytes_share=0.14,
        loss="-0.34 to +0.30",
        note="the means at K_x = 16, with up to 4,262,144 parameters; at K_x = 128 "
        "+0.02 (-0.17 to +0.20)",
    ),
    Rule(
        optimizer="Adam", data="non-IID", half_lives="up to 2",
        first=1, second=6, lean=True, bytes_share=0.14,
        loss="-0.12 to +0.43",
        note="the means at K_x = 16, with up to 1,082,496 parameters",
    ),
    Rule(
        optimizer="Adam", data="non-IID", half_lives="above 2",
        first=6, second=1, lean=True, bytes_share=0.18,
        loss="+0.42 (+0.10 to +0.73)",
        note="at K_x = 128; with K_u = K_x and K_v = 6 K_x +1.80 (+1.24 to +2.36)",
    ),
    Rule(
        optimizer="ADOPT", data="IID", half_lives="up to 2",
        first=1, second=6, bytes_share=0.72,
        loss="+0.27 (-0.04 to +0.58)",
        note="at K_x = 16 with 213,440 parameters; with K_u = 3 K_x, half the bytes, "
        "+1.44 (+0.76 to +2.12)",
    ),
    Rule(
        optimizer="ADOPT", data="non-IID", half_lives="up to 2",
        first=1, second=6, bytes_share=0.72,
        note="at K_x = 16 K_u = 3 K_x and K_v = 6 K_x, half the bytes, cost "
        "+0.76 (+0.36 to +1.16)",
    ),
    Rule(
        optimizer="ADOPT", data="IID", half_lives="above 2",
        first=3, second=6, bytes_share=0.5,
        loss="+0.09 (-0.35 to +0.53)", note="at K_x = 256",
    ),
    Rule(
        optimizer="ADOPT", data="non-IID", half_lives="above 2",
        first=3, second=6, bytes_share=0.5,
        loss="+0.00 (-0.23 to +0.23)", note="at K_x = 128",
    ),
    Rule(
        optimizer="other", data="any", half_lives="any",
        first=3, second=6, note="the paper's default periods",
    ),
)  # fmt: skip
"""One rule for every case."""


def family(run: PlannedRun) -> Family:
    """Return whose rules apply to a run.

    Adam has ``sync_bound`` only for betas with beta1^2 < beta2; with others it was not measured.
    """
    first, second = (run.moment(kind) for kind in (Kind.FIRST_MOMENT, Kind.SECOND_MOMENT))
    if first is None or second is None:
        return "other"
    if run.family == "Adam" and _beta(first) ** 2 >= _beta(second):
        return "other"
    return run.family


def longest_short(run: PlannedRun) -> int:
    """Return the longest K_x that is short compared with the half-lives of the moments."""
    kinds = [Kind.FIRST_MOMENT, *([Kind.SECOND_MOMENT] if family(run) == "Adam" else [])]
    return int(SHORT_HALF_LIVES * max(half_life(_beta(run.moment(kind))) for kind in kinds))


def _beta(moment: PlannedStream | None) -> float:
    return (moment and moment.beta) or 0.0


def rule_for(run: PlannedRun, of_params: int) -> Rule:
    """Return the rule for a run whose parameters are averaged every ``of_params`` steps."""
    optimizer = family(run)
    data = "IID" if run.partition == "iid" else "non-IID"
    half_lives = "up to 2" if of_params <= longest_short(run) else "above 2"
    (rule,) = (
        rule
        for rule in RULES
        if rule.optimizer == optimizer
        and rule.data in (data, "any")
        and rule.half_lives in (half_lives, "any")
    )
    return rule
