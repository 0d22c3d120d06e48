"""Quantities of a run by step: training loss, norms, drift and rates of change."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flower_desloc.core.schedule import GRADIENTS
from flower_desloc.runs.figures import curves, style
from flower_desloc.runs.figures.curves import Curve, heldout, mean, reported
from flower_desloc.runs.groups import grouped
from flower_desloc.runs.record import RunRecord


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


def _of_clients(what: str) -> Callable[[RunRecord], Mapping[str, Curve]]:
    return lambda run: reported(run, what)


def _update_norms(run: RunRecord) -> Mapping[str, Curve]:
    # With data parallelism the server takes the steps, and clients report 0.
    return {name: norms for name, norms in reported(run, "update_norm").items() if norms.y.any()}


def _activation_norm(run: RunRecord) -> Mapping[str, Curve]:
    return {"": norm} if (norm := heldout(run, "activation_norm")) else {}


def _learning_rate(run: RunRecord) -> Mapping[str, Curve]:
    # All clients have the same: it is a function of the global step.
    return {"": rate} if (rate := mean(reported(run, "learning_rates").values())) else {}


def _of_streams(
    curve_of: Callable[[RunRecord, str], Curve],
) -> Callable[[RunRecord], Mapping[str, Curve]]:
    return lambda run: {s: curve for s in run.streams if (curve := curve_of(run, s))}


TRAINING_LOSS: Final = Measure(
    "Training loss", "of each client's own batches, each step", _of_clients("losses"), named=True
)
DRIFT: Final = Measure(
    "Drift between clients",
    "spread / |mean|, at each average",
    _of_streams(curves.drift),
    of_streams=True,
)
RATE_OF_CHANGE: Final = Measure(
    "Rate of change",
    "|mean - last mean| / |last mean|",
    _of_streams(curves.rate_of_change),
    of_streams=True,
)
GRADIENT_NORM: Final = Measure(
    "Gradient norm", "each step, before clipping", _of_clients("grad_norms")
)
NORMS: Final = (
    GRADIENT_NORM,
    Measure("Update norm", "|x_stop - x_start|, each window", _update_norms),
    Measure("Parameter norm", "|x_stop|, each window", _of_clients("param_norm")),
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
        return _draw(runs, measures, columns=2, height=3.4)
    # Only one method averages gradients, so there is nothing to compare them with.
    streams = [stream for stream in streams if stream != GRADIENTS] or streams
    panels = [_of_stream(measure, stream) for measure in measures for stream in streams]
    made = _draw(runs, panels, columns=len(streams), height=5.6)
    for panel, measure in zip(made.axes[:: len(streams)], measures, strict=True):
        panel.set_ylabel(f"{measure.title}\n{measure.meaning}")
    return made


def draw_norms(runs: Sequence[RunRecord]) -> Figure | None:
    """Draw the norms of one run by client, of several runs by their means over clients."""
    measures = [measure for measure in NORMS if any(measure.curves(run) for run in runs)]
    if not measures:
        return None
    columns = 2 if len(measures) in (2, 4) else min(3, len(measures))
    rows = -(-len(measures) // columns)
    height = 2.6 * rows + (0.3 if len(grouped(runs)) > 1 else 0)
    made = _draw(runs, measures, columns=columns, height=height)
    if GRADIENT_NORM in measures:
        _draw_clipping(made.axes[measures.index(GRADIENT_NORM)], runs)
    return made


def draw_training_loss(runs: Sequence[RunRecord]) -> Figure | None:
    """Draw the training loss of several runs, as the mean over clients."""
    if not any(TRAINING_LOSS.curves(run) for run in runs):
        return None
    measure = replace(TRAINING_LOSS, meaning="mean over clients, each step")
    return _draw(runs, [measure], columns=1, height=3.6)


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
        _fill_streams(panel, runs[0], found[runs[0].path])
    elif len(lines := found[runs[0].path]) > 1:
        style.by_client(panel, lines, named=measure.named)
    else:
        [line] = lines.values()
        style.plot(panel, line, style.INK, dots=True)


def _fill_streams(panel: Axes, run: RunRecord, lines: Mapping[str, Curve]) -> None:
    colours = style.stream_colours(run.streams)
    for stream, line in lines.items():
        style.plot(panel, line, colours[stream], dots=True)
    style.log_scale(panel, lines.values())
    style.label_right(panel, [style.Label(line.last, s, colours[s]) for s, line in lines.items()])


def _draw(
    runs: Sequence[RunRecord], measures: Sequence[Measure], *, columns: int, height: float
) -> Figure:
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


def _draw_clipping(panel: Axes, runs: Sequence[RunRecord]) -> None:
    """Draw the norm that gradients are clipped to, if it is common."""
    limits = {run.config.get("optimizer", {}).get("clip_norm") for run in runs}
    limit = limits.pop() if len(limits) == 1 else None
    if limit is not None:
        panel.axhline(limit, color=style.GREY, lw=1, ls=style.DASHED)
        panel.texts[0].set_text(f"{GRADIENT_NORM.meaning} to {limit:g} (dashed)")
