"""The held-out loss of DES-LOC-Adam with and without `sync_bound`, above Local Adam's.

    python research/bounded_averages.py --data FOLDER --work runs/bounded

Every method is run at both rates; Local Adam's best rate on the seeds is what the others are
compared with.
"""

import math
from collections import namedtuple
from itertools import product

from paired import PARTITIONS, Table
from small_runs import SEEDS, Cells, Study, periods

RATES = (0.012, 0.006)
PERIODS = ((8, 8, 8), (8, 24, 48), (16, 16, 16), (16, 48, 96))
Arm = namedtuple("Arm", "periods bound partition lr")


def settings(arm: Arm) -> str:
    bound = f"sync_bound={str(arm.bound).lower()}"
    return f"data.batch_size=8 optimizer.lr={arm.lr} {periods(*arm.periods)} {bound}"


study = Study("bounded_averages", Arm, settings)


def cells() -> Cells:
    for seed, *fields in product(SEEDS, PERIODS, (False, True), PARTITIONS, RATES):
        arm = Arm(*fields)
        if not (arm.bound and len({*arm.periods}) == 1):
            yield arm, seed


def table() -> Table:
    rows = []
    for of, partition, lr in product(PERIODS, PARTITIONS, RATES):
        local = [Arm((of[0],) * 3, False, partition, rate) for rate in RATES]
        local = [arm for arm in local if study.done(arm)]
        if not local or len({*of}) == 1:
            continue
        place = min(local, key=study.mean)
        row: list[object] = ["/".join(map(str, of)), PARTITIONS[partition], f"{lr:g}"]
        for arm in (Arm(of, bound, partition, lr) for bound in (False, True)):
            ours, theirs = study.values(arm), study.values(place)
            worst = max((100 * (ours[seed] / theirs[seed] - 1) for seed in ours), default=math.nan)
            row += [study.above(arm, place), f"{worst:+.2f}"]
        rows.append(row)
    heads = [
        "K_x/K_u/K_v",
        "data",
        "rate",
        "without the bound, % above Local Adam at its better rate",
        "worst seed",
    ]
    return Table([*heads, "bounded", "worst seed"], rows)


if __name__ == "__main__":
    study.main(__doc__, cells)
