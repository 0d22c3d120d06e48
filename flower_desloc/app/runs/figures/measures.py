"""Quantities of a run by step: training loss, norms, drift and rates of change."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flower_desloc.app.runs.figures import style
from flower_desloc.app.runs.figures.curves import (
    Curve,
    drift,
    heldout,
    mean,
    rate_of_change,
    reported,
)
from flower_desloc.app.runs.groups import grouped
from flower_desloc.app.runs.record import RunRecord
from flower_desloc.core.schedule import GRADIENTS


@dataclass(frozen=True)
class Measure:
    """Content of one panel. Several runs are compared by their means over the curves."""

    title: str
    meaning: str
    curves: Callable[[RunRecord], Mapping[str, Curve]]
    """The curves of a run by client or by stream, or a single one."""
    of_streams: bool = False
    """True if there is one curve for each stream, on a logarithmic axis."""
    named: bool = False
    """True if the lines of clients are labelled."""


def _update_norms(run: RunRecord) -> Mapping[str, Curve]:
    # With data parallelism the server takes the steps, and clients report 0.
    return {name: norms for name, norms in reported(run, "update_norm").items() if norms.y.any()}


def _activation_norm(run: RunRecord) -> Mapping[str, Curve]:
    return {"": norm} if (norm := heldout(run, "activation_norm")) else {}


def _learning_rate(run: RunRecord) -> Mapping[str, Curve]:
    # All clients have the same: it is a function of the global step.
    return {"": rate} if (rate := mean(reported(run, "learning_rates").values())) else {}


TRAINING_LOSS: Final = Measure(
    "Training loss",
    "of each client's own batches, each step",
    partial(reported, what="losses"),
    named=True,
)
DRIFT: Final = Measure(
    "Drift between clients",
    "spread / |mean|; of M unrelated clients \N{SQUARE ROOT}(M - 1)",
    drift,
    of_streams=True,
)
RATE_OF_CHANGE: Final = Measure(
    "Rate of change", "|mean - last mean| / |last mean|", rate_of_change, of_streams=True
)
GRADIENT_NORM: Final = Measure(
    "Gradient norm", "each step, before clipping", partial(reported, what="grad_norms")
)
NORMS: Final = (
    GRADIENT_NORM,
    Measure("Update norm", "of the parameters' change in each window", _update_norms),
    Measure("Parameter norm", "after each window", partial(reported, what="param_norm")),
    Measure("Activation norm", "of the averaged model, held out", _activation_norm),
    Measure("Learning rate", "each step", _learning_rate),
)


def draw_drift(runs: Sequence[RunRecord]) -> Figure | None:
    """Draw relative drift and relative rate of change at each average, on log axes."""
    streams = [*dict.fromkeys(stream for run in runs for stream in DRIFT.curves(run))]
    if not streams:
        return None
    measures = (DRIFT, RATE_OF_CHANGE)
    if len(runs) == 1:
        return draw(runs, measures, columns=2, height=3.4)
    # Only one method averages gradients, so there is nothing to compare them with.
    streams = [stream for stream in streams if stream != GRADIENTS] or streams
    panels = [_of_stream(measure, stream) for measure in measures for stream in streams]
    made = draw(runs, panels, columns=len(streams), height=5.6)
    for panel, measure in zip(made.axes[:: len(streams)], measures, strict=True):
        panel.set_ylabel(f"{measure.title}\n{measure.meaning.partition(';')[0]}")
    return made


def draw_norms(runs: Sequence[RunRecord]) -> Figure | None:
    """Draw the norms of one run by client, of several runs by their means over clients."""
    measures = [measure for measure in NORMS if any(measure.curves(run) for run in runs)]
    if not measures:
        return None
    columns = 2 if len(measures) in (2, 4) else min(3, len(measures))
    rows = -(-len(measures) // columns)
    clients = runs[0].clients if len(runs) == 1 else []
    named = 1 < len(clients) <= style.MAX_LINES
    height = 2.6 * rows + (0.3 if named or len(grouped(runs)) > 1 else 0)
    made = draw(runs, measures, columns=columns, height=height)
    if named:
        colours = {"mean": style.INK, **style.part_colours(clients)}
        style.name_colours(made, [*colours.items()])
    clipped_to = {run.config.get("optimizer", {}).get("clip_norm") for run in runs}
    if GRADIENT_NORM in measures and len(clipped_to) == 1 and (limit := clipped_to.pop()):
        panel = made.axes[measures.index(GRADIENT_NORM)]
        panel.axhline(limit, color=style.GREY, lw=1, ls=style.DASHED)
        panel.texts[0].set_text(f"{GRADIENT_NORM.meaning} to {limit:g} (dashed)")
    return made


def fill(panel: Axes, runs: Sequence[RunRecord], measure: Measure) -> None:
    """Draw a measure of one run by client or stream, of several runs by group."""
    style.title(panel, measure.title, measure.meaning)
    style.steps_axis(panel, runs)
    found = {run.path: lines for run in runs if (lines := measure.curves(run))}
    if not found:
        style.empty(panel, "not enough averages")
    elif len(runs) > 1:
        for group in grouped(runs):
            means = [mean(found[run.path].values()) for run in group.runs if run.path in found]
            style.by_group(panel, group, means, lw=1.3, dots=measure.of_streams)
        if measure.of_streams:
            style.log_scale(panel, [line for lines in found.values() for line in lines.values()])
    elif measure.of_streams:
        lines, colours = found[runs[0].path], style.stream_colours(runs[0].streams, runs[0].kinds)
        for stream, line in lines.items():
            style.plot(panel, line, colours[stream], dots=True)
        style.log_scale(panel, lines.values())
        style.label_right(
            panel, [style.Label(line.last, s, colours[s]) for s, line in lines.items()]
        )
    elif len(lines := found[runs[0].path]) > 1:
        colours = style.part_colours(runs[0].clients)
        style.by_client(panel, lines, colours, named=measure.named)
    else:
        [line] = lines.values()
        style.plot(panel, line, style.INK, dots=True)


def draw(
    runs: Sequence[RunRecord], measures: Sequence[Measure], *, columns: int, height: float
) -> Figure:
    """Draw each measure into a panel."""
    made, panels = style.figure(-(-len(measures) // columns), columns, height)
    for panel, measure in zip(panels, measures, strict=False):
        fill(panel, runs, measure)
    for panel in panels[len(measures) :]:
        panel.remove()
    style.legend(made, grouped(runs))
    return made


def _of_stream(measure: Measure, stream: str) -> Measure:
    def only(run: RunRecord) -> Mapping[str, Curve]:
        return {name: curve for name, curve in measure.curves(run).items() if name == stream}

    return replace(measure, title=stream, meaning="", curves=only)
