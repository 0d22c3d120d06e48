"""The held-out loss of a slow momentum (`optimizer.mix`) when u is averaged rarely.

    python research/slow_momentum.py --data FOLDER --work runs/slow

Learning rates, and for each optimizer the pair of beta1 and mix, are tuned on a seed of their own,
at K_u = 12 K_x.
"""

from collections import defaultdict, namedtuple
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from paired import BLUE, PARTITIONS, RED, SPARE, Line, Table, figure
from small_runs import SEEDS, Cells, Study, periods

NAMES = {"adam": "Adam", "adopt": "ADOPT", "diloco": "DiLoCo"}
FAST = (0.95, 1.0)
"""beta1 and mix as in the presets."""
SLOW = ((0.98, 0.9), (0.99, 0.7), (0.99, 0.9), (0.999, 0.7))
RATES = (0.003, 0.006, 0.012, 0.024)
RATIOS = (1, 3, 12, 48)
"""K_u / K_x."""
TUNINGS = (
    ("adam", 8, 256), ("adopt", 8, 256), ("adam", 64, 256), ("diloco", 64, 256), ("adam", 8, 1024),
)  # fmt: skip
"""What is tuned together: optimizer, K_x and tokens; diloco is the preset of that name."""
Arm = namedtuple("Arm", "optimizer beta1 mix lr k_x k_u k_v partition tokens")


def label(arm: Arm) -> str:
    if arm.optimizer == "diloco":
        return "DiLoCo"
    if (arm.beta1, arm.mix) != FAST:
        return "slow momentum"
    return "Local" if arm.k_u == arm.k_v == arm.k_x else "DES-LOC"


def preset(arm: Arm) -> str:
    return "diloco" if arm.optimizer == "diloco" else f"desloc_{arm.optimizer}"


def settings(arm: Arm) -> str:
    common = f"data.batch_size={arm.tokens // 32} optimizer.lr={arm.lr}"
    if arm.optimizer == "diloco":
        return f"{common} sync.params={arm.k_x}"
    beta2 = 0.95 if arm.optimizer == "adam" else 0.9999  # as in the presets
    own = f"optimizer.betas=[{arm.beta1},{beta2}] optimizer.mix={arm.mix}"
    return f"{common} {periods(arm.k_x, arm.k_u, arm.k_v)} {own}"


study = Study("slow_momentum", Arm, settings, preset)


def tuned(optimizer: str, k_x: int, tokens: int) -> dict[tuple[float, float], list[Arm]]:
    """Return the arms that are tuned together, by beta1 and mix."""
    return {
        pair: [Arm(optimizer, *pair, lr, k_x, ratio * k_x, 6 * k_x, "iid", tokens) for lr in RATES]
        for pair, ratio in ((FAST, 3), *((pair, 12) for pair in SLOW))
        if pair == FAST or optimizer != "diloco"
    }


def arms(optimizer: str, k: int, tokens: int) -> Iterator[tuple[Arm, Arm]]:
    """Yield the arms at the tuned rates, each with the Local arm that it is compared with."""

    def best(optimizer: str, pairs: Iterable[tuple[float, float]]) -> Arm | None:
        found = tuned(optimizer, k, tokens)
        return study.best(arm for pair in pairs for arm in found[pair])

    fast = best(optimizer, (FAST,))
    if optimizer == "diloco":
        adam = best("adam", (FAST,))
        if fast and adam:
            yield fast, adam._replace(k_u=k, k_v=k)
        return
    slow = best(optimizer, SLOW)
    if not fast or not slow:
        return
    for partition in PARTITIONS if (k, tokens) == (8, 256) else ("iid",):
        place = fast._replace(k_u=k, k_v=k, partition=partition)
        yield place, place
        for arm, ratio in product((fast, slow), RATIOS if k == 8 else (3, 12)):
            yield arm._replace(k_u=ratio * k, k_v=6 * k, partition=partition), place
        yield slow._replace(k_u=k, k_v=k, partition=partition), place


def cells() -> Cells:
    for tuning in TUNINGS:
        yield from ((arm, SPARE) for some in tuned(*tuning).values() for arm in some)
        for seed in SEEDS:
            yield from ((arm, seed) for arm, _ in arms(*tuning))


def finished() -> Iterator[tuple[Arm, Arm]]:
    """Yield the arms that have all seeds, each with its Local arm."""
    for arm, place in (both for tuning in TUNINGS for both in arms(*tuning)):
        if study.done(arm) and study.found[place]:
            yield arm, place


def table() -> Table:
    rows = []
    for arm, place in finished():
        method, name = label(arm), NAMES[arm.optimizer]
        beta = "" if method != "slow momentum" else f" ({arm.beta1:g}, {arm.mix:g})"
        data = PARTITIONS[arm.partition] + ("" if arm.tokens == 256 else f", {arm.tokens} tokens")
        at = f"{arm.k_x}/{arm.k_u}/{arm.k_v}", f"{arm.lr:g}", f"{study.mean(arm):.3f}"
        rows.append(
            [name, data, method + beta, *at, "" if arm == place else study.above(arm, place)]
        )
    heads = ["optimizer", "data", "method", "K_x/K_u/K_v", "rate", "loss", "above Local, %"]
    return Table(heads, rows)


def picture() -> None:
    lines: dict[str, dict[str, list[tuple[float, Any]]]] = defaultdict(lambda: defaultdict(list))
    for arm, place in finished():
        if (arm.k_x, arm.tokens) == (8, 256) and arm.k_v != arm.k_x:
            title = f"{NAMES[arm.optimizer]}, {PARTITIONS[arm.partition]}"
            lines[title][label(arm)].append((arm.k_u / arm.k_x, study.above(arm, place)))
    colours = {"DES-LOC": BLUE, "slow momentum": RED}
    panels: dict[str, list[Line]] = {
        title: [(name, colours[name], "o-", points) for name, points in some.items()]
        for title, some in lines.items()
    }
    figure("slow_momentum", panels, "$K_u/K_x$", "held-out loss above Local, %", ticks=RATIOS)


if __name__ == "__main__":
    study.main(__doc__, cells)
