"""The folder of a study: finished runs, failed runs, and the scratch folders of running ones."""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, TypedDict

from flower_desloc.app.config import ConfigError, parse
from flower_desloc.app.config.metric import ordered
from flower_desloc.app.runs.folder import Line, RunFolder, evaluations, locked, read_lines
from flower_desloc.app.study.grid import ScoreSpec, StudyRun, Target, with_run

OUTCOME: Final = "outcome.json"
"""File in a run's folder: how the run ended, and its configuration."""
LOG: Final = "log.txt"
"""File in a run's folder: everything the run printed."""


class Outcome(TypedDict):
    """The content of ``outcome.json``."""

    status: Literal["completed", "diverged", "failed"]
    error: str | None
    seconds: float
    """Wall-clock of the whole run, its start included."""
    config: str
    """The resolved configuration, YAML."""
    library: str
    """The fingerprint of flower-desloc's own code."""


@dataclass(frozen=True)
class FinishedRun:
    """A run that completed or diverged, and is not repeated."""

    folder: RunFolder
    outcome: Outcome
    summary: dict[str, Any]

    @property
    def diverged(self) -> bool:
        """True if training diverged."""
        return self.outcome["status"] == "diverged"

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.summary["config"]["seed"])

    @cached_property
    def _lines(self) -> list[Line]:
        # Read once: a table asks every run many times. The losses of all steps are not kept.
        names = ("round", "step", "train_loss", "bytes_up", "seconds_split", "evaluation")
        lines = read_lines(self.folder.metrics)
        return [{name: line[name] for name in names if name in line} for line in lines]

    def of_clients(self, metric: str) -> list[float]:
        """Return the last value of a metric on each client's own data; NaN if it is not finite."""
        seen = evaluations(self._lines, "federated")
        parts = seen[-1][1]["parts"].values() if seen else ()
        values = (each[metric] for each in parts if metric in each)
        return [math.nan if value is None else value for value in values]

    def has(self, spec: ScoreSpec) -> bool:
        """Return whether an evaluation of the run has the metric."""
        seen = evaluations(self._lines, spec.where)
        return any(spec.metric in each["overall"] for _, each in seen)

    def until(self, target: Target) -> tuple[float, float] | None:
        """Return the bytes that a client sent, and the seconds, until the target was reached.

        Seconds are without evaluations. None if it never was.
        """
        sent = seconds = 0.0
        for line in self._lines:
            sent += sum(line["bytes_up"].values())
            split = line["seconds_split"]
            seconds += split["total"] - split["evaluation"]
            evaluation = line["evaluation"].get(target.score.where, {}).get("overall", {})
            if target.is_met(evaluation.get(target.score.metric)):
                return sent / max(1, self.summary["clients"]), seconds
        return None

    def score(self, spec: ScoreSpec) -> float:
        """Return the run's score; infinite, for the worst, if it diverged or is not finite.

        Raises ``ConfigError`` if the run has no such metric.
        """
        worst = spec.sign * math.inf
        if self.diverged:
            return worst
        values = self._values(spec)
        if spec.reduce == "final":
            values = values[-1:]
        finite = [value for value in values if value is not None]
        return min(finite, key=lambda value: spec.sign * value, default=worst)

    def _values(self, spec: ScoreSpec) -> list[float | None]:
        lines = self._lines
        if spec.where == "train":
            return [line["train_loss"] for line in lines if line["round"] > 0]
        overall = [each["overall"] for _, each in evaluations(lines, spec.where)]
        if not any(spec.metric in each for each in overall):
            known = ordered(name for each in overall for name in each)
            raise ConfigError(
                f"score.metric={spec.metric}: {self.folder.path} has no such metric; "
                f"it has {', '.join(known) or 'none'}"
            )
        return [each.get(spec.metric) for each in overall]


class Store:
    """The folder ``<output_dir>/<study>``.

    A run writes into ``.unfinished/``. When it ends, one rename moves its folder to its final path,
    so a folder at a final path is complete.
    """

    def __init__(self, output_dir: str | Path, name: str) -> None:
        self.path = Path(output_dir).expanduser().resolve() / name
        self._unfinished = self.path / ".unfinished"
        self._finished: dict[Path, FinishedRun] = {}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one process, and remove what an interrupted one has left.

        Raises ``ConfigError`` if another process holds it or it cannot be created.
        """
        with locked(self.path, f"{self.path}: this study is running already"):
            shutil.rmtree(self._unfinished, ignore_errors=True)
            try:
                yield
            finally:
                shutil.rmtree(self._unfinished, ignore_errors=True)

    def final_path(self, run: StudyRun) -> Path:
        """Return the folder of ``run`` once it is finished."""
        return self.path / run.cell.slug / run.folder

    def scratch_path(self, run: StudyRun) -> Path:
        """Return the folder that ``run`` writes its ``RunFolder`` into."""
        return self._unfinished / run.cell.slug / run.folder

    def failed_path(self, run: StudyRun) -> Path:
        """Return the folder of ``run`` if it failed."""
        return self.path / ".failed" / run.cell.slug / run.folder

    def finished(self, run: StudyRun) -> FinishedRun | None:
        """Return ``run`` if it has finished with the configuration that it has now.

        Raises ``ConfigError`` if its configuration was written by another version.
        """
        path = self.final_path(run)
        if path not in self._finished and (found := _read(RunFolder(path), run)):
            self._finished[path] = found
        return self._finished.get(path)


def _read(folder: RunFolder, run: StudyRun) -> FinishedRun | None:
    try:
        outcome: Outcome = json.loads((folder.path / OUTCOME).read_text(encoding="utf-8"))
        summary = json.loads(folder.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # missing
        return None
    try:
        config = parse(outcome["config"], "delete its folder to repeat the run")
    except ConfigError as error:
        raise ConfigError(f"{folder.path}: {error}") from error
    if with_run(config, name=run.config.run.name) != run.config:
        return None
    completed = outcome["status"] == "completed" and summary["status"] == "completed"
    if not completed and outcome["status"] != "diverged":
        return None
    return FinishedRun(folder, outcome, summary)
