"""Training and held-out losses by client and by domain."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flower_desloc.app.config.metric import metric_text
from flower_desloc.app.runs.figures import measures, style
from flower_desloc.app.runs.figures.curves import (
    common_metric,
    heldout,
    heldout_parts,
    mean,
    reported,
)
from flower_desloc.app.runs.groups import Spread, grouped
from flower_desloc.app.runs.record import RunRecord

KINDS = {"central": "domain", "federated": "client"}


def draw_losses(runs: Sequence[RunRecord]) -> Figure | None:
    """Draw the training loss of one run by client, and its held-out loss by domain.

    Of several runs, the training loss as the mean over clients.
    """
    trained = any(measures.TRAINING_LOSS.curves(run) for run in runs)
    if len(runs) > 1:
        measure = replace(measures.TRAINING_LOSS, meaning="mean over clients, each step")
        return measures.draw(runs, [measure], columns=1, height=3.6) if trained else None
    (run,) = runs
    domains = bool(heldout_parts(run, "loss", "central"))
    if not trained and not domains:
        return None
    made, panels = style.figure(1, trained + domains, 3.5)
    if trained:
        measures.fill(panels[0], runs, measures.TRAINING_LOSS)
    if domains:
        fill_heldout_loss(panels[-1], run)
    return made


def fill_heldout_loss(panel: Axes, run: RunRecord) -> None:
    """Draw the held-out loss of the averaged model by domain; by client, if only clients have it.

    The mean training loss is a grey line.
    """
    style.title(panel, "Held-out loss", f"of the averaged model, by {KINDS[run.where]}")
    style.steps_axis(panel, [run])
    parts, overall = heldout_parts(run, "loss", run.where), heldout(run, "loss")
    if not overall and not parts:
        style.empty(panel, "not evaluated")
        return
    labels = []
    if training := mean(reported(run, "losses").values()).thinned():
        style.plot(panel, training, style.FAINT, lw=1, zorder=0)
        labels.append(style.Label(training.last, "training", style.GREY))
    colours = style.part_colours([*parts])
    few = len(parts) <= len(style.PARTS)
    for name, curve in parts.items():
        style.plot(panel, curve, colours[name], lw=1.2 if few else 0.6)
        if few:
            labels.append(style.Label(curve.last, name, colours[name]))
    if overall:
        style.plot(panel, overall, style.INK, lw=2, dots=True)
        accuracy = run.final("accuracy")
        more = "" if accuracy is None else f", {metric_text(accuracy, 'accuracy')} right"
        text = f"all {overall.last[1]:.3f}{more}"
        labels.append(style.Label(overall.last, text, style.INK, bold=True))
    style.label_right(panel, labels)


def draw_parts(runs: Sequence[RunRecord]) -> Figure | None:
    """Draw the final held-out loss, or accuracy, of each domain and each client, worst on top."""
    groups = grouped(runs)
    metric = common_metric(runs)
    ranks = {kind: ranked for kind in KINDS if (ranked := worst_first(runs, kind, metric))}
    if not ranks:
        return None
    rows = max(3, *map(len, ranks.values()))
    height = min(6, 1.4 + (0.2 + 0.06 * len(groups)) * rows)
    made, panels = style.figure(1, len(ranks), height)
    alone = len(groups) == 1
    for panel, (kind, ranked) in zip(panels, ranks.items(), strict=True):
        few = len(ranked) <= style.MAX_NAMES
        style.title(panel, f"By {KINDS[kind]}", f"final held-out {metric}; dashed: of all data")
        for index, group in enumerate(groups):
            offset = 0.5 * ((index + 0.5) / len(groups) - 0.5)
            overall = [c.last[1] for run in group.runs if (c := heldout(run, metric, kind))]
            if overall:
                colour = style.GREY if alone else group.colour
                panel.axvline(fmean(overall), color=colour, lw=1, ls=style.DASHED, alpha=0.8)
            parts = [heldout_parts(run, metric, kind) for run in group.runs]
            for row, name in enumerate(ranked):
                spread = Spread.of(curves[name].last[1] for curves in parts if name in curves)
                if spread.mean is None:
                    continue
                panel.errorbar(
                    spread.mean, row + offset, xerr=spread.std or None, fmt="o", elinewidth=1,
                    color=style.INK if alone else group.colour, ms=5 if few else 3, zorder=3,
                )  # fmt: skip
                if few:
                    panel.axhline(row, color=style.FAINT, lw=0.8, zorder=0)
                if few and alone:
                    style.aside(panel, row, metric_text(spread.mean, metric))
        style.rows_axis(panel, [*ranked])
        panel.margins(x=0.08)
        panel.set_xlabel(metric)
        if metric == "accuracy":
            panel.xaxis.set_major_formatter(style.percent_tick)
    style.legend(made, groups)
    return made


def worst_first(runs: Sequence[RunRecord], kind: str, metric: str) -> dict[str, float]:
    """Return the final value of each domain or client, as the mean over the runs that have it."""
    values: dict[str, list[float]] = {}
    for run in runs:
        for name, curve in heldout_parts(run, metric, kind).items():
            values.setdefault(name, []).append(curve.last[1])
    means = {name: fmean(each) for name, each in values.items()}
    return dict(sorted(means.items(), key=lambda item: item[1], reverse=metric == "loss"))
