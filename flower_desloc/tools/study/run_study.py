"""Running a study: start the missing runs, and after each one find out what is missing next."""

from collections import Counter
from pathlib import Path
from typing import Final

from flower_desloc.tools.study.cells import cell_state, study_state
from flower_desloc.tools.study.grid import Study, StudyRun
from flower_desloc.tools.study.progress import StudyProgress
from flower_desloc.tools.study.store import Store
from flower_desloc.tools.study.workers import WorkerPool

_ATTEMPTS: Final = 2
"""Attempts at a run whose worker process dies: another run may have used up the memory."""


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
