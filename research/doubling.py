"""Workers double in mid-run (RQ3): held-out loss and gradient norms around it.

    python research/doubling.py --data FOLDER --work runs/doubling

The paper's setting, at a small size: K_x = 128, K_u = 384, K_v = 768; four workers become eight at
step 1536, where all three streams are averaged, or at 1408, where only x is. A new worker starts
from the averages; states that are never averaged start at zero. In this project it then continues
the federation's count of steps; "own count" lets its optimizer count from its first step, as a new
optimizer in a program without a server would. Adam, IID, one rate.
"""

from collections import namedtuple
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import product
from statistics import fmean
from typing import Any
from unittest.mock import patch

from paired import BLUE, GREEN, GREY, ORANGE, RED, Estimate, Line, Run, Table, figure
from small_runs import SEEDS, Cells, Study, periods

from flower_desloc.flower import client
from flower_desloc.flower.window import ClientWindow, open_window

STEPS, JOINS = 2048, (1536, 1408)
RATE = 0.0084
METHODS: dict[str, tuple[int, int | str, int | str]] = {
    "Local": (128, 128, 128),
    "DES-LOC": (128, 384, 768),
    "FAVG+OPT": (128, "never", "never"),
    "FAVG+OPT, own count": (128, "never", "never"),
    "FAVG-OPT": (128, "reset", "reset"),
}
COLOURS = dict(zip(METHODS, (GREY, BLUE, ORANGE, RED, GREEN), strict=True))
Arm = namedtuple("Arm", "method join partition")
_new_worker: ContextVar[bool] = ContextVar("new_worker")


def settings(arm: Arm) -> str:
    return (
        f"run.steps={STEPS} run.eval_every=128 data.batch_size=8 optimizer.lr={RATE} "
        f"{periods(*METHODS[arm.method])} "
        f"simulation.num_clients=8 federation.attendance.0=4 federation.attendance.{arm.join}=8"
    )


@contextmanager
def counting(arm: Arm) -> Iterator[None]:
    """Let the optimizers of new workers count their own steps, if the arm says so."""
    if not arm.method.endswith("own count"):
        yield
        return
    train = ClientWindow.train

    def noting(worker: Any, request: Any, files: Any) -> Any:
        _new_worker.set(int(files.folder.name.removeprefix("client-")) >= 4)
        return open_window(worker, request, files)

    def counting_own(window: Any) -> None:
        if _new_worker.get():
            window.origin = arm.join
        train(window)

    with (
        patch.object(client, "open_window", noting),
        patch.object(ClientWindow, "train", counting_own),
    ):
        yield


def losses(summary: Run) -> dict[int, float]:
    """Return the held-out loss by step."""
    return {
        line["step"]: line["evaluation"]["central"]["overall"]["loss"]
        for line in summary["lines"]
        if "central" in line.get("evaluation", {})
    }


def gradients(summary: Run) -> dict[str, float]:
    """Return mean gradient norms of the window before the workers double and of the one after."""
    windows = [line for line in summary["lines"] if line["clients"]]
    after = next(i for i, line in enumerate(windows) if len(line["clients"]) > 4)

    before, then = (windows[i]["clients"] for i in (after - 1, after))

    def mean(clients: Run, names: Iterable[str]) -> float:
        return fmean(norm for name in names for norm in clients[name]["grad_norms"])

    return {
        "before": mean(before, before),
        "old": mean(then, [name for name in then if name in before]),
        "new": mean(then, [name for name in then if name not in before]),
    }


measures = {"losses": losses, "gradients": gradients}
study = Study("doubling", Arm, settings, measures=measures, around=counting, clients=8)


def cells() -> Cells:
    for seed, join, method in product(SEEDS, JOINS, METHODS):
        yield Arm(method, join, "iid"), seed


def final_losses(arm: Arm) -> dict[int, float]:
    """Return the last held-out loss by seed."""
    return {seed: run["losses"][str(STEPS)] for seed, run in study.found[arm].items()}


def change(losses: dict[str, float], join: int) -> float:
    """Return by how many per cent the loss changed over the first window with new workers."""
    return 100 * (losses[str(join + 128)] / losses[str(join)] - 1)


def own_count(arm: Arm) -> Estimate:
    """Return by how many points the change differs where new workers count their own steps."""
    ours, theirs = study.found[arm], study.found[arm._replace(method="FAVG+OPT")]
    changes = [{s: change(r["losses"], arm.join) for s, r in f.items()} for f in (ours, theirs)]
    return Estimate.of(changes[0][seed] - changes[1][seed] for seed in ours)


def table() -> Table:
    rows = []
    for arm in (Arm(method, join, "iid") for join in JOINS for method in METHODS):
        runs = list(study.found[arm].values())
        if not runs:
            continue
        row = [arm.join, arm.method, len(runs)]
        row += [f"{fmean(run['losses'][str(arm.join)] for run in runs):.3f}"]
        row += [Estimate.of(change(run["losses"], arm.join) for run in runs)]
        for when in ("before", "old", "new"):
            row += [f"{fmean(run['gradients'][when] for run in runs):.3f}"]
        local = final_losses(arm._replace(method="Local"))
        row += ["" if arm.method == "Local" else Estimate.above(final_losses(arm), local)]
        row += [own_count(arm) if arm.method.endswith("own count") else ""]
        rows.append(row)
    heads = ["joined at", "method", "seeds", "loss before", "change, %"]
    heads += ["gradient before", "after, old", "after, new", "final, above Local's, %"]
    heads += ["change compared with the federation's count, points"]
    return Table(heads, rows)


def picture() -> None:
    lines: dict[str, list[Line]] = {}
    for arm in (Arm(method, join, "iid") for join in JOINS for method in METHODS):
        runs = list(study.found[arm].values())
        steps = [step for step in map(int, runs[0]["losses"]) if step >= 1024]
        points = [(s, Estimate(fmean(run["losses"][str(s)] for run in runs))) for s in steps]
        lines.setdefault(f"four workers become eight at step {arm.join}", []).append(
            (arm.method, COLOURS[arm.method], "o-", points)
        )
    figure("doubling", lines, "local steps", "held-out loss", zero=False)


if __name__ == "__main__":
    study.main(__doc__, cells)
