"""The study while it runs: what can start starts, what ends decides what is next."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from flower_desloc.config import dump
from flower_desloc.tools.study.cell import Run
from flower_desloc.tools.study.plan import Plan, plan
from flower_desloc.tools.study.pool import Pool
from flower_desloc.tools.study.spec import Study
from flower_desloc.tools.study.store import Done, Store
from flower_desloc.tools.study.worker import Job

_TRIES = 2
"""Of a run whose worker process dies: it may have been another's memory."""


class View(Protocol):
    """Told of a study while it goes."""

    def started(self, run: Run) -> None:
        """Called when a run starts."""

    def finished(self, run: Run, done: Done, plans: Mapping[str, Plan]) -> None:
        """Called when a run is done."""

    def said(self, text: str) -> None:
        """Called with what went wrong."""

    def tick(self, plans: Mapping[str, Plan], running: list[Run]) -> None:
        """Called all the time."""


def plans(study: Study, store: Store) -> dict[str, Plan]:
    """Return the plan of every cell, by slug."""
    return {cell.slug: plan(cell, study, store.done) for cell in study.cells}


def conduct(study: Study, store: Store, pool: Pool, view: View) -> dict[str, str]:
    """Run what the study misses; return the errors of the runs that failed, by the run's title.

    ``store`` is opened. A run that failed holds up its own cell and no other.
    """
    state = plans(study, store)
    running: dict[Path, Run] = {}
    failed: dict[Path, tuple[Run, str]] = {}
    deaths: Counter[Path] = Counter()

    def waiting() -> list[Run]:
        runs = [
            (not each.searching, run)
            for each in state.values()
            for run in each.missing
            if (place := store.place(run)) not in running and place not in failed
        ]
        # A search is a chain of runs, the longest way to the end: it goes first.
        return [run for _, run in sorted(runs, key=lambda pair: pair[0])]

    while True:
        for run in waiting()[: pool.free]:
            running[store.place(run)] = run
            pool.start(_job(run, store))
            view.started(run)
        if not running:
            return {run.title: error for run, error in failed.values()}
        for job, outcome in pool.ended(0.25):
            run = running.pop(job.place)
            if outcome is None:
                deaths[job.place] += 1
                pool.jobs = max(1, pool.jobs - 1)
                error = f"its worker process died, {pool.jobs} at once from now on"
                if deaths[job.place] == _TRIES:
                    error = "its worker process died twice; is there enough memory? give --jobs 1"
                    failed[job.place] = (run, error)
                view.said(f"{run.title}: {error}")
            elif outcome["status"] == "failed":
                error = f"{outcome['error']}; see {job.failed}"
                failed[job.place] = (run, error)
                view.said(f"{run.title}: failed: {error}")
            else:
                done = store.done(run)
                assert done is not None
                state[run.cell.slug] = plan(run.cell, study, store.done)
                view.finished(run, done, state)
        view.tick(state, list(running.values()))


def _job(run: Run, store: Store) -> Job:
    return Job(
        name=run.config.run.name,
        config=dump(run.config),
        num_clients=run.config.federation.num_clients,
        scratch=store.scratch(run),
        place=store.place(run),
        failed=store.failed(run),
    )
