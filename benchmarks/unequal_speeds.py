"""Four sites of which two are as fast, one half and one a quarter as fast: lock-step or not.

    python benchmarks/unequal_speeds.py measure --data FOLDER --work runs/speeds
    python benchmarks/unequal_speeds.py draw     # docs/unequal_speeds.png, and the table as text

FOLDER holds a text file for each of the domains wiki, python, math and french. Seconds are
computed, not measured: a step takes 1, 1, 2 and 4 s on the four sites, messages take none. By
domain the slowest site alone has French. Every run has its own learning-rate schedule to its end.
"""

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from small_runs import ROOT, Gap, command_line, keep, kept, run

RESULTS = ROOT / "benchmarks" / "results" / "unequal_speeds.json"
PICTURE = ROOT / "docs" / "unequal_speeds.png"
SEEDS = (0, 1, 2)
PACES = (1, 1, 2, 4)
SLOWEST = "client-3"
STEPS = {1.0: (256, 512), 0.25: (256, 512, 768, 1024)}
"""Steps of the runs for each federation.min_steps."""
PARTITIONS = {"iid": "IID", "by_domain": "by domain"}
PRESETS = ("desloc_adam", "desloc_adopt")


class Arm(NamedTuple):
    """A cell of the study."""

    preset: str
    partition: str
    min_steps: float
    steps: int

    @property
    def lock_step(self) -> "Arm":
        return self._replace(min_steps=1.0, steps=max(STEPS[1.0]))


class Outcome(NamedTuple):
    """What a run ended with."""

    loss: float
    """On held-out text of all domains."""
    slowest: float
    """On the slowest site's own held-out text."""
    seconds: float


Outcomes = dict[Arm, dict[int, Outcome]]


def measure(data: Path, work: Path) -> None:
    """Run what has no result yet, seed by seed."""
    runs = kept(RESULTS)
    for seed, preset, partition, (least, lengths) in product(
        SEEDS, PRESETS, PARTITIONS, STEPS.items()
    ):
        for arm in (Arm(preset, partition, least, steps) for steps in lengths):
            if seed in by_arm(runs).get(arm, {}):
                continue
            runs.append({**arm._asdict(), "seed": seed, **outcome(arm, seed, data, work)})
            print(json.dumps(runs[-1]), flush=True)
            keep(RESULTS, runs)


def outcome(arm: Arm, seed: int, data: Path, work: Path) -> dict[str, float]:
    overrides = [
        f"run.steps={arm.steps}",
        f"run.seed={seed}",
        f"data.partition={arm.partition}",
        "evaluation.federated=true",
    ]
    if arm.min_steps < 1:
        paces = (f"federation.step_seconds.client-{m}={pace}" for m, pace in enumerate(PACES))
        overrides += [f"federation.min_steps={arm.min_steps}", *paces]
    summary = run(arm.preset, overrides, data, work / str(seed))
    where = summary["evaluation"]
    last = summary["lines"][-1]["evaluation"]["federated"]["parts"]
    windows = [line for line in summary["lines"] if line["clients"]]
    return Outcome(
        loss=where["central"]["loss"]["final"],
        slowest=last[SLOWEST]["loss"],
        seconds=sum(
            max(PACES[int(name[-1])] * client["steps"] for name, client in line["clients"].items())
            for line in windows
        ),
    )._asdict()


def by_arm(runs: list[dict[str, object]]) -> Outcomes:
    found: Outcomes = {}
    for one in runs:
        arm = Arm(*(one[key] for key in Arm._fields))  # type: ignore[arg-type]
        ended = Outcome(*(float(one[key]) for key in Outcome._fields))  # type: ignore[arg-type]
        found.setdefault(arm, {})[int(one["seed"])] = ended  # type: ignore[call-overload]
    return found


def seconds_to(target: float, arm: Arm, found: Outcomes) -> float:
    """Return when runs of growing length reach ``target``, between lengths by interpolation."""
    arms = [arm._replace(steps=steps) for steps in STEPS[arm.min_steps]]
    losses = [mean(found[each], "loss") for each in arms]
    seconds = [mean(found[each], "seconds") for each in arms]
    if target < min(losses):
        return float("nan")
    return float(np.interp(-target, [-loss for loss in losses], seconds))


def mean(outcomes: Mapping[int, Outcome], what: str) -> float:
    return float(np.mean([getattr(one, what) for one in outcomes.values()]))


def gap(arm: Arm, found: Outcomes, what: str) -> Gap:
    """Compare with lock-step of the same number of steps where there is one, else its longest."""
    ours, theirs = found[arm], found[arm.lock_step]
    return Gap.of(
        {seed: getattr(one, what) for seed, one in ours.items()},
        {seed: getattr(one, what) for seed, one in theirs.items()},
    )


def draw() -> None:
    found = {arm: one for arm, one in by_arm(kept(RESULTS)).items() if len(one) == len(SEEDS)}
    print(
        "| preset | data | sites | steps | seconds | loss | above lock-step of 512, % | "
        "slowest site's loss | above, % |\n|---|---|---|---|---|---|---|---|---|"
    )
    for arm in sorted(
        found, key=lambda arm: (arm.preset, arm.partition, -arm.min_steps, arm.steps)
    ):
        sites = "lock-step" if arm.min_steps == 1 else "own pace"
        print(
            f"| {arm.preset} | {PARTITIONS[arm.partition]} | {sites} | {arm.steps} | "
            f"{mean(found[arm], 'seconds'):.0f} | {mean(found[arm], 'loss'):.3f} | "
            f"{gap(arm, found, 'loss')} | {mean(found[arm], 'slowest'):.3f} | "
            f"{gap(arm, found, 'slowest')} |"
        )
    for preset, partition in product(PRESETS, PARTITIONS):
        lock, own = (Arm(preset, partition, least, max(STEPS[least])) for least in (1.0, 0.25))
        if lock not in found or own not in found:
            continue  # not all seeds yet
        target, took = mean(found[lock], "loss"), mean(found[lock], "seconds")
        needs = seconds_to(target, own, found)
        print(
            f"{preset}, {PARTITIONS[partition]}: loss {target:.3f} in {took:.0f} s, at the sites' "
            f"own pace in {needs:.0f} s, {took / needs:.2f} times as fast"
        )
    picture(found).savefig(PICTURE, dpi=100)


def picture(found: Outcomes) -> Figure:
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, partition in zip(panels, PARTITIONS, strict=True):
        for (least, lengths), what in product(STEPS.items(), ("loss", "slowest")):
            arms = [Arm(PRESETS[0], partition, least, steps) for steps in lengths]
            arms = [arm for arm in arms if arm in found]
            panel.plot(
                [mean(found[arm], "seconds") for arm in arms],
                [mean(found[arm], what) for arm in arms],
                "o-" if what == "loss" else "s:",
                ms=4, lw=1.2, color="#0072B2" if least == 1 else "#D55E00",
                label=f"{'lock-step' if least == 1 else 'own pace'}, "
                f"{'all text' if what == 'loss' else 'slowest site'}",
            )  # fmt: skip
        panel.set_title(PARTITIONS[partition], fontsize=10)
        panel.set_xlabel("seconds (computed)")
    panels[0].set_ylabel("held-out loss at the end")
    panels[0].legend(frameon=False, fontsize=8)
    return figure


if __name__ == "__main__":
    command_line(__doc__, measure, draw)
