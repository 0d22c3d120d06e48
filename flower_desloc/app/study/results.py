"""Results of a study: one entry per cell, as a table and as files."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flower_desloc.app.config.units import bytes_text, duration_text, figures
from flower_desloc.app.runs.folder import evaluations, read_lines
from flower_desloc.app.runs.groups import Spread
from flower_desloc.app.runs.metric import OF_LOSS, ordered
from flower_desloc.app.runs.summary import OTHER_METHODS
from flower_desloc.app.study.cells import CellState
from flower_desloc.app.study.grid import ScoreSpec
from flower_desloc.app.study.store import FinishedRun


def table(cells: Sequence[CellState]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the lines of the results' table."""
    study = cells[0].study
    tuned = any(cell.key for cell in cells)
    diverged = any(cell.diverged for cell in cells)
    headings = [*study.axes, *(["tuned"] if tuned else []), study.score.text, "seeds"]
    others = _other_metrics(cells)
    worst = any(_worst(cell).mean is not None for cell in cells)
    headings += [*(["diverged"] if diverged else []), *others]
    headings += [*(["worst client"] if worst else []), "sent by a client"]
    headings += ["Local Adam sends", "DDP sends", "time"]
    lines = []
    for cell in cells:
        found = _to_json(cell)
        sent, seconds = found["bytes_up_per_client"], found["seconds"]
        ratios = [found[f"{method}_ratio"] for method in OTHER_METHODS]
        lines.append(
            [
                *cell.cell.labels.values(),
                *([_tuned(cell)] if tuned else []),
                cell.spread.text(4) or ("diverged" if cell.diverged else "-"),
                str(len(cell.runs)),
                *([str(cell.diverged)] if diverged else []),
                *(_final(cell, metric).text(4) or "-" for metric in others),
                *([_worst(cell).text(4) or "-"] if worst else []),
                "-" if sent is None else bytes_text(sent),
                *("-" if ratio is None else f"{figures(ratio)} times" for ratio in ratios),
                "-" if seconds is None else duration_text(seconds),
            ]
        )
    return headings, lines


def markdown(cells: Sequence[CellState]) -> str:
    """Return the results as a Markdown table."""
    headings, lines = table(cells)
    labels = len(cells[0].study.axes)
    rule = ["---"] * labels + ["---:"] * (len(headings) - labels)
    every = [headings, rule, *lines]
    return "\n".join(f"| {' | '.join(c.replace('|', '/') for c in line)} |" for line in every)


def write(cells: Sequence[CellState], folder: Path) -> None:
    """Write ``results.md``, ``results.csv`` and ``results.json``."""
    study = cells[0].study
    objects = [_to_json(cell) for cell in cells]
    content = {"study": study.name, "score": study.score.text, "cells": objects}
    (folder / "results.md").write_text(markdown(cells) + "\n", encoding="utf-8")
    (folder / "results.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    with (folder / "results.csv").open("w", encoding="utf-8", newline="") as file:
        columns = list(dict.fromkeys(key for each in objects for key in each))
        columns = [key for key in columns if key not in ("tried", "runs", "scores")]
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(objects)


def _to_json(cell: CellState) -> dict[str, Any]:
    summaries = [run.summary for run in cell.runs if not run.diverged]
    sent = [s["bytes"]["measured"]["up"]["total"] / max(1, s["clients"]) for s in summaries]
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
        **{metric: _final(cell, metric).mean for metric in _metrics(cell)},
        "worst_client": _worst(cell).mean,
        "bytes_up_per_client": Spread.of(sent).mean,
        **{f"{m}_ratio": Spread.of(s["ratio"][m] for s in summaries).mean for m in OTHER_METHODS},
        "seconds": Spread.of(s["seconds"].get("total", 0.0) for s in summaries).mean,
        "tried": {
            f"{value:g}": score if math.isfinite(score) else None
            for value, score in cell.tried.items()
        },
        "runs": [str(run.folder.path) for run in cell.runs],
    }


def _metrics(cell: CellState) -> list[str]:
    """Return the held-out metrics of a cell's runs, from the place that the score is from."""
    return ordered(name for run in cell.runs for name in _evaluation(cell, run))


def _other_metrics(cells: Sequence[CellState]) -> list[str]:
    """Return the metrics that have a column beside the score's."""
    names = ordered(name for cell in cells for name in _metrics(cell))
    score = cells[0].study.score
    shown = "loss" if score.where == "train" else score.metric
    return [name for name in names if name != shown and name not in OF_LOSS]


def _final(cell: CellState, metric: str) -> Spread:
    """Return the last value of a held-out metric over the seeds that did not diverge."""
    runs = [run for run in cell.runs if not run.diverged]
    return Spread.of(_evaluation(cell, run).get(metric, {}).get("final") for run in runs)


def _worst(cell: CellState) -> Spread:
    """Return the score's metric, or the loss, on the client where it is worst."""
    score = cell.study.score
    values = [_worst_value(run, score) for run in cell.runs if not run.diverged]
    return Spread.of(values)


def _worst_value(run: FinishedRun, score: ScoreSpec) -> float | None:
    seen = evaluations(read_lines(run.folder.metrics), "federated")
    parts = seen[-1][1]["parts"].values() if seen else ()
    found = [each[score.metric] for each in parts if each.get(score.metric) is not None]
    return max(found, key=lambda value: score.sign * value, default=None)


def _evaluation(cell: CellState, run: FinishedRun) -> Mapping[str, Any]:
    where = cell.study.score.where
    found = run.summary["evaluation"]
    return found.get("central" if where == "train" else where) or {}


def _tuned(cell: CellState) -> str:
    if cell.key is None:
        return "-"
    name = cell.key.rpartition(".")[2]
    if cell.tuned is None:
        return f"{name}: all diverged" if cell.all_diverged else "-"
    return f"{name} {cell.tuned:g}{'' if cell.bracketed else ' (at the edge)'}"
