"""Results of a study: one entry per cell, as a table and as files."""

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flower_desloc.config.units import bytes_text, duration_text, figures
from flower_desloc.tools.study.cells import CellState


def table(cells: Sequence[CellState]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the lines of the results' table."""
    study = cells[0].study
    tuned = any(cell.key for cell in cells)
    diverged = any(cell.diverged for cell in cells)
    headings = [*study.axes, *(["tuned"] if tuned else []), study.score.text, "seeds"]
    headings += [*(["diverged"] if diverged else []), "sent by a client"]
    headings += ["Local Adam sends", "DDP sends", "time"]
    lines = [
        [
            *cell.cell.labels.values(),
            *([_tuned(cell)] if tuned else []),
            mean_and_std(cell, 4) or ("diverged" if cell.diverged else "-"),
            str(len(cell.runs)),
            *([str(cell.diverged)] if diverged else []),
            "-" if cell.bytes_up is None else bytes_text(cell.bytes_up),
            _times(cell.ratio("local_adam")),
            _times(cell.ratio("ddp")),
            "-" if cell.seconds is None else duration_text(cell.seconds),
        ]
        for cell in cells
    ]
    return headings, lines


def mean_and_std(cell: CellState, digits: int) -> str:
    """Return the mean of the scores ± their standard deviation; empty without a score."""
    if cell.mean is None:
        return ""
    spread = "" if cell.std is None else f" ± {cell.std:.{digits}f}"
    return f"{cell.mean:.{digits}f}{spread}"


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
        columns = [key for key in objects[0] if key not in ("tried", "runs", "scores")]
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(objects)


def _to_json(cell: CellState) -> dict[str, Any]:
    return {
        **cell.cell.labels,
        "key": cell.key,
        "tuned": cell.tuned,
        "bracketed": cell.bracketed,
        "mean": cell.mean,
        "std": cell.std,
        "scores": cell.scores,
        "seeds": len(cell.runs),
        "diverged": cell.diverged,
        "bytes_up_per_client": cell.bytes_up,
        "local_adam_ratio": cell.ratio("local_adam"),
        "ddp_ratio": cell.ratio("ddp"),
        "seconds": cell.seconds,
        "tried": {
            f"{value:g}": score if math.isfinite(score) else None
            for value, score in cell.tried.items()
        },
        "runs": [str(run.folder.path) for run in cell.runs],
    }


def _tuned(cell: CellState) -> str:
    if cell.key is None:
        return "-"
    name = cell.key.rpartition(".")[2]
    if cell.tuned is None:
        return f"{name}: all diverged" if cell.all_diverged else "-"
    return f"{name} {cell.tuned:g}{'' if cell.bracketed else ' (at the edge)'}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{figures(ratio)} times"
