"""Methods by how far the clients are from IID, and by epsilon: studies of a small network.

    python research/non_iid.py runs/non_iid_digits runs/non_iid_fashion runs/privacy

copies the runs at the best rates into research/results; `research/draw.py` draws them.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

import typer
from matplotlib.axes import Axes
from paired import (
    RESEARCH,
    RESULTS,
    ROOT,
    Draw,
    Estimate,
    Line,
    Run,
    Table,
    about,
    draw_lines,
    published,
    required,
    spread,
)

from flower_desloc.app.runs.figures import style
from flower_desloc.app.runs.folder import evaluations, read_lines
from flower_desloc.app.study.cells import study_state
from flower_desloc.app.study.store import FinishedRun, Store
from flower_desloc.app.study.study_file import read_study

TARGETS = {"non_iid_digits": 0.9, "non_iid_fashion": 0.75}
"""Study by alpha -> the accuracy whose bytes are counted."""
AXES = {
    "non_iid_digits": ([0.1, 0.2, 0.5], (80, 100), (40, 100), [0.02, 0.05, 0.1, 0.2, 0.5]),
    "non_iid_fashion": ([0.4, 0.5, 0.7, 1], (50, 90), (0, 100), [0.2, 0.5, 1, 2, 5, 10]),
}
"""Study by alpha -> ticks or limits of its figure's panels."""
PRIVACY = "privacy"
"""The study by epsilon."""
COLOURS = {
    "Local Adam": "#000000",
    "lean": "#117733",
    "DES-LOC": "#0072B2",
    "FAVG+OPT": "#D55E00",
    "FedAvg": "#999933",
    "FedProx": "#CC79A7",
    "FedAvgM": "#882255",
    "FedAdam": "#999999",
    "SCAFFOLD": "#E69F00",
}
"""The methods, in the order of the tables; the first is the baseline."""
BASELINE = "Local Adam"
Seeds = dict[int, Run]


def main(folders: list[Path]) -> None:
    """Copy the finished runs of studies into research/results."""
    for folder in folders:
        study = read_study(RESEARCH / "studies" / f"{folder.name}.yaml", _data(folder))
        runs = []
        for state in study_state(study, Store(folder.parent, folder.name)).values():
            cell: Run = {**state.cell.labels, "key": state.key, "tuned": state.tuned}
            tried = {f"{value:g}": loss for value, loss in state.tried.items() if isfinite(loss)}
            cell |= {"bracketed": state.bracketed, "tried": tried}
            runs += [cell | record(run) for run in state.runs]
        lines = ",\n".join(f"    {json.dumps(run)}" for run in required(runs, folder))
        where = RESULTS / f"{folder.name}.json"
        code = json.dumps(about())
        where.write_text(f'{{\n  "code": {code},\n  "runs": [\n{lines}\n  ]\n}}\n')
        print(f"{where}: {len(runs)} runs")


def _data(folder: Path) -> list[str]:
    """Return the override of the data that the runs of a study were given."""
    import yaml

    for outcome in folder.glob("*/*/outcome.json"):
        source = yaml.safe_load(json.loads(outcome.read_text())["config"])["data"]["source"]
        return [] if source == "builtin" else [f"data.source={source}"]
    return []


def record(run: FinishedRun) -> Run:
    """Return what is kept of a run; of one that diverged only its seed."""
    if run.diverged:
        return {"seed": run.seed, "diverged": True}
    lines, clients = [*read_lines(run.folder.metrics)], run.summary["clients"]
    sent, up = {}, 0.0
    for line in lines:
        up += sum(line["bytes_up"].values()) / clients
        sent[line["step"]] = round(up)
    central = evaluations(lines, "central")
    last = central[-1][1]["overall"]
    return {
        "seed": run.seed,
        "loss": last["loss"],
        "accuracy": last["accuracy"],
        "clients": sorted(run.of_clients("accuracy")),
        "bytes": sent[lines[-1]["step"]],
        "course": [(sent[step], each["overall"]["accuracy"]) for step, each in central],
        "seconds": round(run.outcome["seconds"], 1),
    }


def cells(study: str) -> Mapping[tuple[str, str], Seeds]:
    """Return the runs that did not diverge, by alpha or epsilon and method, and by seed."""
    found: dict[tuple[str, str], Seeds] = defaultdict(dict)
    axis = "epsilon" if study == PRIVACY else "alpha"
    for run in json.loads((RESULTS / f"{study}.json").read_text())["runs"]:
        if not run.get("diverged"):
            found[run[axis], run["method"]][run["seed"]] = run
    return found


def until(run: Run, accuracy: float) -> float | None:
    """Return the megabytes that a client sent until an accuracy; None if it never came."""
    return next((sent / 1e6 for sent, reached in run["course"] if reached >= accuracy), None)


def values(runs: Seeds, measure: Callable[[Run], float]) -> dict[int, float]:
    return {seed: measure(run) for seed, run in runs.items()}


LOSS_AND_ACCURACY: Mapping[str, Callable[[Run], float]] = {
    "held-out loss": lambda run: run["loss"],
    "accuracy, %": lambda run: 100 * run["accuracy"],
}
MEASURES: Mapping[str, Callable[[Run], float]] = {
    **LOSS_AND_ACCURACY,
    "accuracy of the worst client, %": lambda run: 100 * run["clients"][0],
}


def table(study: str) -> Table:
    """Return the table of a study by alpha."""
    target = TARGETS[study]

    def sent(runs: Seeds) -> list[object]:
        took = [until(run, target) for run in runs.values()]
        reached = [each for each in took if each is not None]
        counted = f" ({len(reached)} of {len(took)})" if len(reached) < len(took) else ""
        in_all = f"{fmean(run['bytes'] for run in runs.values()) / 1e6:.3g}"
        return [in_all, f"{fmean(reached):.2g}{counted}" if reached else "-"]

    heads = ["alpha", *_heads(MEASURES), "MB of a client", f"MB to {target:.0%}"]
    found = cells(study)
    rows = [[*_row(found, *key, MEASURES), *sent(runs)] for key, runs in found.items()]
    return Table(heads, rows)


def private_table() -> Table:
    """Return the table of the study by epsilon."""
    found = cells(PRIVACY)
    rows = [_row(found, *key, LOSS_AND_ACCURACY) for key in found]
    return Table(["epsilon", *_heads(LOSS_AND_ACCURACY)], rows)


def _heads(measures: Iterable[str]) -> list[str]:
    return ["method", "rate", "seeds", *measures, f"loss above {BASELINE}, %"]


def _row(
    found: Mapping[tuple[str, str], Seeds],
    at: str,
    method: str,
    measures: Mapping[str, Callable[[Run], float]],
) -> list[object]:
    runs = found[at, method]
    loss, theirs = (values(found[at, m], lambda run: run["loss"]) for m in (method, BASELINE))
    above = "" if method == BASELINE else Estimate.above(loss, theirs).interval
    some = next(iter(runs.values()))
    rate = f"{some['tuned']:g}" + ("" if some["bracketed"] else ", at the edge")
    row = [spread([*values(runs, measure).values()]) for measure in measures.values()]
    return [at, method, rate, len(runs), *row, above]


IN_SHORT = ("Local Adam", "lean", "DES-LOC", "FAVG+OPT", "FedAvg", "SCAFFOLD")
"""The methods of the figure for users."""


def _panel(
    panel: Axes,
    found: Mapping[tuple[str, str], Seeds],
    name: str,
    of: Callable[[Seeds], Estimate],
    methods: Iterable[str],
) -> None:
    alphas = sorted({float(alpha) for alpha, _ in found})
    lines: list[Line] = []
    for number, method in enumerate(methods):
        beside = 1.02 ** (number - 3)  # or intervals would hide each other
        points = [(float(alpha), of(runs)) for (alpha, m), runs in found.items() if m == method]
        if points := [(at * beside, one) for at, one in points if one.seeds]:
            lines.append((method, COLOURS[method], "o-", points))
    words = {alpha: f"{alpha:g}" for alpha in alphas}
    draw_lines(panel, lines, name, "alpha: to the right clients are more alike", ticks=words)


def _logarithmic(panel: Axes, ticks: list[float]) -> None:
    panel.set_yscale("log")
    panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()


def _mean_of(measure: Callable[[Run], float]) -> Callable[[Seeds], Estimate]:
    return lambda runs: Estimate.of(values(runs, measure).values())


def _megabytes(study: str) -> tuple[str, Callable[[Seeds], Estimate]]:
    def estimate(runs: Seeds) -> Estimate:
        took = [until(run, TARGETS[study]) for run in runs.values()]
        return Estimate.of(each for each in took if each is not None)

    return f"MB that a client sends until {TARGETS[study]:.0%} are right", estimate


def picture(study: str) -> None:
    """Draw every measure of every method."""
    drawn = {name: _mean_of(measure) for name, measure in MEASURES.items()}
    drawn |= [_megabytes(study)]
    found = cells(study)
    made, panels = style.figure(2, 2, 7.4)
    for panel, (name, of) in zip(panels, drawn.items(), strict=True):
        _panel(panel, found, name, of, COLOURS)
        if panel is not panels[0] and (legend := panel.get_legend()):
            legend.remove()
    losses, accuracies, of_the_worst, megabytes = AXES[study]
    _logarithmic(panels[0], losses)
    panels[1].set_ylim(accuracies)
    panels[2].set_ylim(of_the_worst)
    _logarithmic(panels[3], megabytes)
    made.savefig(published(f"{study}.png"), dpi=100)


def picture_in_short() -> None:
    """Draw docs/images/non_iid.png: the loss, and the bytes to an accuracy, of the digits."""
    study = "non_iid_digits"
    found = cells(study)
    made, panels = style.figure(1, 2, 3.7)
    _panel(panels[0], found, "held-out loss", _mean_of(lambda run: run["loss"]), IN_SHORT)
    _panel(panels[1], found, *_megabytes(study), IN_SHORT)
    panels[1].get_legend().remove()  # type: ignore[union-attr]
    _logarithmic(panels[1], AXES[study][-1])
    made.savefig(ROOT / "docs" / "images" / "non_iid.png", dpi=100)


STUDIES = [study for study in TARGETS if (RESULTS / f"{study}.json").exists()]
TABLES: dict[str, Draw] = {study: partial(table, study) for study in STUDIES}
TABLES[PRIVACY] = private_table
FIGURES: dict[str, Callable[[], Any]] = {study: partial(picture, study) for study in STUDIES}
FIGURES["non_iid_in_short"] = picture_in_short


if __name__ == "__main__":
    typer.run(main)
