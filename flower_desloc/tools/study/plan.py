"""What a cell still needs: the next values of its search, then its seeds at the best of them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

from flower_desloc.tools.study.cell import Cell, Run
from flower_desloc.tools.study.spec import Study
from flower_desloc.tools.study.store import Done
from flower_desloc.tools.study.sweep import best, is_bracketed, untried


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The state of one cell, from the runs that are done."""

    cell: Cell
    missing: list[Run]
    """Can be run now."""
    searching: bool = False
    """Whether the runs that are missing are of the search."""
    later: int = 0
    """How many runs follow at least, once those are done."""
    sweep: dict[int, list[Done]] = field(default_factory=dict)
    """Position -> the runs of ``sweep.seeds`` there, for the values that were tried."""
    scores: dict[int, float] = field(default_factory=dict)
    """Position -> score."""
    position: int | None = None
    """The best; None before the search is over, without one, or where everything diverged."""
    seeds: list[Done] = field(default_factory=list)
    """The runs of ``study.seeds`` that are done, at the best value."""

    @property
    def bracketed(self) -> bool:
        """Whether the best value has a neighbour that is no better on both sides."""
        return is_bracketed(self.scores)

    @property
    def done(self) -> set[str]:
        """The folders of the runs that the plan rests on."""
        runs = [*self.seeds, *(done for runs in self.sweep.values() for done in runs)]
        return {str(done.folder.path) for done in runs}


def plan(cell: Cell, study: Study, find: Callable[[Run], Done | None]) -> Plan:
    """Return what ``cell`` needs, where ``find`` returns what is done.

    The search is gone through again from its start, so that the runs alone say how far it is.
    """
    sweep, tried, scores = cell.sweep, dict[int, list[Done]](), dict[int, float]()
    if sweep is None:
        return _with_seeds(cell, study, find, None, tried, scores)
    while positions := untried(scores, sweep.start, sweep.max_values):
        missing = []
        for position in positions:
            if not cell.is_possible(position):
                scores[position] = math.inf  # beyond what the setting may be
                continue
            runs = [cell.run(seed, position) for seed in sweep.seeds]
            found = {run.seed: find(run) for run in runs}
            missing += [run for run in runs if found[run.seed] is None]
            done = [each for each in found.values() if each is not None]
            if done:
                tried[position] = done
            if len(done) == len(runs):
                scores[position] = fmean(each.score(study.score) for each in done)
        if missing:
            later = len(set(study.seeds) - set(sweep.seeds))
            return Plan(
                cell=cell, missing=missing, searching=True, later=later, sweep=tried, scores=scores
            )
    return _with_seeds(cell, study, find, best(scores), tried, scores)


def _with_seeds(
    cell: Cell,
    study: Study,
    find: Callable[[Run], Done | None],
    position: int | None,
    tried: dict[int, list[Done]],
    scores: dict[int, float],
) -> Plan:
    if cell.sweep is not None and position is None:  # nothing to repeat
        return Plan(cell=cell, missing=[], sweep=tried, scores=scores)
    runs = [cell.run(seed, position) for seed in study.seeds]
    found = {run.seed: find(run) for run in runs}
    return Plan(
        cell=cell,
        missing=[run for run in runs if found[run.seed] is None],
        sweep=tried,
        scores=scores,
        position=position,
        seeds=[done for done in found.values() if done is not None],
    )
