"""Results of a study: one entry per cell, as a table and as files."""

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from statistics import pstdev
from typing import Any

import pandas as pd

from flower_desloc.app.config.metric import OF_LOSS, ordered
from flower_desloc.app.config.units import bytes_text, duration_text, figures
from flower_desloc.app.runs.groups import Spread
from flower_desloc.app.runs.paired import Estimate
from flower_desloc.app.runs.summary import OTHER_METHODS
from flower_desloc.app.study.cells import CellState
from flower_desloc.app.study.grid import Target
from flower_desloc.app.study.store import FinishedRun


def table(cells: Sequence[CellState]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the lines of the results' table.

    A column that no cell has a value for is left out.
    """
    study = cells[0].study
    others, target = _other_metrics(cells), study.target
    lines = []
    for found, cell in zip(_objects(cells), cells, strict=True):
        gap = _difference(cell, cells)
        lines.append(
            [
                *cell.cell.labels.items(),
                ("tuned", _tuned(cell) if any(each.key for each in cells) else ""),
                (study.shown.text, cell.spread.text(4) or ("diverged" if cell.diverged else "-")),
                (
                    f"difference to {study.baseline_text}",
                    gap.text(4) if len(study.seeds) > 1 else "",
                ),
                ("seeds", str(len(cell.runs))),
                ("diverged", str(cell.diverged) if any(each.diverged for each in cells) else ""),
                *((metric, _final(cell, metric).text(4) or "-") for metric in others),
                ("worst client", _clients_text(_of_clients(cell, study.shown.worst))),
                ("spread of clients", _clients_text(_of_clients(cell, pstdev))),
                ("sent by a client", _text(found["bytes_up_per_client"], bytes_text)),
                ("Local Adam sends", _text(found["local_adam_ratio"], _times)),
                ("DDP sends", _text(found["ddp_ratio"], _times)),
                *(_to_target(cell, found, target) if target else ()),
                ("time", _text(found["seconds"], duration_text)),
            ]
        )
    headings = [heading for heading, _ in lines[0]]
    columns = [[text for _, text in column] for column in zip(*lines, strict=True)]
    shown = [any(column) for column in columns]
    rows = zip(*compress(columns, shown), strict=True)
    return [*compress(headings, shown)], [[text or "-" for text in row] for row in rows]


def _text(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)


def _times(ratio: float) -> str:
    return f"{figures(ratio)} times"


def _to_target(cell: CellState, found: Mapping[str, Any], target: Target) -> list[tuple[str, str]]:
    """Return what reaching the target took, in the mean over the seeds that reached it."""
    headings = [f"bytes to {target.text}", f"time to {target.text}"]
    runs = [run for run in cell.runs if not run.diverged]
    if runs and not any(run.has(target.score) for run in runs):
        return [(heading, "no such metric") for heading in headings]
    seeds = found["seeds"] - found["diverged"]
    partly = f" ({found['reached']} of {seeds})" if 0 < found["reached"] < seeds else ""
    return [
        (headings[0], _text(found["bytes_to_target"], bytes_text) + partly),
        (headings[1], _text(found["seconds_to_target"], duration_text) + partly),
    ]


def markdown(cells: Sequence[CellState]) -> str:
    """Return the results as a Markdown table."""
    headings, lines = table(cells)
    labels = len(cells[0].study.axes)
    rule = ["---"] * labels + ["---:"] * (len(headings) - labels)
    every = [headings, rule, *lines]
    return "\n".join(f"| {' | '.join(c.replace('|', '/') for c in line)} |" for line in every)


def latex(cells: Sequence[CellState]) -> str:
    """Return the results as a LaTeX table, which needs the package booktabs."""
    headings, lines = table(cells)
    labels = len(cells[0].study.axes)
    form = "l" * labels + "r" * (len(headings) - labels)
    # Not as columns by name: two axes may have the heading of a measure.
    framed = pd.DataFrame(lines, columns=pd.Index(headings, dtype=object))
    text: str = framed.to_latex(index=False, escape=True, column_format=form)
    return text


def write(cells: Sequence[CellState], folder: Path) -> None:
    """Write ``table.md``, ``table.tex``, ``table.csv`` and ``results.json``."""
    study = cells[0].study
    objects = _objects(cells)
    content = {"study": study.name, "score": study.shown.text, "cells": objects}
    (folder / "table.md").write_text(markdown(cells) + "\n", encoding="utf-8")
    (folder / "table.tex").write_text(latex(cells), encoding="utf-8")
    (folder / "results.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    with (folder / "table.csv").open("w", encoding="utf-8", newline="") as file:
        columns = list(dict.fromkeys(key for each in objects for key in each))
        columns = [key for key in columns if key not in ("tried", "runs", "scores")]
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(objects)


def _objects(cells: Sequence[CellState]) -> list[dict[str, Any]]:
    return [_to_json(cell, _difference(cell, cells)) for cell in cells]


def _to_json(cell: CellState, gap: Estimate) -> dict[str, Any]:
    runs, score = [run for run in cell.runs if not run.diverged], cell.study.shown
    summaries = [run.summary for run in runs]
    sent = [s["bytes"]["measured"]["up"]["total"] / max(1, s["clients"]) for s in summaries]
    target = cell.study.target
    reached = [found for run in runs if target and (found := run.until(target))]
    return {
        **cell.cell.labels,
        "key": cell.key,
        "tuned": cell.tuned,
        "bracketed": cell.bracketed,
        "mean": cell.spread.mean,
        "std": cell.spread.std,
        "scores": cell.scores,
        "seeds": len(cell.runs),
        "diverged": cell.diverged,
        "difference": gap.mean if gap.seeds else None,
        "difference_low": gap.low if gap.seeds > 1 else None,
        "difference_high": gap.high if gap.seeds > 1 else None,
        **{metric: _final(cell, metric).mean for metric in _metrics(cell)},
        "worst_client": _of_clients(cell, score.worst).mean,
        "spread_of_clients": _of_clients(cell, pstdev).mean,
        "bytes_up_per_client": Spread.of(sent).mean,
        **{f"{m}_ratio": Spread.of(s["ratio"][m] for s in summaries).mean for m in OTHER_METHODS},
        "reached": len(reached),
        "bytes_to_target": Spread.of(sent for sent, _ in reached).mean,
        "seconds_to_target": Spread.of(seconds for _, seconds in reached).mean,
        "seconds": Spread.of(s["seconds"].get("total", 0.0) for s in summaries).mean,
        "tried": {
            f"{value:g}": score if math.isfinite(score) else None
            for value, score in cell.tried.items()
        },
        "runs": [str(run.folder.path) for run in cell.runs],
    }


def _difference(cell: CellState, cells: Sequence[CellState]) -> Estimate:
    """Return by how much a cell's scores exceed those of its baseline, seed by seed."""
    against = cell.study.baseline_of(cell.cell)
    [*others] = (each for each in cells if each.cell.labels == against and each is not cell)
    return Estimate.between(cell.by_seed, others[0].by_seed if others else {})


def _metrics(cell: CellState) -> list[str]:
    """Return the held-out metrics of a cell's runs, from the place that the score is from."""
    return ordered(name for run in cell.runs for name in _evaluation(cell, run))


def _other_metrics(cells: Sequence[CellState]) -> list[str]:
    """Return the metrics that have a column beside the score's."""
    names = ordered(name for cell in cells for name in _metrics(cell))
    score = cells[0].study.shown
    shown = "loss" if score.where == "train" else score.metric
    return [name for name in names if name != shown and name not in OF_LOSS]


def _final(cell: CellState, metric: str) -> Spread:
    """Return the last value of a held-out metric over the seeds that did not diverge."""
    runs = [run for run in cell.runs if not run.diverged]
    return Spread.of(_evaluation(cell, run).get(metric, {}).get("final") for run in runs)


def _of_clients(cell: CellState, measure: Callable[[list[float]], float]) -> Spread:
    """Return a measure of the clients' values, each on its own data, over the seeds."""
    runs = [run for run in cell.runs if not run.diverged]
    values = [run.of_clients(cell.study.shown.metric) for run in runs]
    return Spread.of(
        measure(of_one) if all(map(math.isfinite, of_one)) else None for of_one in values if of_one
    )


def _clients_text(spread: Spread) -> str:
    return spread.text(4) or ("not finite" if spread.count else "")


def _evaluation(cell: CellState, run: FinishedRun) -> Mapping[str, Any]:
    where = cell.study.shown.where
    found = run.summary["evaluation"]
    return found.get("central" if where == "train" else where) or {}


def _tuned(cell: CellState) -> str:
    if cell.key is None:
        return "-"
    name = cell.key.rpartition(".")[2]
    if cell.tuned is None:
        return f"{name}: all diverged" if cell.all_diverged else "-"
    return f"{name} {cell.tuned:g}{'' if cell.bracketed else ' (at the edge)'}"
