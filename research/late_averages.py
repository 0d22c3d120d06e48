"""The held-out loss when averages arrive late (`sync_delay`), and are merged in one of three ways.

    python research/late_averages.py --data FOLDER --work runs/late

*Corrected* is `flower_desloc.core.late`; *overwritten* replaces every stream by its late average,
as it came; *moments dropped* merges the parameters alone. All arms have the learning rate that was
tuned for the arm without delay.
"""

from collections import namedtuple
from collections.abc import Mapping
from itertools import product
from typing import Any
from unittest import mock

from paired import BLUE, GREEN, LIGHT, PARTITIONS, PINK, RED, Estimate, Line, Table, figure
from small_runs import SEEDS, Cells, Study, periods
from torch import Tensor

from flower_desloc.core import late
from flower_desloc.core.kinds import Kind
from flower_desloc.core.types import Stream

RATES = {256: 0.00594, 1024: 0.0119}
"""Tokens of a worker and step -> the learning rate tuned for DES-LOC-Adam (research/ladder.md)."""
Arm = namedtuple("Arm", "tokens period partition delay way", defaults=("corrected",))
OF_WAYS = [Arm(256, 16, partition, delay) for partition in PARTITIONS for delay in (4, 8, 16)]
LARGER_BATCH = [Arm(1024, 16, "iid", delay) for delay in (2, 4, 8, 16)]
LONGER_PERIOD = [Arm(256, 64, "iid", delay) for delay in (8, 16, 32, 64)]


def _overwritten(kind: Kind, now: Stream, sent: Stream, average: Stream, **_: Any) -> Stream:
    del kind, now, sent
    return dict(average)


def _params_alone(
    kind: Kind, now: Stream, sent: Stream, average: Stream, **how: Any
) -> Mapping[str, Tensor]:
    return late.merged(kind, now, sent, average, **how) if kind is Kind.PARAMS else now


WAYS = {"corrected": late.merged, "overwritten": _overwritten, "moments dropped": _params_alone}


def settings(arm: Arm) -> str:
    batch = f"data.batch_size={arm.tokens // 32} optimizer.lr={RATES[arm.tokens]}"
    return f"{batch} {periods(*(n * arm.period for n in (1, 3, 6)))} sync_delay={arm.delay}"


def merging(arm: Arm) -> Any:
    return mock.patch("flower_desloc.flower.window_events.merged", WAYS[arm.way])


study = Study("late_averages", Arm, settings, around=merging)


def place(arm: Arm) -> Arm:
    """Return the arm without delay that an arm is compared with."""
    return arm._replace(delay=0, way="corrected")


def cells() -> Cells:
    arms = [arm._replace(way=way) for arm, way in product(OF_WAYS, WAYS)]
    arms += LARGER_BATCH + LONGER_PERIOD
    for seed in SEEDS:
        yield from ((arm, seed) for arm in dict.fromkeys([*map(place, arms), *arms]))


def gap(arm: Arm, way: str = "corrected") -> Estimate:
    return study.above(arm._replace(way=way), place(arm))


def line(label: str, colour: str, arms: list[Arm], way: str = "corrected") -> Line:
    return label, colour, "o-", [(arm.delay / arm.period, gap(arm, way)) for arm in arms]


def table() -> Table:
    rows = []
    for arm in OF_WAYS + LARGER_BATCH + LONGER_PERIOD:
        found = (gap(arm, way) for way in WAYS)
        at = arm.tokens, arm.period, PARTITIONS[arm.partition], arm.delay
        rows.append([*at, *(one if one.seeds else "" for one in found)])
    return Table(["tokens", "K_x", "data", "delay", *WAYS], rows)


def picture() -> None:
    panels = {
        f"{name}, K = 16/48/96, 256 tokens": [
            line(way, colour, [arm for arm in OF_WAYS if arm.partition == partition], way)
            for way, colour in zip(WAYS, (BLUE, RED, LIGHT), strict=True)
        ]
        for partition, name in PARTITIONS.items()
    }
    panels["IID, corrected"] = [
        line("K_x = 16, 256 tokens", BLUE, OF_WAYS[:3]),
        line("K_x = 16, 1024 tokens", GREEN, LARGER_BATCH),
        line("K_x = 64, 256 tokens", PINK, LONGER_PERIOD),
    ]
    x, y = "delay, share of the window", "held-out loss above no delay, %"
    figure("late_averages", panels, x, y, yscale="symlog")


if __name__ == "__main__":
    study.main(__doc__, cells)
