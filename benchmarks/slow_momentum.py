"""The held-out loss of a slow momentum (`optimizer.mix`) when u is averaged rarely.

    python benchmarks/slow_momentum.py measure --data FOLDER --work runs/slow
    python benchmarks/slow_momentum.py draw     # docs/slow_momentum.png, and the tables as text

FOLDER holds a text file for each of the domains wiki, python, math and french. Learning rates, and
for each optimizer the pair of beta1 and mix, are tuned on a seed of their own, at K_u = 12 K_x.
"""

import json
import math
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from small_runs import ROOT, Gap, command_line, final_loss, keep, kept, run

RESULTS = ROOT / "benchmarks" / "results" / "slow_momentum.json"
PICTURE = ROOT / "docs" / "slow_momentum.png"
NAMES = {"adam": "Adam", "adopt": "ADOPT", "diloco": "DiLoCo"}
SEEDS = (0, 1, 2)
SPARE = 100
STEPS = 512
FAST = (0.95, 1.0)
"""beta1 and mix as in the presets."""
SLOW = ((0.98, 0.9), (0.99, 0.7), (0.99, 0.9), (0.999, 0.7))
RATES = {"adam": 0.006, "adopt": 0.006, "diloco": 0.006}
FACTORS = (0.5, 1, 2, 4)
RATIOS = (1, 3, 12, 48)
"""K_u / K_x."""


class Arm(NamedTuple):
    """A cell of the study; an ``optimizer`` of diloco is the preset of that name."""

    optimizer: str
    beta1: float
    mix: float
    lr: float
    k_x: int
    k_u: int
    k_v: int
    partition: str
    tokens: int = 256

    @property
    def label(self) -> str:
        if self.optimizer == "diloco":
            return "DiLoCo"
        if (self.beta1, self.mix) != FAST:
            return "slow momentum"
        return "Local" if self.k_u == self.k_v == self.k_x else "DES-LOC"


Losses = dict[Arm, dict[int, float]]


class Tuning(NamedTuple):
    """What is tuned together: the best rate of each pair of beta1 and mix."""

    optimizer: str
    k_x: int
    tokens: int

    def arms(self, betas: tuple[float, float]) -> Iterator[Arm]:
        ratio = 3 if betas == FAST else 12
        for factor in FACTORS:
            lr = round(RATES[self.optimizer] * factor, 6)
            periods = (self.k_x, ratio * self.k_x, 6 * self.k_x)
            yield Arm(self.optimizer, *betas, lr, *periods, "iid", self.tokens)

    def best(self, losses: Losses, pairs: Iterable[tuple[float, float]]) -> Arm:
        arms = [arm for betas in pairs for arm in self.arms(betas)]
        found = {arm: losses[arm][SPARE] for arm in arms if SPARE in losses.get(arm, {})}
        return min(found, key=lambda arm: math.inf if math.isnan(found[arm]) else found[arm])


TUNINGS = (
    Tuning("adam", 8, 256),
    Tuning("adopt", 8, 256),
    Tuning("adam", 64, 256),
    Tuning("diloco", 64, 256),
    Tuning("adam", 8, 1024),
)


def pairs(tuning: Tuning) -> tuple[tuple[float, float], ...]:
    return (FAST,) if tuning.optimizer == "diloco" else (FAST, *SLOW)


def arms_of(tuning: Tuning, losses: Losses) -> Iterator[Arm]:
    """Yield the arms that are compared, at the tuned rates."""
    fast = tuning.best(losses, (FAST,))
    partitions = ("iid", "by_domain") if (tuning.k_x, tuning.tokens) == (8, 256) else ("iid",)
    if tuning.optimizer == "diloco":
        yield fast
        return
    slow = tuning.best(losses, SLOW)
    k = tuning.k_x
    for partition in partitions:
        yield fast._replace(k_u=k, k_v=k, partition=partition)  # Local
        ratios = RATIOS if k == 8 else (3, 12)
        for arm, ratio in product((fast, slow), ratios):
            yield arm._replace(k_u=ratio * k, k_v=6 * k, partition=partition)
        yield slow._replace(k_u=k, k_v=k, partition=partition)


def measure(data: Path, work: Path) -> None:
    """Run what has no result yet: tuning first, then the comparison seed by seed."""
    runs = kept(RESULTS)

    def lack(arm: Arm, seed: int) -> None:
        if seed in by_arm(runs).get(arm, {}):
            return
        summary = run(preset(arm), overrides(arm, seed), data, work / f"{seed}")
        loss = final_loss(summary)
        runs.append({**arm._asdict(), "seed": seed, "loss": None if math.isnan(loss) else loss})
        print(json.dumps(runs[-1]), flush=True)
        keep(RESULTS, runs)

    for tuning in TUNINGS:
        for betas in pairs(tuning):
            for arm in tuning.arms(betas):
                lack(arm, SPARE)
        for seed in SEEDS:
            for arm in arms_of(tuning, by_arm(runs)):
                lack(arm, seed)


def preset(arm: Arm) -> str:
    return "diloco" if arm.optimizer == "diloco" else f"desloc_{arm.optimizer}"


def overrides(arm: Arm, seed: int) -> tuple[str, ...]:
    common = (
        f"run.steps={STEPS}",
        f"run.seed={seed}",
        f"data.partition={arm.partition}",
        f"data.batch_size={arm.tokens // 32}",
        f"optimizer.lr={arm.lr}",
        f"sync.params={arm.k_x}",
    )
    if arm.optimizer == "diloco":
        return common
    beta2 = 0.95 if arm.optimizer == "adam" else 0.9999  # as in the presets
    return (
        *common,
        f"optimizer.betas=[{arm.beta1},{beta2}]",
        f"optimizer.mix={arm.mix}",
        f"sync.exp_avg={arm.k_u}",
        f"sync.exp_avg_sq={arm.k_v}",
    )


def by_arm(runs: Iterable[dict[str, object]]) -> Losses:
    losses: Losses = {}
    for one in runs:
        arm = Arm(*(one[key] for key in Arm._fields))  # type: ignore[arg-type]
        loss = math.nan if one["loss"] is None else float(one["loss"])  # type: ignore[arg-type]
        losses.setdefault(arm, {})[int(one["seed"])] = loss  # type: ignore[call-overload]
    return losses


def draw() -> None:
    losses = by_arm(kept(RESULTS))
    print("tuning, on a seed of its own")
    for tuning in TUNINGS:
        for betas in pairs(tuning):
            row = [losses.get(arm, {}).get(SPARE, math.nan) for arm in tuning.arms(betas)]
            if not all(map(math.isnan, row)):
                print(*tuning, *betas, *(f"{loss:.3f}" for loss in row))
    print("\n| optimizer | data | method | K_x/K_u/K_v | rate | loss | above Local, % |")
    print("|---|---|---|---|---|---|---|")
    for arm, place in compared(losses):
        mean = sum(losses[arm].values()) / len(losses[arm])
        beta = "" if arm.label != "slow momentum" else f" ({arm.beta1:g}, {arm.mix:g})"
        data = "IID" if arm.partition == "iid" else "by domain"
        gap = "" if arm == place else Gap.of(losses[arm], losses[place])
        periods = f"{arm.k_x}/{arm.k_u}/{arm.k_v}"
        tokens = "" if arm.tokens == 256 else f", {arm.tokens} tokens"
        print(
            f"| {NAMES[arm.optimizer]} | {data}{tokens} | {arm.label}{beta} | {periods} | "
            f"{arm.lr:g} | {mean:.3f} | {gap} |"
        )
    picture(losses).savefig(PICTURE, dpi=100)


def compared(losses: Losses) -> Iterator[tuple[Arm, Arm]]:
    """Yield every compared arm that has results, and the Local arm of its place."""
    for tuning in TUNINGS:
        try:
            arms = [*arms_of(tuning, losses)]
        except ValueError:  # not tuned yet
            continue
        for arm in arms:
            optimizer = "adam" if arm.optimizer == "diloco" else arm.optimizer
            place = Tuning(optimizer, arm.k_x, arm.tokens).best(losses, (FAST,))
            place = place._replace(k_u=arm.k_x, k_v=arm.k_x, partition=arm.partition)
            if losses.get(arm, {}).keys() >= {*SEEDS} and place in losses:
                yield arm, place


def picture(losses: Losses) -> Figure:
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panels = figure.subplots(1, 4, sharey=True)
    cells = list(product(("adam", "adopt"), ("iid", "by_domain")))
    for panel, (optimizer, partition) in zip(panels, cells, strict=True):
        for label, colour in (("DES-LOC", "#0072B2"), ("slow momentum", "#D55E00")):
            points = [
                (arm.k_u / arm.k_x, Gap.of(losses[arm], losses[place]))
                for arm, place in compared(losses)
                if (arm.optimizer, arm.partition, arm.label) == (optimizer, partition, label)
                and (arm.k_x, arm.tokens) == (8, 256)
                and arm.k_v != arm.k_x
            ]
            panel.errorbar(
                [ratio for ratio, _ in points],
                [gap.mean for _, gap in points],
                [gap.reach for _, gap in points],
                fmt="o-", ms=4, lw=1.2, capsize=3, color=colour, label=label,
            )  # fmt: skip
        panel.axhline(0, color="#777777", lw=0.8)
        panel.set_xscale("log")
        panel.set_xticks(RATIOS, [str(ratio) for ratio in RATIOS])
        panel.minorticks_off()
        panel.set_xlabel("$K_u/K_x$")
        data = "IID" if partition == "iid" else "by domain"
        panel.set_title(f"{'Adam' if optimizer == 'adam' else 'ADOPT'}, {data}", fontsize=10)
    panels[0].set_ylabel("held-out loss above Local, %")
    panels[0].legend(frameon=False, fontsize=8)
    return figure


if __name__ == "__main__":
    command_line(__doc__, measure, draw)
