"""Norms of gradients, updates, parameters and activations, and the learning rate."""

from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flower_desloc.runs.loaded import Run, grouped
from flower_desloc.runs.figures.series import Curve, by_step, by_window, heldout, mean
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

_Panel = tuple[str, str, Callable[[Run], Mapping[str, Curve]]]

_PANELS: Sequence[_Panel] = (
    ("Gradient norm", "each step, before clipping", lambda run: by_step(run, "grad_norms")),
    ("Update norm", "|x_stop - x_start|, each window", lambda run: _moving(run)),
    ("Parameter norm", "|x_stop|, each window", lambda run: by_window(run, "param_norm")),
    (
        "Activation norm",
        "of the averaged model, held out",
        lambda run: {"": c} if (c := heldout(run, "activation_norm")) else {},
    ),
    ("Learning rate", "each step", lambda run: _one(by_step(run, "learning_rates"))),
)


def norms(runs: Sequence[Run]) -> Figure | None:
    """Draw the norms of a run by client, of several runs by their means over clients."""
    there = [each for each in _PANELS if any(each[2](run) for run in runs)]
    if not there:
        return None
    groups = grouped(runs)
    columns = 2 if len(there) in (2, 4) else min(3, len(there))
    rows = -(-len(there) // columns)
    made, panels = figure(rows, columns, 2.6 * rows + (0.3 if len(groups) > 1 else 0))
    for panel, (name, meaning, curves) in zip(panels, there, strict=False):
        clip = _clip(panel, runs) if name == "Gradient norm" else ""
        title(panel, name, meaning + clip)
        steps_axis(panel, runs)
        if len(runs) == 1:
            _of_one(panel, curves(runs[0]))
        else:
            for group in groups:
                averages = [mean(found.values()) for run in group.runs if (found := curves(run))]
                by_group(panel, group, averages, lw=1.3)
    for panel in panels[len(there) :]:
        panel.remove()
    if len(runs) > 1:
        legend(made, groups)
    return made


def _of_one(panel: Axes, curves: Mapping[str, Curve]) -> None:
    if len(curves) > 1:
        by_client(panel, curves, named=False)
    for curve in curves.values() if len(curves) == 1 else ():
        plot(panel, curve, INK, **(dots(curve) if len(curve.x) < 60 else {}))


def _clip(panel: Axes, runs: Sequence[Run]) -> str:
    """Draw the norm that gradients are clipped to; return words for it."""
    limits = {run.config.get("optimizer", {}).get("clip_norm") for run in runs}
    limit = limits.pop() if len(limits) == 1 else None
    if limit is None:
        return ""
    panel.axhline(limit, color=GREY, lw=1, ls=(0, (4, 2)))
    return f" to {limit:g} (dashed)"


def _moving(run: Run) -> Mapping[str, Curve]:
    # Where the server takes the steps, clients do not move.
    return {name: curve for name, curve in by_window(run, "update_norm").items() if curve.y.any()}


def _one(curves: Mapping[str, Curve]) -> Mapping[str, Curve]:
    # The learning rate is a function of the global step: all clients have the same.
    return {"": mean(curves.values())} if curves else {}
