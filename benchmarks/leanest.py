"""How few bytes: rare averages of u and v, 4-bit codes, late averages and slow momentum together.

    python benchmarks/leanest.py measure --data FOLDER --work runs/leanest
    python benchmarks/leanest.py draw     # docs/leanest.png, and the tables as text

FOLDER holds a text file for each of the domains wiki, python, math and french. Each method's rate
is tuned on a seed of its own, IID.
"""

import json
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from small_runs import ROOT, Gap, command_line, final_loss, keep, kept, run

RESULTS = ROOT / "benchmarks" / "results" / "leanest.json"
PICTURE = ROOT / "docs" / "leanest.png"
SEEDS = (0, 1, 2)
SPARE = 100
STEPS = 512
RATES = (0.006, 0.012)
TOKENS = 256
"""Of a worker in one step."""
PARTITIONS = {"iid": "IID", "by_domain": "by domain"}
LOCAL = "Local Adam"
CODES = ("wire.params=int4", "wire.exp_avg=int4", "wire.exp_avg_sq=int8")


def periods(k_x: int, k_u: int, k_v: int | str) -> tuple[str, ...]:
    return f"sync.params={k_x}", f"sync.exp_avg={k_u}", f"sync.exp_avg_sq={k_v}"


METHODS = {
    LOCAL: periods(16, 16, 16),
    "DES-LOC 16/48/96": periods(16, 48, 96),
    "lean 8/24/48": (*periods(8, 24, 48), "wire.params=int8", *CODES[1:]),
    "16/192/never, 4 bits": (*periods(16, 192, "never"), *CODES[:2]),
    "12/192/never, 4 bits": (*periods(12, 192, "never"), *CODES[:2]),
    "12/144/288, 4 bits": (*periods(12, 144, 288), *CODES),
    "12/144/288, 4 bits, bounded": (*periods(12, 144, 288), *CODES, "sync_bound=true"),
    "16/16/never, 4 bits, bounded": (*periods(16, 16, "never"), *CODES[:2], "sync_bound=true"),
    "12/144/288, 4 bits, late by 2": (*periods(12, 144, 288), *CODES, "sync_delay=2"),
    "12/144/288, 4 bits, slow u": (
        *periods(12, 144, 288), *CODES, "optimizer.betas=[0.99,0.95]", "optimizer.mix=0.7",
    ),
    "8/96/384, 4 bits": (*periods(8, 96, 384), *CODES),
}  # fmt: skip


class Arm(NamedTuple):
    """A cell of the study."""

    method: str
    tokens: int
    partition: str
    lr: float


class Outcome(NamedTuple):
    """What a run ended with; a loss of NaN if it diverged."""

    loss: float
    megabytes: float
    """Payload that all four workers sent."""


Outcomes = dict[Arm, dict[int, Outcome]]


def measure(data: Path, work: Path) -> None:
    """Run what has no result yet: tuning first, then the comparison seed by seed."""
    runs = kept(RESULTS)

    def lack(arm: Arm, seed: int) -> None:
        if seed in by_arm(runs).get(arm, {}):
            return
        overrides = (
            f"run.steps={STEPS}",
            f"run.seed={seed}",
            f"data.partition={arm.partition}",
            f"data.batch_size={arm.tokens // 32}",
            f"optimizer.lr={arm.lr}",
            *METHODS[arm.method],
        )
        summary = run("desloc_adam", overrides, data, work / str(seed))
        loss = final_loss(summary)
        sent = summary["bytes"]["measured"]["up"]["total"] / 1e6 if summary else None
        ended = {"loss": None if math.isnan(loss) else loss, "megabytes": sent}
        runs.append({**arm._asdict(), "seed": seed, **ended})
        print(json.dumps(runs[-1]), flush=True)
        keep(RESULTS, runs)

    for method, lr in product(METHODS, RATES):
        lack(Arm(method, TOKENS, "iid", lr), SPARE)
    for seed, partition in product(SEEDS, PARTITIONS):
        for arm in tuned(partition, by_arm(runs)):
            lack(arm, seed)


def tuned(partition: str, found: Outcomes) -> Iterator[Arm]:
    """Yield each method at the rate that was best on the spare seed."""
    for method in METHODS:
        arms = [Arm(method, TOKENS, "iid", lr) for lr in RATES]
        losses = {arm: found[arm][SPARE].loss for arm in arms if SPARE in found.get(arm, {})}
        if losses:
            best = min(losses, key=lambda arm: (math.isnan(losses[arm]), losses[arm]))
            yield best._replace(partition=partition)


def by_arm(runs: list[dict[str, object]]) -> Outcomes:
    found: Outcomes = {}
    for one in runs:
        arm = Arm(**{key: one[key] for key in Arm._fields if key in one})  # type: ignore[arg-type]
        values = (math.nan if one[key] is None else one[key] for key in Outcome._fields)
        ended = Outcome(*values)  # type: ignore[arg-type]
        found.setdefault(arm, {})[int(one["seed"])] = ended  # type: ignore[call-overload]
    return found


def compared(found: Outcomes) -> Iterator[tuple[Arm, float, Gap]]:
    """Yield each method with its seeds, how many times fewer bytes it sent, and its loss above."""
    for partition in PARTITIONS:
        arms = {arm.method: arm for arm in tuned(partition, found)}
        local = found.get(arms[LOCAL], {})
        for arm in arms.values():
            ours = found.get(arm, {})
            if not {*SEEDS} <= ours.keys() & local.keys():
                continue
            losses, theirs = ({seed: one[seed].loss for seed in SEEDS} for one in (ours, local))
            yield arm, local[0].megabytes / ours[0].megabytes, Gap.of(losses, theirs)


def draw() -> None:
    found = by_arm(kept(RESULTS))
    print("| data | method | rate | fewer bytes, times | loss above Local, % |")
    print("|---|---|---|---|---|")
    for arm, fewer, gap in compared(found):
        data = PARTITIONS[arm.partition]
        print(
            f"| {data} | {arm.method} | {arm.lr:g} | {fewer:.1f} | "
            f"{'' if arm.method == LOCAL else gap} |"
        )
    picture(found).savefig(PICTURE, dpi=100)


def picture(found: Outcomes) -> Figure:
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    panel = figure.subplots()
    for (partition, name), colour in zip(PARTITIONS.items(), ("#0072B2", "#E69F00"), strict=True):
        points = [
            (fewer, gap)
            for arm, fewer, gap in compared(found)
            if arm.partition == partition and arm.method != LOCAL and "slow" not in arm.method
        ]
        panel.errorbar(
            [fewer for fewer, _ in points],
            [gap.mean for _, gap in points],
            [gap.reach for _, gap in points],
            fmt="o", ms=4, lw=1, capsize=3, color=colour,
            label=name,
        )  # fmt: skip
    panel.axhline(0, color="#777777", lw=0.8)
    panel.set_xscale("log")
    panel.set_xticks((2, 4, 8, 16, 32), ("2", "4", "8", "16", "32"))
    panel.minorticks_off()
    panel.set_xlabel("times fewer bytes than Local Adam")
    panel.set_ylabel("held-out loss above Local Adam, %")
    panel.legend(frameon=False, fontsize=7)
    return figure


if __name__ == "__main__":
    command_line(__doc__, measure, draw)
