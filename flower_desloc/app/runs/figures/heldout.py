"""Held-out metrics against steps, bytes and time."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flower_desloc.app.config.metric import DIRECTIONS, ordered
from flower_desloc.app.plan.wall_clock import REPORTED, Link
from flower_desloc.app.runs.figures import style
from flower_desloc.app.runs.figures.curves import Array, Curve, at, heldout, sent
from flower_desloc.app.runs.groups import SeedGroup, grouped
from flower_desloc.app.runs.record import RunRecord
from flower_desloc.app.runs.time_model import modelled

_TITLES = {"perplexity": "Perplexity", "loss": "Loss", "accuracy": "Accuracy"}

Cost = Callable[[RunRecord, Array], Array]
"""Cost of a run up to each of the given steps."""

_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


def draw_heldout(runs: Sequence[RunRecord], link: Link = REPORTED) -> Figure | None:
    """Draw held-out metrics against local steps, bytes sent up, and modelled wall-clock."""
    groups = grouped(runs)
    names = {name for run in runs for name in run.summary["evaluation"].get(run.where, {})}
    shown = [*_TITLES, *(name for name in ordered(sorted(names)) if name not in DIRECTIONS)]
    metrics = [m for m in shown if any(heldout(run, m) for run in runs)]
    if not metrics:
        return None
    made, panels = style.figure(len(metrics), 3, 2.75 * len(metrics) + 0.3, sharey="row")
    times = {run.path: _time(run, link) for run in runs}
    longest = max(float(time.y[-1]) for time in times.values())
    seconds, unit = next((u for u in _UNITS if longest >= 2 * u[0]), _UNITS[-1])
    both = len(runs) == 1 and runs[0].summary["evaluation"].keys() >= {"central", "federated"}
    dashed = "; dashed: on the clients' data" if both else ""
    for row, metric in enumerate(metrics):
        steps, sent_up, time = panels[3 * row : 3 * row + 3]
        _draw(steps, groups, metric, lambda _, x: x)
        _draw(sent_up, groups, metric, _bytes_sent)
        _draw(time, groups, metric, lambda run, x: at(times[run.path], x) / seconds)
        style.title(steps, _TITLES.get(metric, metric), f"against local steps{dashed}")
        style.title(sent_up, "", "against bytes sent by all clients")
        style.title(time, "", "against modelled wall-clock")
        style.steps_axis(steps, runs)
        sent_up.set_xlabel("bytes, logarithmic, without step 0")
        counts = np.concatenate([_bytes_sent(run, heldout(run, metric).x) for run in runs])
        counts = counts[np.isfinite(counts)]
        if counts.size:
            style.log_axis(sent_up.xaxis, counts.min(), counts.max(), style.bytes_tick)
        time.set_xlim(left=0)
        time.set_xlabel(unit)
        if metric == "accuracy":
            steps.yaxis.set_major_formatter(style.percent_tick)
        if metric == "perplexity":
            style.log_scale(steps, [heldout(run, metric) for run in runs])
    style.legend(made, groups)
    return made


def _draw(panel: Axes, groups: Sequence[SeedGroup], metric: str, cost: Cost) -> None:
    if len(groups) == 1 and len(groups[0].runs) == 1:
        run = groups[0].runs[0]
        if run.where == "central" and (on_clients := heldout(run, metric, "federated")):
            on_clients = Curve(cost(run, on_clients.x), on_clients.y)
            style.plot(panel, on_clients, style.GREY, lw=1.2, ls=style.DASHED)
        if curve := heldout(run, metric):
            style.plot(panel, Curve(cost(run, curve.x), curve.y), style.INK, lw=2, dots=True)
        return
    for group in groups:
        if runs := [run for run in group.runs if heldout(run, metric)]:
            curves = [heldout(run, metric) for run in runs]

            def mean_cost(steps: Array, runs: Sequence[RunRecord] = runs) -> Array:
                return np.asarray(np.mean([cost(run, steps) for run in runs], axis=0))

            style.by_group(panel, group, curves, mean_cost, dots=True)


def _bytes_sent(run: RunRecord, steps: Array) -> Array:
    """Return the bytes sent up by ``steps``; NaN for zero, which has no place on a log axis."""
    count = at(sent(run), steps)
    return np.where(count > 0, count, np.nan)


def _time(run: RunRecord, link: Link) -> Curve:
    methods = modelled(run, link)
    if not methods:
        return Curve(np.zeros(1), np.zeros(1))
    return Curve(np.array(methods["this run"].steps), np.array(methods["this run"].seconds))
