"""What a study found: one row a cell, for people and for programs."""

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from flower_desloc.runs.units import bytes_text, duration_text, figures
from flower_desloc.tools.study.conduct import plans
from flower_desloc.tools.study.plan import Plan
from flower_desloc.tools.study.spec import Study
from flower_desloc.tools.study.store import Done, Store


@dataclass(frozen=True)
class Row:
    """One cell."""

    study: Study
    plan: Plan

    @property
    def labels(self) -> dict[str, str]:
        """Axis -> the value's label."""
        return dict(self.plan.cell.labels)

    @property
    def runs(self) -> list[Done]:
        """The runs over the seeds, at the tuned value."""
        return self.plan.seeds

    @property
    def key(self) -> str | None:
        """The setting that was tuned."""
        return self.plan.cell.sweep.key if self.plan.cell.sweep else None

    @property
    def tuned(self) -> float | None:
        """The value that the search chose; None without one, or where everything diverged."""
        sweep, position = self.plan.cell.sweep, self.plan.position
        return None if sweep is None or position is None else sweep.value(position)

    @property
    def bracketed(self) -> bool | None:
        """Whether neither neighbour of the tuned value is better; None without a search."""
        return None if self.tuned is None else self.plan.bracketed

    @property
    def tried(self) -> dict[float, float]:
        """Value -> score, of the search; infinite where training diverged."""
        sweep = self.plan.cell.sweep
        scores = sorted(self.plan.scores.items())
        return {sweep.value(position): score for position, score in scores} if sweep else {}

    @property
    def scores(self) -> list[float]:
        """One a seed, without those that diverged."""
        every = (done.score(self.study.score) for done in self.runs)
        return [score for score in every if math.isfinite(score)]

    @property
    def diverged(self) -> int:
        """How many seeds diverged."""
        return len(self.runs) - len(self.scores)

    @property
    def mean(self) -> float | None:
        """Mean of the scores."""
        return fmean(self.scores) if self.scores else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation of the scores; None of fewer than two."""
        return stdev(self.scores) if len(self.scores) > 1 else None

    @property
    def bytes_up(self) -> float | None:
        """Payload bytes that one client sent, mean over the seeds that did not diverge."""
        return _mean(
            done.summary["bytes"]["measured"]["up"]["total"] / max(1, done.summary["clients"])
            for done in self._whole
        )

    @property
    def seconds(self) -> float | None:
        """Wall-clock of a run's windows, mean over the seeds that did not diverge."""
        return _mean(done.summary["seconds"].get("total", 0.0) for done in self._whole)

    def ratio(self, other: str) -> float | None:
        """Return how many times as much ``local_adam`` or ``ddp`` would have sent."""
        ratios = [done.summary["ratio"].get(other) for done in self._whole]
        return _mean(ratio for ratio in ratios if ratio is not None)

    @property
    def _whole(self) -> list[Done]:
        return [done for done in self.runs if not done.diverged]

    def to_json(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
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
            "runs": [str(done.folder.path) for done in self.runs],
        }


def results(study: Study, store: Store) -> list[Row]:
    """Return the rows of a study from the runs that are done; nothing is run."""
    return [Row(study, plan) for plan in plans(study, store).values()]


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the lines of the results, as people read them."""
    if not rows:
        return [], []
    study = rows[0].study
    tuned = any(row.key for row in rows)
    diverged = any(row.diverged for row in rows)
    headings = [*study.axes, *(["tuned"] if tuned else []), study.score.text, "seeds"]
    headings += [*(["diverged"] if diverged else []), "sent by a client"]
    headings += ["Local Adam sends", "DDP sends", "time"]
    lines = []
    for row in rows:
        line = list(row.labels.values())
        line += [_tuned(row)] if tuned else []
        line += [_mean_and_std(row), str(len(row.runs))]
        line += [str(row.diverged)] if diverged else []
        line += [
            "-" if row.bytes_up is None else bytes_text(row.bytes_up),
            _times(row.ratio("local_adam")),
            _times(row.ratio("ddp")),
            "-" if row.seconds is None else duration_text(row.seconds),
        ]
        lines.append(line)
    return headings, lines


def rich_table(rows: Sequence[Row]) -> Table:
    """Return the results for a terminal."""
    headings, lines = table(rows)
    made = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="left" if number < _axes(rows) else "right")
    for line in lines:
        made.add_row(*line)
    return made


def markdown(rows: Sequence[Row]) -> str:
    """Return the results as a Markdown table."""
    headings, lines = table(rows)
    rule = ["---" if number < _axes(rows) else "---:" for number in range(len(headings))]
    cells = [headings, rule, *lines]
    return "\n".join(f"| {' | '.join(c.replace('|', '/') for c in line)} |" for line in cells)


def write(rows: Sequence[Row], folder: Path) -> None:
    """Write ``results.md``, ``results.csv`` and ``results.json``."""
    study = rows[0].study
    objects = [row.to_json() for row in rows]
    (folder / "results.md").write_text(markdown(rows) + "\n", encoding="utf-8")
    (folder / "results.json").write_text(
        json.dumps({"study": study.name, "score": study.score.text, "cells": objects}, indent=2)
        + "\n",
        encoding="utf-8",
    )
    with (folder / "results.csv").open("w", encoding="utf-8", newline="") as file:
        columns = [key for key in objects[0] if key not in ("tried", "runs", "scores")]
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(objects)


def _tuned(row: Row) -> str:
    if row.key is None:
        return "-"
    name = row.key.rpartition(".")[2]
    if row.tuned is None:
        return f"{name}: all diverged" if row.tried and not row.plan.missing else "-"
    return f"{name} {row.tuned:g}{'' if row.bracketed else ' (at the edge)'}"


def _mean_and_std(row: Row) -> str:
    if row.mean is None:
        return "diverged" if row.diverged else "-"
    return f"{row.mean:.4f}" + ("" if row.std is None else f" ± {row.std:.4f}")


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{figures(ratio)} times"


def _axes(rows: Sequence[Row]) -> int:
    return len(rows[0].study.axes) if rows else 0


def _mean(values: Any) -> float | None:
    every = list(values)
    return fmean(every) if every else None
