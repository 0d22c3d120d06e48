"""The state of each cell, from its finished runs: scores, and the runs that are missing."""

import math
from dataclasses import dataclass, field
from statistics import fmean

from flower_desloc.tools.study.grid import Cell, Study, StudyRun
from flower_desloc.tools.study.search import best, is_bracketed, untried
from flower_desloc.tools.study.store import FinishedRun, Store


@dataclass(kw_only=True)
class CellState:
    """The search of a cell, then its runs over the seeds at the best value."""

    cell: Cell
    missing: list[StudyRun] = field(default_factory=list)
    """Runs that can start now."""
    searching: bool = False
    """Whether the missing runs belong to the search."""
    later: int = 0
    """Least number of runs that follow the missing ones."""
    tried: dict[int, list[FinishedRun]] = field(default_factory=dict)
    """Finished runs of the search, by position."""
    scores: dict[int, float] = field(default_factory=dict)
    """Scores of the search, by position."""
    position: int | None = None
    """The best position; None during a search, without one, and if every value diverged."""
    seeds: list[FinishedRun] = field(default_factory=list)
    """Finished runs of the study's seeds at the best value."""

    @property
    def bracketed(self) -> bool:
        """Whether both neighbours of the best value were tried."""
        return is_bracketed(self.scores)

    @property
    def finished(self) -> set[str]:
        """Paths of the finished runs."""
        runs = [*self.seeds, *(run for runs in self.tried.values() for run in runs)]
        return {str(run.folder.path) for run in runs}


def study_state(study: Study, store: Store) -> dict[str, CellState]:
    """Return the state of every cell, by slug."""
    return {cell.slug: cell_state(cell, study, store) for cell in study.cells}


def cell_state(cell: Cell, study: Study, store: Store) -> CellState:
    """Return the state of one cell.

    The search is repeated from its start: the finished runs alone determine how far it is.
    """
    state = CellState(cell=cell)
    if cell.search is not None:
        _search(state, study, store)
        if state.searching or state.position is None:
            return state
    state.seeds, state.missing = _find(cell, study.seeds, state.position, store)
    return state


def _search(state: CellState, study: Study, store: Store) -> None:
    search = state.cell.search
    assert search is not None
    while positions := untried(state.scores, search.start, search.max_values):
        for position in positions:
            if not state.cell.is_possible(position):
                state.scores[position] = math.inf  # beyond the setting's limits
                continue
            finished, missing = _find(state.cell, search.seeds, position, store)
            state.missing += missing
            if finished:
                state.tried[position] = finished
            if not missing:
                state.scores[position] = fmean(run.score(study.score) for run in finished)
        if state.missing:
            state.searching = True
            state.later = len(set(study.seeds) - set(search.seeds))
            return
    state.position = best(state.scores)


def _find(
    cell: Cell, seeds: tuple[int, ...], position: int | None, store: Store
) -> tuple[list[FinishedRun], list[StudyRun]]:
    """Return the finished runs of some seeds, and the missing ones."""
    runs = {seed: cell.run(seed, position) for seed in seeds}
    found = {seed: store.finished(run) for seed, run in runs.items()}
    finished = [run for run in found.values() if run is not None]
    return finished, [runs[seed] for seed, run in found.items() if run is None]
