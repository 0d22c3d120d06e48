"""Results of a study: one entry per cell, as a table and as files."""

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from flower_desloc.config.units import bytes_text, duration_text, figures
from flower_desloc.tools.study.grid import Study
from flower_desloc.tools.study.state import CellState, study_state
from flower_desloc.tools.study.store import FinishedRun, Store


@dataclass(frozen=True)
class CellResult:
    """Scores, traffic and time of one cell, over the seeds at the tuned value."""

    study: Study
    state: CellState

    @property
    def labels(self) -> dict[str, str]:
        """The value's label on each axis."""
        return dict(self.state.cell.labels)

    @property
    def runs(self) -> list[FinishedRun]:
        """The runs over the seeds."""
        return self.state.seeds

    @property
    def key(self) -> str | None:
        """The setting that was tuned."""
        return self.state.cell.search.key if self.state.cell.search else None

    @property
    def tuned(self) -> float | None:
        """The value that the search chose; None without one, or if every value diverged."""
        search, position = self.state.cell.search, self.state.position
        return None if search is None or position is None else search.value(position)

    @property
    def bracketed(self) -> bool | None:
        """Whether both neighbours of the tuned value were tried; None without a tuned value."""
        return None if self.tuned is None else self.state.bracketed

    @property
    def all_diverged(self) -> bool:
        """Whether every value of the search diverged."""
        return bool(self.tried) and self.tuned is None and not self.state.missing

    @property
    def tried(self) -> dict[float, float]:
        """Score of each value of the search; infinity if training diverged."""
        search = self.state.cell.search
        scores = sorted(self.state.scores.items())
        return {search.value(position): score for position, score in scores} if search else {}

    @property
    def scores(self) -> list[float]:
        """Scores of the seeds that did not diverge."""
        every = (run.score(self.study.score) for run in self.runs)
        return [score for score in every if math.isfinite(score)]

    @property
    def diverged(self) -> int:
        """Number of seeds that diverged."""
        return len(self.runs) - len(self.scores)

    @property
    def mean(self) -> float | None:
        """Mean of the scores."""
        return _mean(self.scores)

    @property
    def std(self) -> float | None:
        """Sample standard deviation of the scores; None for fewer than two."""
        return stdev(self.scores) if len(self.scores) > 1 else None

    @property
    def bytes_up(self) -> float | None:
        """Payload bytes sent by one client, mean over the seeds that did not diverge."""
        return _mean(
            summary["bytes"]["measured"]["up"]["total"] / max(1, summary["clients"])
            for summary in self._summaries
        )

    @property
    def seconds(self) -> float | None:
        """Wall-clock of a run's windows, mean over the seeds that did not diverge."""
        return _mean(summary["seconds"].get("total", 0.0) for summary in self._summaries)

    def ratio(self, other: str) -> float | None:
        """Return how many times as much ``local_adam`` or ``ddp`` would send."""
        ratios = (summary["ratio"].get(other) for summary in self._summaries)
        return _mean(ratio for ratio in ratios if ratio is not None)

    @property
    def _summaries(self) -> list[dict[str, Any]]:
        return [run.summary for run in self.runs if not run.diverged]

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return {
            **self.labels,
            "key": self.key,
            "tuned": self.tuned,
            "bracketed": self.bracketed,
            "mean": self.mean,
            "std": self.std,
            "scores": self.scores,
            "seeds": len(self.runs),
            "diverged": self.diverged,
            "bytes_up_per_client": self.bytes_up,
            "local_adam_ratio": self.ratio("local_adam"),
            "ddp_ratio": self.ratio("ddp"),
            "seconds": self.seconds,
            "tried": {
                f"{value:g}": score if math.isfinite(score) else None
                for value, score in self.tried.items()
            },
            "runs": [str(run.folder.path) for run in self.runs],
        }


def results(study: Study, store: Store) -> list[CellResult]:
    """Return the results of a study from its finished runs; nothing is run."""
    return [CellResult(study, state) for state in study_state(study, store).values()]


def table(cells: Sequence[CellResult]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the lines of the results' table."""
    study = cells[0].study
    tuned = any(cell.key for cell in cells)
    diverged = any(cell.diverged for cell in cells)
    headings = [*study.axes, *(["tuned"] if tuned else []), study.score.text, "seeds"]
    headings += [*(["diverged"] if diverged else []), "sent by a client"]
    headings += ["Local Adam sends", "DDP sends", "time"]
    lines = [
        [
            *cell.labels.values(),
            *([_tuned(cell)] if tuned else []),
            _mean_and_std(cell),
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


def rich_table(cells: Sequence[CellResult]) -> Table:
    """Return the results for a terminal."""
    headings, lines = table(cells)
    made = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, heading in enumerate(headings):
        is_label = number < len(cells[0].study.axes)
        made.add_column(heading, justify="left" if is_label else "right")
    for line in lines:
        made.add_row(*line)
    return made


def markdown(cells: Sequence[CellResult]) -> str:
    """Return the results as a Markdown table."""
    headings, lines = table(cells)
    labels = len(cells[0].study.axes)
    rule = ["---"] * labels + ["---:"] * (len(headings) - labels)
    every = [headings, rule, *lines]
    return "\n".join(f"| {' | '.join(c.replace('|', '/') for c in line)} |" for line in every)


def write(cells: Sequence[CellResult], folder: Path) -> None:
    """Write ``results.md``, ``results.csv`` and ``results.json``."""
    study = cells[0].study
    objects = [cell.to_json() for cell in cells]
    content = {"study": study.name, "score": study.score.text, "cells": objects}
    (folder / "results.md").write_text(markdown(cells) + "\n", encoding="utf-8")
    (folder / "results.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    with (folder / "results.csv").open("w", encoding="utf-8", newline="") as file:
        columns = [key for key in objects[0] if key not in ("tried", "runs", "scores")]
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(objects)


def _tuned(cell: CellResult) -> str:
    if cell.key is None:
        return "-"
    name = cell.key.rpartition(".")[2]
    if cell.tuned is None:
        return f"{name}: all diverged" if cell.all_diverged else "-"
    return f"{name} {cell.tuned:g}{'' if cell.bracketed else ' (at the edge)'}"


def _mean_and_std(cell: CellResult) -> str:
    if cell.mean is None:
        return "diverged" if cell.diverged else "-"
    return f"{cell.mean:.4f}" + ("" if cell.std is None else f" ± {cell.std:.4f}")


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{figures(ratio)} times"


def _mean(values: Iterable[float]) -> float | None:
    every = list(values)
    return fmean(every) if every else None
