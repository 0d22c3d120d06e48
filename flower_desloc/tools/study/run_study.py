"""Running a study: start the missing runs, and after each one find out what is missing next."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

from flower_desloc.config import dump
from flower_desloc.tools.study.grid import Study, StudyRun
from flower_desloc.tools.study.state import CellState, cell_state, study_state
from flower_desloc.tools.study.store import FinishedRun, Store
from flower_desloc.tools.study.workers import Job, WorkerPool

_ATTEMPTS: Final = 2
"""Attempts at a run whose worker process dies: another run may have used up the memory."""


class StudyView(Protocol):
    """Receives the events of a study."""

    def started(self, run: StudyRun) -> None:
        """Handle the start of a run."""

    def finished(self, run: StudyRun, result: FinishedRun, states: Mapping[str, CellState]) -> None:
        """Handle the end of a run."""

    def failed(self, message: str) -> None:
        """Handle a run that failed or whose worker died."""

    def tick(self, states: Mapping[str, CellState], running: list[StudyRun]) -> None:
        """Handle the passing of time; called several times a second."""


def run_study(study: Study, store: Store, pool: WorkerPool, view: StudyView) -> dict[str, str]:
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
            pool.start(_job(run, store))
            view.started(run)
        if not running:
            return {run.title: error for run, error in failed.values()}
        for job, outcome in pool.ended(0.25):
            run = running.pop(job.final)
            if outcome is None:
                deaths[job.final] += 1
                pool.jobs = max(1, pool.jobs - 1)
                error = f"its worker process died; from now on {pool.jobs} at a time"
                if deaths[job.final] == _ATTEMPTS:
                    error = "its worker process died twice; is there enough memory? give --jobs 1"
                    failed[job.final] = (run, error)
                view.failed(f"{run.title}: {error}")
            elif outcome["status"] == "failed":
                error = f"{outcome['error']}; see {job.failed}"
                failed[job.final] = (run, error)
                view.failed(f"{run.title}: failed: {error}")
            else:
                result = store.finished(run)
                assert result is not None
                states[run.cell.slug] = cell_state(run.cell, study, store)
                view.finished(run, result, states)
        view.tick(states, list(running.values()))


def _job(run: StudyRun, store: Store) -> Job:
    return Job(
        name=run.config.run.name,
        config=dump(run.config),
        num_clients=run.config.federation.num_clients,
        scratch=store.scratch_path(run),
        final=store.final_path(run),
        failed=store.failed_path(run),
    )
