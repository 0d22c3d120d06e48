"""Losses by client and by domain, and who holds what: whom the average serves."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flower_desloc.runs.figures.labels import Label
from flower_desloc.runs.units import size_text
from flower_desloc.runs.loaded import Group, Run, Spread, grouped
from flower_desloc.runs.figures.series import Curve, by_step, heldout, heldout_parts, mean, measure, told
from flower_desloc.runs.figures.style import (
    FAINT,
    GREY,
    INK,
    NAMED,
    PARTS,
    beside,
    by_client,
    by_group,
    dots,
    figure,
    legend,
    part_colours,
    percent_axis,
    plot,
    rows_axis,
    steps_axis,
    title,
)

_KINDS = {"central": "domain", "federated": "client"}


def training_loss(runs: Sequence[Run]) -> Figure | None:
    """Draw the training loss of one run by client and its held-out loss by domain.

    Of several runs, the training loss as the mean over clients.
    """
    if len(runs) > 1:
        return _training_of_many(grouped(runs))
    (run,) = runs
    losses = by_step(run, "losses")
    parts = heldout_parts(run, "loss", "central")
    there = bool(losses) + bool(parts)
    if not there:
        return None
    made, panels = figure(1, there, 3.5)
    if losses:
        panel = panels.pop(0)
        title(panel, "Training loss", "of each client's own batches, each step")
        steps_axis(panel, [run])
        by_client(panel, losses)
    if parts:
        panel = panels.pop(0)
        title(panel, "Held-out loss", "of the averaged model, by domain")
        steps_axis(panel, [run])
        _domains(panel, parts, heldout(run, "loss", "central"))
    return made


def _domains(panel: Axes, parts: Mapping[str, Curve], overall: Curve) -> None:
    if len(parts) > len(PARTS):
        by_client(panel, parts, average="mean")
        return
    colours = part_colours(sorted(parts, key=_label_order))  # as in the figure of who holds what
    labels = []
    for name, curve in parts.items():
        plot(panel, curve, colours[name], lw=1.2, **dots(curve))
        labels.append(Label(curve.last, name, colours[name]))
    if overall:
        plot(panel, overall, INK, lw=2)
        labels.append(Label(overall.last, "all", INK, bold=True))
    beside(panel, labels)


def _training_of_many(groups: Sequence[Group]) -> Figure | None:
    curves = {
        group.label: [
            mean(losses.values()) for run in group.runs if (losses := by_step(run, "losses"))
        ]
        for group in groups
    }
    if not any(curves.values()):
        return None
    made, (panel,) = figure(1, 1, 3.6)
    title(panel, "Training loss", "mean over clients, each step")
    steps_axis(panel, [run for group in groups for run in group.runs])
    for group in groups:
        by_group(panel, group, curves[group.label], lw=1.2)
    legend(made, groups)
    return made


def final_parts(runs: Sequence[Run]) -> Figure | None:
    """Draw the final held-out loss of each domain and each client, the worst on top.

    The accuracy, where there is one.
    """
    groups = grouped(runs)
    metric = measure(runs)
    kinds = [kind for kind in _KINDS if _finals(runs, kind, metric)]
    if not kinds:
        return None
    most = max(len(_finals(runs, kind, metric)) for kind in kinds)
    made, panels = figure(1, len(kinds), min(6, 1.4 + (0.2 + 0.06 * len(groups)) * max(3, most)))
    for panel, kind in zip(panels, kinds, strict=True):
        title(panel, f"By {_KINDS[kind]}", f"final held-out {metric}")
        _dots(panel, groups, kind, metric)
    if len(groups) > 1:
        legend(made, groups)
    return made


def _dots(panel: Axes, groups: Sequence[Group], kind: str, metric: str) -> None:
    runs = [run for group in groups for run in group.runs]
    finals = _finals(runs, kind, metric)
    names = sorted(finals, key=finals.__getitem__, reverse=metric == "loss")
    for row in range(len(names)) if len(names) <= NAMED else ():
        panel.axhline(row, color=FAINT, lw=0.8, zorder=0)
    one = len(groups) == 1
    for index, group in enumerate(groups):
        offset = 0.0 if one else 0.5 * ((index + 0.5) / len(groups) - 0.5)
        colour = INK if one else group.colour
        overall = Spread.of(
            curve.last[1] for run in group.runs if (curve := heldout(run, metric, kind))
        )
        if overall.mean is not None:
            panel.axvline(
                overall.mean, color=GREY if one else colour, lw=1, ls=(0, (4, 2)), alpha=0.8
            )
        for row, name in enumerate(names):
            spread = Spread.of(
                parts[name].last[1]
                for run in group.runs
                if name in (parts := heldout_parts(run, metric, kind))
            )
            if spread.mean is not None:
                panel.errorbar(
                    spread.mean, row + offset, xerr=spread.std or None, fmt="o", color=colour,
                    ms=5 if len(names) <= NAMED else 3, elinewidth=1, zorder=3,
                )  # fmt: skip
            if spread.mean is not None and one and len(names) <= NAMED:
                panel.annotate(
                    told(spread.mean, metric), (1.02, row), xycoords=("axes fraction", "data"),
                    va="center", fontsize=9, color=INK,
                )  # fmt: skip
    rows_axis(panel, names)
    low, high = panel.get_xlim()
    panel.set_xlim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    panel.set_xlabel(metric, fontsize=9, color=INK)
    if metric == "accuracy":
        percent_axis(panel.xaxis)
    panel.grid(visible=True, axis="x", color="#EDEDED", lw=0.8)


def _finals(runs: Sequence[Run], kind: str, metric: str) -> dict[str, float]:
    """Return the final value of each part, over the runs that have it."""
    values: dict[str, list[float]] = {}
    for run in runs:
        for name, curve in heldout_parts(run, metric, kind).items():
            values.setdefault(name, []).append(curve.last[1])
    return {name: sum(each) / len(each) for name, each in values.items()}


def shares(run: Run) -> Figure | None:
    """Draw what each client holds, by domain or label, as shares of its own data."""
    held = run.client_data
    if not held:
        return None
    totals: dict[str, int] = {}
    for parts in held.values():
        for part, size in parts.items():
            totals[part] = totals.get(part, 0) + size
    named = sorted(sorted(totals, key=lambda part: -totals[part])[: len(PARTS)], key=_label_order)
    made, (panel,) = figure(1, 1, min(6.5, 0.9 + 0.27 * max(2, len(held))))
    rows = np.arange(len(held))
    left = np.zeros(len(held))
    sums = np.array([max(1, sum(parts.values())) for parts in held.values()])
    columns = [(part, colour, [part]) for part, colour in part_colours(named).items()]
    if rest := [part for part in totals if part not in named]:
        columns.append(("others", FAINT, rest))
    for part, colour, members in columns:
        sizes = np.array([sum(parts.get(m, 0) for m in members) for parts in held.values()])
        panel.barh(rows, sizes / sums, left=left, height=0.72, color=colour, lw=0, label=part)
        left += sizes / sums
    for row, total in enumerate(sums) if len(held) <= NAMED else ():
        panel.annotate(
            size_text(int(total), run.task), (1.01, row),
            va="center", fontsize=9, color=INK, annotation_clip=False,
        )  # fmt: skip
    panel.set_xlim(0, 1)
    percent_axis(panel.xaxis)
    rows_axis(panel, list(held))
    panel.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=min(7, len(columns)), frameon=False,
        fontsize=9, labelcolor=INK, handlelength=1, handleheight=1, borderaxespad=0.2,
    )  # fmt: skip
    return made


def _label_order(part: str) -> tuple[bool, int, str]:
    """Return a key that sorts labels by number and names by letter."""
    return (not part.isdigit(), int(part) if part.isdigit() else 0, part)
