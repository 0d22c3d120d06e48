"""Norms of gradients, updates, parameters and activations, and the learning rate."""

from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flower_desloc.runs.figures.curves import Curve, by_step, by_window, heldout, mean
from flower_desloc.runs.figures.style import (
    GREY,
    INK,
    by_client,
    by_group,
    dots,
    figure,
    legend,
    plot,
    steps_axis,
    title,
)
from flower_desloc.runs.groups import grouped
from flower_desloc.runs.record import RunRecord

Curves = Mapping[str, Curve]


def _update_norms(run: RunRecord) -> Curves:
    # With data parallelism the server takes the steps, and clients report 0.
    return {name: curve for name, curve in by_window(run, "update_norm").items() if curve.y.any()}


def _activation_norm(run: RunRecord) -> Curves:
    return {"": curve} if (curve := heldout(run, "activation_norm")) else {}


def _learning_rate(run: RunRecord) -> Curves:
    # All clients have the same: it is a function of the global step.
    return {"": curve} if (curve := mean(by_step(run, "learning_rates").values())) else {}


_PANELS: Mapping[str, tuple[str, Callable[[RunRecord], Curves]]] = {
    "Gradient norm": ("each step, before clipping", lambda run: by_step(run, "grad_norms")),
    "Update norm": ("|x_stop - x_start|, each window", _update_norms),
    "Parameter norm": ("|x_stop|, each window", lambda run: by_window(run, "param_norm")),
    "Activation norm": ("of the averaged model, held out", _activation_norm),
    "Learning rate": ("each step", _learning_rate),
}


def draw_norms(runs: Sequence[RunRecord]) -> Figure | None:
    """Draw the norms of one run by client, of several runs by their means over clients."""
    names = [name for name, (_, curves) in _PANELS.items() if any(curves(run) for run in runs)]
    if not names:
        return None
    groups = grouped(runs)
    columns = 2 if len(names) in (2, 4) else min(3, len(names))
    rows = -(-len(names) // columns)
    made, panels = figure(rows, columns, 2.6 * rows + (0.3 if len(groups) > 1 else 0))
    for panel, name in zip(panels, names, strict=False):
        meaning, curves = _PANELS[name]
        clip = _clip(panel, runs) if name == "Gradient norm" else ""
        title(panel, name, meaning + clip)
        steps_axis(panel, runs)
        if len(runs) == 1:
            _by_client(panel, curves(runs[0]))
            continue
        for group in groups:
            averages = [mean(found.values()) for run in group.runs if (found := curves(run))]
            by_group(panel, group, averages, lw=1.3)
    for panel in panels[len(names) :]:
        panel.remove()
    if len(runs) > 1:
        legend(made, groups)
    return made


def _by_client(panel: Axes, curves: Curves) -> None:
    if len(curves) > 1:
        by_client(panel, curves, named=False)
        return
    for curve in curves.values():
        plot(panel, curve, INK, **dots(curve))


def _clip(panel: Axes, runs: Sequence[RunRecord]) -> str:
    """Draw the norm that gradients are clipped to, if it is common; return its caption."""
    limits = {run.config.get("optimizer", {}).get("clip_norm") for run in runs}
    limit = limits.pop() if len(limits) == 1 else None
    if limit is None:
        return ""
    panel.axhline(limit, color=GREY, lw=1, ls=(0, (4, 2)))
    return f" to {limit:g} (dashed)"
