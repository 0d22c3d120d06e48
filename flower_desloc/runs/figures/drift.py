"""Drift between the clients and rates of change, by stream: the paper's first question."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flower_desloc.runs.figures.labels import Label
from flower_desloc.runs.loaded import Group, Run, grouped
from flower_desloc.runs.figures.series import Curve, drift, rate_of_change
from flower_desloc.runs.figures.style import (
    INK,
    beside,
    by_group,
    dots,
    figure,
    legend,
    log_scale,
    plot,
    steps_axis,
    stream_colours,
    title,
)
from flower_desloc.core.schedule import GRADIENTS

_MEASURES: dict[str, tuple[str, Callable[[Run, str], Curve]]] = {
    "Drift between clients": ("spread / |mean|", drift),
    "Rate of change": ("|mean - last mean| / |last mean|", rate_of_change),
}


def drifts(runs: Sequence[Run]) -> Figure | None:
    """Draw relative drift and relative rate of change at each average, on log axes."""
    if not any(drift(run, stream) for run in runs for stream in run.streams):
        return None
    groups = grouped(runs)
    return _of_one(runs[0]) if len(runs) == 1 else _of_many(groups)


def _of_one(run: Run) -> Figure:
    made, panels = figure(1, 2, 3.4)
    colours = stream_colours(run.streams)
    for panel, (name, (meaning, measure)) in zip(panels, _MEASURES.items(), strict=True):
        title(panel, name, meaning)
        steps_axis(panel, [run])
        curves = {stream: curve for stream in run.streams if (curve := measure(run, stream))}
        if not curves:
            _empty(panel, "averaged once at most")
            continue
        for stream, curve in curves.items():
            plot(panel, curve, colours[stream], **dots(curve))
        log_scale(panel, curves.values())
        beside(panel, [Label(curve.last, s, colours[s]) for s, curve in curves.items()])
    return made


def _of_many(groups: Sequence[Group]) -> Figure:
    runs = [run for group in groups for run in group.runs]
    drifting = dict.fromkeys(s for run in runs for s in run.streams if drift(run, s))
    # Gradients are averaged by one method only: there is nothing to compare them with.
    streams = [stream for stream in drifting if stream != GRADIENTS] or [*drifting]
    made, panels = figure(2, len(streams), 5.6)
    for index, panel in enumerate(panels):
        name, (meaning, measure) = list(_MEASURES.items())[index // len(streams)]
        stream = streams[index % len(streams)]
        title(panel, stream)
        if index % len(streams) == 0:
            panel.set_ylabel(f"{name}\n{meaning}", fontsize=9, color=INK)
        steps_axis(panel, runs)
        everything = []
        for group in groups:
            curves = [curve for run in group.runs if (curve := measure(run, stream))]
            everything += curves
            if curves:
                by_group(panel, group, curves, **dots(curves[0]))
        if everything:
            log_scale(panel, everything)
        else:
            _empty(panel, "averaged once at most")
    legend(made, groups)
    return made


def _empty(panel: Axes, text: str) -> None:
    panel.text(0.5, 0.5, text, transform=panel.transAxes, ha="center", fontsize=9, color="#7A7A7A")
    panel.set_yticks([])
