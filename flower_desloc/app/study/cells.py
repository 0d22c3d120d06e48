"""The state of each cell, from its finished runs: scores, and the runs that are missing."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from flower_desloc.app.config import ConfigError
from flower_desloc.app.runs.groups import Spread
from flower_desloc.app.study.grid import Cell, Study, StudyRun
from flower_desloc.app.study.search import best, is_bracketed, untried
from flower_desloc.app.study.store import FinishedRun, Store
from flower_desloc.flower.fingerprint import fingerprint


@dataclass(kw_only=True)
class CellState:
    """The search of a cell, then its runs over the seeds at the best value."""

    study: Study
    cell: Cell
    missing: list[StudyRun] = field(default_factory=list)
    """Runs that can start now."""
    searching: bool = False
    """True if the missing runs belong to the search."""
    later: int = 0
    """Least number of runs that follow the missing ones."""
    search_runs: list[FinishedRun] = field(default_factory=list)
    """Finished runs of the search."""
    search_scores: dict[int, float] = field(default_factory=dict)
    """Scores of the search, by position; negative where a larger score is better."""
    position: int | None = None
    """The best position; None during a search, without one, and if every value diverged."""
    runs: list[FinishedRun] = field(default_factory=list)
    """Finished runs of the study's seeds at the best value."""

    @property
    def finished(self) -> set[Path]:
        """Folders of the finished runs."""
        return {run.folder.path for run in (*self.runs, *self.search_runs)}

    @property
    def key(self) -> str | None:
        """The setting that is tuned."""
        return self.cell.search.key if self.cell.search else None

    @property
    def tuned(self) -> float | None:
        """The value that the search chose; None without one, or if every value diverged."""
        search, position = self.cell.search, self.position
        return None if search is None or position is None else search.value(position)

    @property
    def bracketed(self) -> bool | None:
        """True if both neighbours of the tuned value were tried; None without a tuned value."""
        return None if self.tuned is None else is_bracketed(self.search_scores)

    @property
    def all_diverged(self) -> bool:
        """True if every value of the search diverged."""
        return bool(self.tried) and self.tuned is None and not self.missing

    @property
    def tried(self) -> dict[float, float]:
        """Score of each value of the search; infinity if training diverged."""
        search, scores = self.cell.search, sorted(self.search_scores.items())
        sign = self.study.score.sign
        return {search.value(at): sign * score for at, score in scores} if search else {}

    @property
    def scores(self) -> list[float]:
        """Scores of the seeds that did not diverge."""
        return [*self.by_seed.values()]

    @property
    def by_seed(self) -> dict[int, float]:
        """Scores of the seeds that did not diverge, by seed."""
        every = {run.seed: run.score(self.study.shown) for run in self.runs}
        return {seed: score for seed, score in every.items() if math.isfinite(score)}

    @property
    def diverged(self) -> int:
        """Number of seeds that diverged."""
        return len(self.runs) - len(self.scores)

    @property
    def spread(self) -> Spread:
        """Mean and sample standard deviation of the scores."""
        return Spread.of(self.scores)


def study_state(study: Study, store: Store) -> dict[str, CellState]:
    """Return the state of every cell, by slug; nothing is run."""
    return {cell.slug: cell_state(cell, study, store) for cell in study.cells}


def cell_state(cell: Cell, study: Study, store: Store) -> CellState:
    """Return the state of one cell.

    The search is repeated from its start: the finished runs alone determine how far it is.
    """
    state = CellState(study=study, cell=cell)
    if (search := cell.search) is not None:
        scores, max_values = state.search_scores, search.max_runs // len(search.seeds)
        while positions := untried(scores, search.start, max_values):
            for position in positions:
                try:
                    runs = _runs(cell, search.seeds, position)
                except ConfigError:
                    scores[position] = math.inf  # beyond the setting's limits
                    continue
                finished, missing = _find(runs, store)
                state.missing += missing
                state.search_runs += finished
                if not missing:
                    mean = fmean(run.score(study.score) for run in finished)
                    scores[position] = study.score.sign * mean
            if state.missing:
                state.searching = True
                state.later = len(set(study.seeds) - set(search.seeds))
                return state
        state.position = best(scores)
        if state.position is None:
            return state
    state.runs, state.missing = _find(_runs(cell, study.seeds, state.position), store)
    return state


def counts(states: Mapping[str, CellState]) -> tuple[int, int, int]:
    """Return how many runs are finished, are missing, and at least follow the missing ones."""
    finished = set[Path]().union(*(state.finished for state in states.values()))
    missing = sum(len(state.missing) for state in states.values())
    return len(finished), missing, sum(state.later for state in states.values())


def of_other_library(states: Mapping[str, CellState]) -> int:
    """Return how many finished runs were computed by other code of flower-desloc than this."""
    runs = {r.folder.path: r for s in states.values() for r in (*s.runs, *s.search_runs)}
    return sum(run.outcome.get("library") != fingerprint() for run in runs.values())


def _runs(cell: Cell, seeds: tuple[int, ...], position: int | None) -> list[StudyRun]:
    return [cell.run(seed, position) for seed in seeds]


def _find(runs: list[StudyRun], store: Store) -> tuple[list[FinishedRun], list[StudyRun]]:
    """Return the finished ones of some runs, and the missing ones."""
    found = [store.finished(run) for run in runs]
    finished = [done for done in found if done is not None]
    return finished, [run for run, done in zip(runs, found, strict=True) if done is None]
