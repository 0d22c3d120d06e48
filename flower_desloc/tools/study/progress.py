"""Progress of a study: bars on a terminal, and one line per finished run."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed

from flower_desloc.config.units import duration_text
from flower_desloc.tools.study.cells import CellState, counts
from flower_desloc.tools.study.grid import Study, StudyRun
from flower_desloc.tools.study.store import FinishedRun, Store

_TAIL: Final = 65536
_STEP: Final = re.compile(rb'"step": (\d+)')


class StudyProgress:
    """Prints the events of a study; leaving the context removes the bars."""

    def __init__(self, study: Study, store: Store, jobs: int, console: Console) -> None:
        self._study = study
        self._store = store
        self._jobs = jobs
        self._console = console
        self._seconds: list[float] = []
        # Labels may contain rich's [markup].
        name = TextColumn("{task.description}", markup=False)
        columns = (name, BarColumn(), MofNCompleteColumn(), Elapsed())
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal)
        self._all = self._bars.add_task(study.name, total=None)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def started(self, run: StudyRun) -> None:
        """Add a bar of the run's steps."""
        self._tasks[run.title] = self._bars.add_task(run.title, total=run.config.run.steps)

    def finished(self, run: StudyRun, result: FinishedRun, states: Mapping[str, CellState]) -> None:
        """Print the run's score."""
        self._seconds.append(result.outcome["seconds"])
        number, *others = counts(states)
        total = number + sum(others)
        spec = self._study.score
        score = "diverged" if result.diverged else f"{spec.metric} {result.score(spec):.4f}"
        took = duration_text(result.outcome["seconds"])
        self._print(f"{number}/{total}  {run.title}: {score} in {took}{self._left(number, total)}")

    def failed(self, message: str) -> None:
        """Print the message on one line."""
        self._print(" ".join(message.split()))

    def tick(self, states: Mapping[str, CellState], running: list[StudyRun]) -> None:
        """Update the bars."""
        number, *others = counts(states)
        total = number + sum(others)
        self._bars.update(self._all, completed=number, total=total)
        for title in self._tasks.keys() - {run.title for run in running}:
            self._bars.remove_task(self._tasks.pop(title))
        for run in running if self._console.is_terminal else ():
            step = _last_step(self._store.scratch_path(run) / run.config.run.name)
            self._bars.update(self._tasks[run.title], completed=step)

    def _left(self, number: int, total: int) -> str:
        if not self._seconds or number == total:
            return ""
        mean = sum(self._seconds) / len(self._seconds)
        return f", about {duration_text(mean * (total - number) / self._jobs)} left"

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _last_step(folder: Path) -> int:
    """Return the step that a run has reached, from the end of its metrics."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            steps = _STEP.findall(file.read())
    except OSError:
        return 0
    return int(steps[-1]) if steps else 0
