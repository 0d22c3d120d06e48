"""How few bytes: u and v averaged rarely, 4-bit codes and late averages together.

    python research/leanest.py --data FOLDER --work runs/leanest

Each method's rate is tuned on a seed of its own, IID.
"""

from collections import namedtuple
from collections.abc import Iterator
from itertools import product

from paired import BLUE, ORANGE, PARTITIONS, SPARE, Estimate, Table, figure
from small_runs import SEEDS, Cells, Study, final_loss, periods

RATES = (0.006, 0.012)
TOKENS = 256
"""Of a worker in one step."""
LOCAL = "Local Adam"
INT4 = "compression.params=int4 compression.exp_avg=int4"
CODES = f"{INT4} compression.exp_avg_sq=int8"
RARE = f"{periods(12, 144, 288)} {CODES}"
METHODS = {
    LOCAL: periods(16, 16, 16),
    "DES-LOC 16/48/96": periods(16, 48, 96),
    "lean 8/24/48": f"{periods(8, 24, 48)} {CODES} compression.params=int8",
    "16/192/never, 4 bits": f"{periods(16, 192, 'never')} {INT4}",
    "12/192/never, 4 bits": f"{periods(12, 192, 'never')} {INT4}",
    "12/144/288, 4 bits": RARE,
    "12/144/288, 4 bits, bounded": f"{RARE} sync_bound=true",
    "16/16/never, 4 bits, bounded": f"{periods(16, 16, 'never')} {INT4} sync_bound=true",
    "12/144/288, 4 bits, late by 2": f"{RARE} sync_delay=2",
    "8/96/384, 4 bits": f"{periods(8, 96, 384)} {CODES}",
}
Arm = namedtuple("Arm", "method tokens partition lr")


def settings(arm: Arm) -> str:
    return f"data.batch_size={arm.tokens // 32} optimizer.lr={arm.lr} {METHODS[arm.method]}"


def megabytes(summary: dict[str, dict[str, dict[str, dict[str, float]]]]) -> float:
    """Return the payload that all four workers sent."""
    return summary["bytes"]["measured"]["up"]["total"] / 1e6


study = Study("leanest", Arm, settings, measures={"loss": final_loss, "megabytes": megabytes})


def cells() -> Cells:
    for method, lr in product(METHODS, RATES):
        yield Arm(method, TOKENS, "iid", lr), SPARE
    for seed, partition in product(SEEDS, PARTITIONS):
        yield from ((arm, seed) for arm in tuned(partition))


def tuned(partition: str) -> Iterator[Arm]:
    """Yield each method at its best rate."""
    for method in METHODS:
        if best := study.best(Arm(method, TOKENS, "iid", lr) for lr in RATES):
            yield best._replace(partition=partition)


def compared(partition: str) -> Iterator[tuple[Arm, float, Estimate]]:
    """Yield each method with how many times fewer bytes it sent, and its loss above Local."""
    arms = list(tuned(partition))
    for arm in arms:
        if study.done(arm) and study.done(arms[0]):
            theirs, ours = (study.values(one, "megabytes")[0] for one in (arms[0], arm))
            yield arm, theirs / ours, study.above(arm, arms[0])


def table() -> Table:
    rows = []
    for partition, data in PARTITIONS.items():
        for arm, fewer, gap in compared(partition):
            above = "" if arm.method == LOCAL else gap
            rows.append([data, arm.method, f"{arm.lr:g}", f"{fewer:.1f}", above])
    return Table(["data", "method", "rate", "fewer bytes, times", "loss above Local, %"], rows)


def picture() -> None:
    lines = []
    for (partition, data), colour in zip(PARTITIONS.items(), (BLUE, ORANGE), strict=True):
        found = compared(partition)
        drawn = [one for one in found if one[0].method != LOCAL]
        lines.append((data, colour, "o", [(fewer, gap) for _, fewer, gap in drawn]))
    x, y = "times fewer bytes than Local Adam", "held-out loss above Local Adam, %"
    figure("leanest", {"": lines}, x, y, ticks=(2, 4, 8, 16, 32))


if __name__ == "__main__":
    study.main(__doc__, cells)
