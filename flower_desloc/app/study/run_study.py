"""Running a study: start the missing runs, and after each one find out what is missing next."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed

from flower_desloc.app.config.errors import one_line
from flower_desloc.app.config.units import duration_text
from flower_desloc.app.runs.folder import RunFolder
from flower_desloc.app.study.cells import CellState, cell_state, counts, study_state
from flower_desloc.app.study.grid import Study, StudyRun
from flower_desloc.app.study.store import FinishedRun, Store
from flower_desloc.app.study.workers import WorkerPool

_ATTEMPTS: Final = 2
"""Attempts at a run whose worker process dies: another run may have used up the memory."""
_TAIL: Final = 65536
_STEP: Final = re.compile(rb'"step": (\d+)')


class StudyProgress:
    """Bars on a terminal, and one line per finished run; leaving the context removes the bars."""

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
        number, missing, later = counts(states)
        left = missing + later
        spec = self._study.score
        score = "diverged" if result.diverged else f"{spec.metric} {result.score(spec):.4f}"
        took = duration_text(result.outcome["seconds"])
        line = f"{number}/{number + left}  {run.title}: {score} in {took}"
        if left:
            mean = sum(self._seconds) / len(self._seconds)
            line += f", about {duration_text(mean * left / self._jobs)} left"
        self._print(line)

    def failed(self, message: str) -> None:
        """Print the message on one line."""
        self._print(one_line(message))

    def tick(self, states: Mapping[str, CellState], running: list[StudyRun]) -> None:
        """Update the bars."""
        number, missing, later = counts(states)
        self._bars.update(self._all, completed=number, total=number + missing + later)
        for title in self._tasks.keys() - {run.title for run in running}:
            self._bars.remove_task(self._tasks.pop(title))
        for run in running if self._console.is_terminal else ():
            step = _last_step(self._store.scratch_path(run) / run.config.run.name)
            self._bars.update(self._tasks[run.title], completed=step)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _last_step(folder: Path) -> int:
    """Return the step that a run has reached, from the end of its metrics."""
    try:
        with RunFolder(folder).metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            steps = _STEP.findall(file.read())
    except OSError:
        return 0
    return int(steps[-1]) if steps else 0


def run_study(
    study: Study, store: Store, pool: WorkerPool, progress: StudyProgress
) -> dict[str, str]:
    """Run what is missing; return the error of each run that failed, by the run's title.

    ``store`` must be locked. A failed run stops its own cell and no other.
    """
    states = study_state(study, store)
    running: dict[Path, StudyRun] = {}
    failed: dict[Path, tuple[StudyRun, str]] = {}
    deaths: Counter[Path] = Counter()

    def waiting() -> list[StudyRun]:
        # A search is a chain of runs, so it determines when the study ends: its runs go first.
        states_by_urgency = sorted(states.values(), key=lambda state: not state.searching)
        runs = [run for state in states_by_urgency for run in state.missing]
        return [r for r in runs if store.final_path(r) not in running.keys() | failed.keys()]

    while True:
        for run in waiting()[: pool.free]:
            running[store.final_path(run)] = run
            pool.start(run, store)
            progress.started(run)
        if not running:
            return {run.title: error for run, error in failed.values()}
        for run, outcome in pool.ended(0.25):
            path = store.final_path(run)
            del running[path]
            if outcome is None:
                deaths[path] += 1
                pool.jobs = max(1, pool.jobs - 1)
                error = f"its worker process died; from now on {pool.jobs} at a time"
                if deaths[path] == _ATTEMPTS:
                    error = "its worker process died twice; is there enough memory? give --jobs 1"
                    failed[path] = (run, error)
                progress.failed(f"{run.title}: {error}")
            elif outcome["status"] == "failed":
                error = f"{outcome['error']}; see {store.failed_path(run)}"
                failed[path] = (run, error)
                progress.failed(f"{run.title}: failed: {error}")
            else:
                result = store.finished(run)
                assert result is not None
                states[run.cell.slug] = cell_state(run.cell, study, store)
                progress.finished(run, result, states)
        progress.tick(states, list(running.values()))
