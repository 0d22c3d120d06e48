"""The folder of a study: which runs are done, and where one that is going on writes."""

import fcntl
import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from flower_desloc.config import ConfigError, parse
from flower_desloc.runs import RunFolder
from flower_desloc.tools.study.cell import Run, named
from flower_desloc.tools.study.spec import Score

OUTCOME = "outcome.json"
"""In a run's folder: how the run ended, and what was run."""
LOG = "log.txt"
"""In a run's folder: what the run said."""


class Outcome(TypedDict):
    """The content of ``outcome.json``."""

    status: Literal["completed", "diverged", "failed"]
    error: str | None
    seconds: float
    """Wall-clock of the whole run, with its start."""
    config: str
    """The resolved configuration, YAML."""


@dataclass(frozen=True)
class Done:
    """A run that need not be repeated."""

    folder: RunFolder
    outcome: Outcome
    summary: dict[str, Any]

    @property
    def diverged(self) -> bool:
        """Whether training diverged."""
        return self.outcome["status"] == "diverged"

    def score(self, score: Score) -> float:
        """Return the run's score; infinite where it diverged or is not a number."""
        if self.diverged:
            return math.inf
        if score.where == "train":
            course = self.summary["train_loss"]
        else:
            course = self.summary["evaluation"].get(score.where, {}).get(score.metric, {})
        value = course.get(score.reduce)
        return math.inf if value is None else float(value)


class Store:
    """The folder ``<output_dir>/<study>``.

    A run writes into ``.unfinished/`` and gets its place by one rename when it is over, so what has
    its place is whole.
    """

    def __init__(self, output_dir: str | Path, name: str) -> None:
        self.path = Path(output_dir).expanduser().resolve() / name
        self._done: dict[Path, Done] = {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the folder for one study, and clear what an interrupted one has left.

        Raises :class:`ConfigError` when another process holds it or it cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise ConfigError(
                f"--output-dir: cannot write to {self.path} ({error.strerror}); give another"
            ) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(f"{self.path}: this study is running already") from error
            shutil.rmtree(self._unfinished, ignore_errors=True)
            try:
                yield
            finally:
                shutil.rmtree(self._unfinished, ignore_errors=True)

    def place(self, run: Run) -> Path:
        """Return the folder that ``run`` gets when it is done."""
        return self.path / run.cell.slug / run.folder

    def scratch(self, run: Run) -> Path:
        """Return the folder that ``run`` writes to; its :class:`RunFolder` is in it."""
        return self._unfinished / run.cell.slug / run.folder

    def failed(self, run: Run) -> Path:
        """Return where a failed run is kept, to be looked at."""
        return self.path / ".failed" / run.cell.slug / run.folder

    def done(self, run: Run) -> Done | None:
        """Return what ``run`` left, if it was run as it would be now and need not be again."""
        place = self.place(run)
        if place not in self._done:
            found = _read(RunFolder(place), run)
            if found is None:
                return None
            self._done[place] = found
        return self._done[place]

    @property
    def _unfinished(self) -> Path:
        return self.path / ".unfinished"


def _read(folder: RunFolder, run: Run) -> Done | None:
    try:
        outcome: Outcome = json.loads((folder.path / OUTCOME).read_text(encoding="utf-8"))
        if named(parse(outcome["config"]), run.config.run.name) != run.config:
            return None
        summary = json.loads(folder.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or of a version that had other settings
        return None
    completed = outcome["status"] == "completed" and summary["status"] == "completed"
    return Done(folder, outcome, summary) if completed or outcome["status"] == "diverged" else None
