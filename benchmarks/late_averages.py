"""The held-out loss when averages arrive late (`sync_delay`), and are merged in one of three ways.

    python benchmarks/late_averages.py measure --data FOLDER --work runs/late
    python benchmarks/late_averages.py draw     # docs/late_averages.png, and the tables as text

FOLDER holds a text file for each of the domains wiki, python, math and french. A run that is in
benchmarks/results/late_averages.json is not repeated. *Corrected* is `flower_desloc.core.late`;
*overwritten* replaces every stream by its late average, as it came; *moments dropped* merges the
parameters alone. All arms have the learning rate that was tuned for the arm without delay.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from matplotlib.figure import Figure
from small_runs import ROOT, Gap, command_line, final_loss, keep, kept, run
from torch import Tensor

from flower_desloc.core import late
from flower_desloc.core.averaging import Stream
from flower_desloc.core.schedule import PARAMS

RESULTS = ROOT / "benchmarks" / "results" / "late_averages.json"
PICTURE = ROOT / "docs" / "late_averages.png"
SEEDS = (0, 1, 2)
RATES = {256: 0.00594, 1024: 0.0119}
"""Tokens of a worker and step -> the learning rate tuned for DES-LOC-Adam (docs/ladder.md)."""


class Arm(NamedTuple):
    """A cell of the study."""

    tokens: int
    period: int
    partition: str
    delay: int
    way: str = "corrected"

    @property
    def place(self) -> "Arm":
        """The same without delay, with which it is compared."""
        return self._replace(delay=0, way="corrected")


def arms() -> Iterator[Arm]:
    for partition in ("iid", "by_domain"):
        yield Arm(256, 16, partition, 0)
        for delay in (4, 8, 16):
            for way in WAYS:
                yield Arm(256, 16, partition, delay, way)
    for delay in (0, 2, 4, 8, 16):
        yield Arm(1024, 16, "iid", delay)
    for delay in (0, 8, 16, 32, 64):
        yield Arm(256, 64, "iid", delay)


def _overwritten(name: str, now: Stream, sent: Stream, average: Stream, **_: Any) -> Stream:
    del name, now, sent
    return dict(average)


def _params_alone(
    name: str, now: Stream, sent: Stream, average: Stream, **how: Any
) -> Mapping[str, Tensor]:
    return late.merged(name, now, sent, average, **how) if name == PARAMS else now


WAYS: dict[str, Callable[..., Any]] = {
    "corrected": late.merged,
    "overwritten": _overwritten,
    "moments dropped": _params_alone,
}


def measure(data: Path, work: Path) -> None:
    """Run what has no result yet."""
    runs = kept(RESULTS)
    done = {(*(run[key] for key in Arm._fields), run["seed"]) for run in runs}
    for seed in SEEDS:
        for arm in arms():
            if (*arm, seed) in done:
                continue
            overrides = (
                "run.steps=512",
                f"data.partition={arm.partition}",
                f"data.batch_size={arm.tokens // 32}",
                f"optimizer.lr={RATES[arm.tokens]}",
                f"sync.params={arm.period}",
                f"sync.exp_avg={3 * arm.period}",
                f"sync.exp_avg_sq={6 * arm.period}",
                f"sync_delay={arm.delay}",
                f"run.seed={seed}",
            )
            folder = work / "-".join(map(str, (*arm, seed))).replace(" ", "_")
            with mock.patch("flower_desloc.flower.client.merged", WAYS[arm.way]):
                loss = final_loss(run("desloc_adam", overrides, data, folder))
            runs.append({**arm._asdict(), "seed": seed, "loss": loss})
            print(json.dumps(runs[-1]), flush=True)
            keep(RESULTS, runs)


Losses = Mapping[Arm, Mapping[int, float]]


def gap(losses: Losses, arm: Arm) -> Gap:
    return Gap.of(losses.get(arm, {}), losses.get(arm.place, {}))


def draw() -> None:
    losses: dict[Arm, dict[int, float]] = {}
    for one in kept(RESULTS):
        arm = Arm(*(one[key] for key in Arm._fields))
        losses.setdefault(arm, {})[one["seed"]] = one["loss"]
    print("| tokens | K_x | data | delay | " + " | ".join(WAYS) + " |")
    print("|---|---|---|---|" + "---|" * len(WAYS))
    rows = dict.fromkeys(arm._replace(way="") for arm in arms() if arm.delay)
    for row in rows:
        gaps = [gap(losses, row._replace(way=way)) for way in WAYS]
        cells = ["" if math.isnan(one.mean) else str(one) for one in gaps]
        data = "IID" if row.partition == "iid" else "by domain"
        print(f"| {row.tokens} | {row.period} | {data} | {row.delay} | {' | '.join(cells)} |")
    picture(losses).savefig(PICTURE, dpi=100)


def picture(losses: Losses) -> Figure:
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    colours = dict(zip(WAYS, ("#0072B2", "#D55E00", "#999999"), strict=True))
    for panel, partition, title in (
        (left, "iid", "IID, K = 16/48/96, 256 tokens"),
        (middle, "by_domain", "by domain, K = 16/48/96, 256 tokens"),
    ):
        for way in WAYS:
            line(panel, losses, [Arm(256, 16, partition, d, way) for d in (4, 8, 16)], way,
                 colours[way])  # fmt: skip
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_yscale("symlog", linthresh=1)
    line(right, losses, [Arm(256, 16, "iid", d) for d in (4, 8, 16)], "K_x = 16, 256 tokens",
         "#0072B2")  # fmt: skip
    line(right, losses, [Arm(1024, 16, "iid", d) for d in (2, 4, 8, 16)], "K_x = 16, 1024 tokens",
         "#009E73")  # fmt: skip
    line(right, losses, [Arm(256, 64, "iid", d) for d in (8, 16, 32, 64)], "K_x = 64, 256 tokens",
         "#CC79A7")  # fmt: skip
    right.set_title("IID, corrected", loc="left", fontsize=10)
    for panel in (left, middle, right):
        panel.axhline(0, color="#777777", lw=0.8)
        panel.set_xlabel("delay, share of the window")
        panel.legend(frameon=False, fontsize=8)
    left.set_ylabel("held-out loss above no delay, %")
    return figure


def line(panel: Any, losses: Losses, points: list[Arm], label: str, colour: str) -> None:
    gaps = [gap(losses, arm) for arm in points]
    panel.errorbar(
        [arm.delay / arm.period for arm in points],
        [one.mean for one in gaps],
        [one.reach for one in gaps],
        fmt="o-", ms=4, lw=1.2, capsize=3, color=colour, label=label,
    )  # fmt: skip


if __name__ == "__main__":
    command_line(__doc__, measure, draw)
