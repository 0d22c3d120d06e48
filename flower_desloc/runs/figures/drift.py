"""Drift between the clients and rates of change, by stream."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flower_desloc.core.schedule import GRADIENTS
from flower_desloc.runs.figures.curves import Curve, drift, rate_of_change
from flower_desloc.runs.figures.style import (
    INK,
    TEXT_SIZE,
    Label,
    beside,
    by_group,
    dots,
    empty,
    figure,
    legend,
    log_scale,
    plot,
    steps_axis,
    stream_colours,
    title,
)
from flower_desloc.runs.groups import grouped
from flower_desloc.runs.record import RunRecord

Measure = Callable[[RunRecord, str], Curve]

DRIFT = "Drift between clients"
MEASURES: dict[str, tuple[str, Measure]] = {
    DRIFT: ("spread / |mean|, at each average", drift),
    "Rate of change": ("|mean - last mean| / |last mean|", rate_of_change),
}


def draw_drift(runs: Sequence[RunRecord]) -> Figure | None:
    """Draw relative drift and relative rate of change at each average, on log axes."""
    streams = [*dict.fromkeys(s for run in runs for s in run.streams if drift(run, s))]
    if not streams:
        return None
    if len(runs) == 1:
        made, panels = figure(1, 2, 3.4)
        for panel, name in zip(panels, MEASURES, strict=True):
            fill_measure(panel, runs[0], name)
        return made
    # Only one method averages gradients, so there is nothing to compare them with.
    return _compared(runs, [s for s in streams if s != GRADIENTS] or streams)


def fill_measure(panel: Axes, run: RunRecord, name: str = DRIFT) -> None:
    """Draw one of the measures of one run, a line for each stream."""
    meaning, measure = MEASURES[name]
    title(panel, name, meaning)
    steps_axis(panel, [run])
    colours = stream_colours(run.streams)
    curves = {stream: curve for stream in run.streams if (curve := measure(run, stream))}
    if not curves:
        empty(panel, "not enough averages")
        return
    for stream, curve in curves.items():
        plot(panel, curve, colours[stream], **dots(curve))
    log_scale(panel, curves.values())
    beside(panel, [Label(curve.last, s, colours[s]) for s, curve in curves.items()])


def _compared(runs: Sequence[RunRecord], streams: Sequence[str]) -> Figure:
    groups = grouped(runs)
    made, panels = figure(2, len(streams), 5.6)
    places = [(name, stream) for name in MEASURES for stream in streams]
    for panel, (name, stream) in zip(panels, places, strict=True):
        meaning, measure = MEASURES[name]
        title(panel, stream)
        if stream == streams[0]:
            panel.set_ylabel(f"{name}\n{meaning}", fontsize=TEXT_SIZE, color=INK)
        steps_axis(panel, runs)
        drawn = []
        for group in groups:
            if curves := [curve for run in group.runs if (curve := measure(run, stream))]:
                by_group(panel, group, curves, **dots(curves[0]))
                drawn += curves
        if drawn:
            log_scale(panel, drawn)
        else:
            empty(panel, "not enough averages")
    legend(made, groups)
    return made
