"""Training and held-out losses by client and by domain."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flower_desloc.runs.figures.curves import (
    by_step,
    common_metric,
    heldout,
    heldout_parts,
    mean,
    metric_text,
)
from flower_desloc.runs.figures.style import (
    FAINT,
    GREY,
    GRID,
    INK,
    MAX_NAMES,
    PARTS,
    TEXT_SIZE,
    Label,
    aside,
    beside,
    by_client,
    by_group,
    dots,
    empty,
    figure,
    legend,
    part_colours,
    percent_axis,
    plot,
    rows_axis,
    steps_axis,
    title,
)
from flower_desloc.runs.groups import SeedGroup, Spread, grouped
from flower_desloc.runs.record import RunRecord

_KINDS = {"central": "domain", "federated": "client"}


def draw_losses(runs: Sequence[RunRecord]) -> Figure | None:
    """Draw the training loss of one run by client, and its held-out loss by domain.

    Of several runs, the training loss as the mean over clients.
    """
    if len(runs) > 1:
        return _compared(runs)
    (run,) = runs
    losses = by_step(run, "losses")
    domains = bool(heldout_parts(run, "loss", "central"))
    if not losses and not domains:
        return None
    made, panels = figure(1, bool(losses) + domains, 3.5)
    if losses:
        title(panels[0], "Training loss", "of each client's own batches, each step")
        steps_axis(panels[0], [run])
        by_client(panels[0], losses)
    if domains:
        fill_heldout_loss(panels[-1], run)
    return made


def fill_heldout_loss(panel: Axes, run: RunRecord) -> None:
    """Draw the held-out loss of the averaged model by domain; by client, if only clients have it.

    The mean training loss is a grey line.
    """
    title(panel, "Held-out loss", f"of the averaged model, by {_KINDS[run.where]}")
    steps_axis(panel, [run])
    parts, overall = heldout_parts(run, "loss", run.where), heldout(run, "loss")
    if not overall and not parts:
        empty(panel, "not evaluated")
        return
    labels = []
    if training := mean(by_step(run, "losses").values()).thinned():
        plot(panel, training, FAINT, lw=1, zorder=0)
        labels.append(Label(training.last, "training", GREY))
    colours = part_colours([*parts])
    for name, curve in parts.items():
        plot(panel, curve, colours[name], lw=1.2 if len(parts) <= len(PARTS) else 0.6)
        if len(parts) <= len(PARTS):
            labels.append(Label(curve.last, name, colours[name]))
    if overall:
        plot(panel, overall, INK, lw=2, **dots(overall))
        accuracy = run.final("accuracy")
        more = "" if accuracy is None else f", {metric_text(accuracy, 'accuracy')} right"
        labels.append(Label(overall.last, f"all {overall.last[1]:.3f}{more}", INK, bold=True))
    beside(panel, labels)


def _compared(runs: Sequence[RunRecord]) -> Figure | None:
    losses = {run.path: mean(by_step(run, "losses").values()) for run in runs}
    if not any(losses.values()):
        return None
    made, (panel,) = figure(1, 1, 3.6)
    title(panel, "Training loss", "mean over clients, each step")
    steps_axis(panel, runs)
    groups = grouped(runs)
    for group in groups:
        by_group(panel, group, [losses[run.path] for run in group.runs], lw=1.2)
    legend(made, groups)
    return made


def draw_parts(runs: Sequence[RunRecord]) -> Figure | None:
    """Draw the final held-out loss, or accuracy, of each domain and each client, worst on top."""
    groups = grouped(runs)
    metric = common_metric(runs)
    finals = {kind: found for kind in _KINDS if (found := final_values(runs, kind, metric))}
    if not finals:
        return None
    rows = max(3, *map(len, finals.values()))
    made, panels = figure(1, len(finals), min(6, 1.4 + (0.2 + 0.06 * len(groups)) * rows))
    for panel, (kind, values) in zip(panels, finals.items(), strict=True):
        title(panel, f"By {_KINDS[kind]}", f"final held-out {metric}")
        names = sorted(values, key=values.__getitem__, reverse=metric == "loss")
        for index, group in enumerate(groups):
            offset = 0.5 * ((index + 0.5) / len(groups) - 0.5)
            _dots(panel, group, names, kind, metric, offset, alone=len(groups) == 1)
        rows_axis(panel, names)
        panel.margins(x=0.08)
        panel.set_xlabel(metric, fontsize=TEXT_SIZE, color=INK)
        if metric == "accuracy":
            percent_axis(panel.xaxis)
        panel.grid(visible=True, axis="x", color=GRID, lw=0.8)
    if len(groups) > 1:
        legend(made, groups)
    return made


def _dots(
    panel: Axes,
    group: SeedGroup,
    names: Sequence[str],
    kind: str,
    metric: str,
    offset: float,
    *,
    alone: bool,
) -> None:
    few = len(names) <= MAX_NAMES
    overall = Spread.of(c.last[1] for run in group.runs if (c := heldout(run, metric, kind)))
    if overall.mean is not None:
        colour = GREY if alone else group.colour
        panel.axvline(overall.mean, color=colour, lw=1, ls=(0, (4, 2)), alpha=0.8)
    parts = [heldout_parts(run, metric, kind) for run in group.runs]
    for row, name in enumerate(names):
        spread = Spread.of(curves[name].last[1] for curves in parts if name in curves)
        if spread.mean is None:
            continue
        panel.errorbar(
            spread.mean, row + offset, xerr=spread.std or None, fmt="o",
            color=INK if alone else group.colour, ms=5 if few else 3, elinewidth=1, zorder=3,
        )  # fmt: skip
        if few:
            panel.axhline(row, color=FAINT, lw=0.8, zorder=0)
        if few and alone:
            aside(panel, row, metric_text(spread.mean, metric))


def final_values(runs: Sequence[RunRecord], kind: str, metric: str) -> dict[str, float]:
    """Return the final value of each domain or client, as the mean over the runs that have it."""
    values: dict[str, list[float]] = {}
    for run in runs:
        for name, curve in heldout_parts(run, metric, kind).items():
            values.setdefault(name, []).append(curve.last[1])
    return {name: sum(each) / len(each) for name, each in values.items()}
