"""Four sites of which two are as fast, one half and one a quarter as fast: lock-step or not.

    python research/unequal_speeds.py --data FOLDER --work runs/speeds

Seconds are computed, not measured: a step takes 1, 1, 2 and 4 s on the four sites, messages take
none. By domain the slowest site alone has French. Every run has its own learning-rate schedule to
its end.
"""

from collections import namedtuple
from itertools import product

import numpy as np
from paired import BLUE, PARTITIONS, RED, Estimate, Line, Run, Table, figure
from small_runs import SEEDS, Cells, Study, final_loss

PACES = (1, 1, 2, 4)
STEPS = {1.0: (256, 512), 0.25: (256, 512, 768, 1024)}
"""Steps of the runs for each federation.min_steps."""
SITES = {1.0: ("lock-step", BLUE), 0.25: ("own pace", RED)}
PRESETS = ("desloc_adam", "desloc_adopt")
Arm = namedtuple("Arm", "preset partition min_steps steps")


def settings(arm: Arm) -> str:
    own = [f"run.steps={arm.steps} evaluation.federated=true"]
    if arm.min_steps < 1:
        own += [f"federation.min_steps={arm.min_steps}"]
        own += [f"federation.step_seconds.client-{m}={pace}" for m, pace in enumerate(PACES)]
    return " ".join(own)


def seconds(summary: Run) -> float:
    windows = [line["clients"] for line in summary["lines"] if line["clients"]]
    return sum(max(PACES[int(m[-1])] * one["steps"] for m, one in w.items()) for w in windows)


def slowest(summary: Run) -> float:
    """Return the loss on the slowest site's own held-out text."""
    parts = summary["lines"][-1]["evaluation"]["federated"]["parts"]
    return float(parts["client-3"]["loss"])


measures = {"loss": final_loss, "slowest": slowest, "seconds": seconds}
study = Study("unequal_speeds", Arm, settings, lambda arm: arm.preset, measures)


def arms(preset: str, partition: str, least: float) -> list[Arm]:
    return [Arm(preset, partition, least, steps) for steps in STEPS[least]]


def cells() -> Cells:
    for seed, preset, partition, least in product(SEEDS, PRESETS, PARTITIONS, STEPS):
        yield from ((arm, seed) for arm in arms(preset, partition, least))


def table() -> Table:
    rows = []
    for preset, partition, least in product(PRESETS, sorted(PARTITIONS), STEPS):
        lock_step = arms(preset, partition, 1.0)[-1]
        for arm in filter(study.done, arms(preset, partition, least)):
            row = [preset, PARTITIONS[partition], SITES[least][0], arm.steps]
            row += [f"{study.mean(arm, 'seconds'):.0f}"]
            for what in ("loss", "slowest"):
                row += [f"{study.mean(arm, what):.3f}", study.above(arm, lock_step, what)]
            rows.append(row)
    heads = ["preset", "data", "sites", "steps", "seconds", "loss", "above lock-step of 512, %"]
    return Table([*heads, "slowest site's loss", "above, %"], rows)


def sooner() -> Table:
    """Return in how many seconds each reaches the loss of lock-step's 512 steps."""
    rows = []
    for preset, partition in product(PRESETS, PARTITIONS):
        lock, own = (arms(preset, partition, least) for least in STEPS)
        if not all(map(study.done, lock + own)):
            continue
        target, took = study.mean(lock[-1]), study.mean(lock[-1], "seconds")
        # Between runs of growing length by interpolation.
        losses, ends = ([study.mean(arm, what) for arm in own] for what in ("loss", "seconds"))
        needs = float("nan")
        if target >= min(losses):
            needs = float(np.interp(-target, [-loss for loss in losses], ends))
        seconds = [f"{took:.0f}", f"{needs:.0f}", f"{took / needs:.2f}"]
        rows.append([preset, PARTITIONS[partition], f"{target:.3f}", *seconds])
    heads = ["preset", "data", "loss", "lock-step, s", "own pace, s", "times as fast"]
    return Table(heads, rows)


def picture() -> None:
    panels: dict[str, list[Line]] = {}
    for partition, data in PARTITIONS.items():
        panels[data] = []
        for (least, (sites, colour)), what in product(SITES.items(), ("loss", "slowest")):
            some = filter(study.done, arms(PRESETS[0], partition, least))
            points = [(study.mean(a, "seconds"), Estimate(study.mean(a, what))) for a in some]
            text, form = ("all text", "o-") if what == "loss" else ("slowest site", "s:")
            panels[data].append((f"{sites}, {text}", colour, form, points))
    x, y = "seconds (computed)", "held-out loss at the end"
    figure("unequal_speeds", panels, x, y, zero=False)


if __name__ == "__main__":
    study.main(__doc__, cells)
