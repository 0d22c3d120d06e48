"""Held-out quality against steps, bytes and time: what a method costs for what it learns."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flower_desloc.runs.loaded import Group, Run, grouped
from flower_desloc.runs.figures.series import Array, at, heldout, sent
from flower_desloc.runs.figures.style import (
    GREY,
    INK,
    by_group,
    dots,
    figure,
    legend,
    log_axis,
    log_scale,
    percent_axis,
    plot,
    short_bytes,
    steps_axis,
    title,
)
from flower_desloc.runs.report.time_model import DEFAULT_LINK, modelled
from flower_desloc.plan.wall_clock import Link

METRICS = {"perplexity": "Perplexity", "loss": "Loss", "accuracy": "Accuracy"}
"""Of the held-out text or images, in the order of the rows."""

_Cost = Callable[[Run, Array], Array]
"""What a run has cost by a step."""

_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


def held_out(runs: Sequence[Run], link: Link = DEFAULT_LINK) -> Figure | None:
    """Draw held-out metrics against local steps, bytes sent up, and modelled wall-clock."""
    groups = grouped(runs)
    metrics = [m for m in METRICS if any(heldout(run, m) for run in runs)]
    if not metrics:
        return None
    made, panels = figure(len(metrics), 3, 2.75 * len(metrics) + 0.3, sharey="row")
    seconds, unit = _unit(runs, link)
    for row, metric in enumerate(metrics):
        steps, sent_up, time = panels[3 * row : 3 * row + 3]
        _fill(steps, groups, metric, lambda _, x: x)
        _fill(sent_up, groups, metric, _spent)
        _fill(time, groups, metric, lambda run, x: _clock(run, x, link) / seconds)
        title(steps, METRICS[metric], "against local steps")
        title(sent_up, "", "against bytes sent by all clients")
        title(time, "", "against modelled wall-clock")
        steps_axis(steps, runs)
        _bytes(sent_up, runs)
        time.set_xlim(left=0)
        time.set_xlabel(unit, fontsize=9, color=INK)
        if metric == "accuracy":
            percent_axis(steps.yaxis)
        if metric == "perplexity":
            log_scale(steps, [heldout(run, metric) for run in runs])
    if len(groups) > 1:
        legend(made, groups)
    return made


def _fill(panel: Axes, groups: Sequence[Group], metric: str, cost: _Cost) -> None:
    if len(groups) == 1 and len(groups[0].runs) == 1:
        run = groups[0].runs[0]
        if run.where == "central" and (there := heldout(run, metric, "federated")):
            plot(panel, there.against(cost(run, there.x)), GREY, lw=1.2, ls=(0, (4, 2)))
        if here := heldout(run, metric):
            plot(panel, here.against(cost(run, here.x)), INK, lw=2, **dots(here))
        return
    for group in groups:
        runs = [run for run in group.runs if heldout(run, metric)]
        curves = [heldout(run, metric) for run in runs]
        if runs:
            by_group(panel, group, curves, partial(_mean_cost, cost, runs), **dots(curves[0]))


def _mean_cost(cost: _Cost, runs: Sequence[Run], steps: Array) -> Array:
    return np.asarray(np.mean([cost(run, steps) for run in runs], axis=0))


def _spent(run: Run, steps: Array) -> Array:
    """Return the bytes sent up by ``steps``; NaN for none, which has no place on a log axis."""
    count = at(sent(run), steps)
    return np.where(count > 0, count, np.nan)


def _bytes(panel: Axes, runs: Sequence[Run]) -> None:
    panel.set_xlabel("bytes", fontsize=9, color=INK)
    counts = np.concatenate([_spent(run, heldout(run, "loss").x) for run in runs])
    counts = counts[np.isfinite(counts)]
    if counts.size:
        log_axis(panel.xaxis, counts.min(), counts.max(), lambda count, _: short_bytes(count))


def _clock(run: Run, steps: Array, link: Link) -> Array:
    methods = modelled(run, link)
    return at(methods["this run"].course, steps) if methods else np.zeros(len(steps))


def _unit(runs: Sequence[Run], link: Link) -> tuple[int, str]:
    longest = max(m["this run"].total if (m := modelled(run, link)) else 0.0 for run in runs)
    return next(((s, name) for s, name in _UNITS if longest >= 2 * s), _UNITS[-1])
