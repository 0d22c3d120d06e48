"""The held-out loss of DES-LOC-Adam with and without `sync_bound`, above Local Adam's.

    python benchmarks/bounded_averages.py measure --data FOLDER --work runs/bounded
    python benchmarks/bounded_averages.py draw     # the table as text

FOLDER holds a text file for each of the domains wiki, python, math and french. Every method is run
at both rates; Local Adam's best rate on the seeds is what the others are compared with.
"""

import json
import math
from itertools import product
from pathlib import Path
from typing import NamedTuple

from small_runs import ROOT, Gap, command_line, final_loss, keep, kept, run

RESULTS = ROOT / "benchmarks" / "results" / "bounded_averages.json"
SEEDS = (0, 1, 2)
STEPS = 512
RATES = (0.012, 0.006)
PARTITIONS = {"iid": "IID", "by_domain": "by domain"}
PERIODS = ((8, 8, 8), (8, 24, 48), (16, 16, 16), (16, 48, 96))


class Arm(NamedTuple):
    """A cell of the study."""

    periods: tuple[int, int, int]
    bound: bool
    partition: str
    lr: float

    @property
    def is_local(self) -> bool:
        return len({*self.periods}) == 1


Losses = dict[Arm, dict[int, float]]


def arms() -> list[Arm]:
    every = (Arm(*cell) for cell in product(PERIODS, (False, True), PARTITIONS, RATES))
    return [arm for arm in every if not (arm.is_local and arm.bound)]


def measure(data: Path, work: Path) -> None:
    """Run what has no result yet, seed by seed."""
    runs = kept(RESULTS)
    for seed, arm in product(SEEDS, arms()):
        if seed in by_arm(runs).get(arm, {}):
            continue
        overrides = (
            f"run.steps={STEPS}",
            f"run.seed={seed}",
            f"data.partition={arm.partition}",
            "data.batch_size=8",
            f"optimizer.lr={arm.lr}",
            *(
                f"sync.{name}={period}"
                for name, period in zip(
                    ("params", "exp_avg", "exp_avg_sq"), arm.periods, strict=True
                )
            ),
            f"sync_bound={str(arm.bound).lower()}",
        )
        loss = final_loss(run("desloc_adam", overrides, data, work / str(seed)))
        runs.append({**arm._asdict(), "seed": seed, "loss": None if math.isnan(loss) else loss})
        print(json.dumps(runs[-1]), flush=True)
        keep(RESULTS, runs)


def by_arm(runs: list[dict[str, object]]) -> Losses:
    losses: Losses = {}
    for one in runs:
        values = [one[key] for key in Arm._fields]
        arm = Arm(tuple(values[0]), *values[1:])  # type: ignore[arg-type]
        loss = math.nan if one["loss"] is None else float(one["loss"])  # type: ignore[arg-type]
        losses.setdefault(arm, {})[int(one["seed"])] = loss  # type: ignore[call-overload]
    return losses


def draw() -> None:
    losses = {arm: of for arm, of in by_arm(kept(RESULTS)).items() if len(of) == len(SEEDS)}
    print("| periods | data | rate | as it is, % above Local Adam | worst | bounded | worst |")
    print("|---|---|---|---|---|---|---|")
    for periods, partition, lr in product(PERIODS, PARTITIONS, RATES):
        locals_ = [
            losses[arm]
            for rate in RATES
            if (arm := Arm((periods[0],) * 3, False, partition, rate)) in losses
        ]
        if not locals_ or len({*periods}) == 1:
            continue
        place = min(locals_, key=lambda of: sum(of.values()))
        cells = []
        for bound in (False, True):
            of = losses.get(Arm(periods, bound, partition, lr), {})
            worst = max((100 * (of[seed] / place[seed] - 1) for seed in of), default=math.nan)
            cells += [str(Gap.of(of, place)), f"{worst:+.2f}"]
        where = "/".join(map(str, periods))
        print(f"| {where} | {PARTITIONS[partition]} | {lr:g} | {' | '.join(cells)} |")


if __name__ == "__main__":
    command_line(__doc__, measure, draw)
