"""``overview.png``: what a run learned, what it sent, when it averaged, how far clients drifted."""

import json
import math
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FuncFormatter,
    Locator,
    LogLocator,
    MaxNLocator,
    MultipleLocator,
    NullFormatter,
)

from flower_desloc.runs.folder import RunFolder
from flower_desloc.runs.figures.labels import Label, beside, named
from flower_desloc.runs.methods import Uploads
from flower_desloc.runs.metrics import Line, read_lines
from flower_desloc.runs.units import bytes_text, figures, percent_text, period_text
from flower_desloc.core.schedule import PARAMS, Period, SyncSchedule

# Okabe and Ito's and Paul Tol's muted palettes: told apart with any colour vision.
_STREAM_COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
_PART_COLOURS: Final = (
    "#332288", "#CC6677", "#117733", "#4477AA", "#AA4499",
    "#999933", "#44AA99", "#882255", "#B8860B", "#6B6B6B",
)  # fmt: skip
_INK: Final = "#222222"
_GREY: Final = "#8A8A8A"
_FAINT: Final = "#D9D9D9"
_ALARM: Final = "#D55E00"

_TEXT: Final = 9.5
_GAP: Final = 0.062
"""Of two labels beside a panel, in heights of the panel."""


_WIDTH: Final = 1.02
"""Of a panel, in lengths of the run: what happens at the end is seen."""


def draw(folder: str | Path) -> Path:
    """Draw the run of ``folder`` from its metrics and its summary; return the picture's path."""
    run = RunFolder(Path(folder))
    summary = json.loads(run.summary.read_text(encoding="utf-8"))
    lines = list(read_lines(run.metrics))
    periods = summary["config"]["periods"]
    colours = dict(zip(periods, cycle(_STREAM_COLOURS), strict=False))

    figure = Figure(figsize=(13.5, 8.6), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(rect=(0.012, 0.012, 0.976, 0.86), wspace=0.05, hspace=0.08)  # type: ignore[union-attr, call-arg]
    panels = figure.subplots(2, 2)
    for panel in panels.flat:
        _tidy(panel, max(summary["steps"], 1), periods.get(PARAMS, 1))
    _heldout(panels[0, 0], lines)
    _sent(panels[0, 1], lines, summary, colours)
    _timeline(panels[1, 0], lines, summary, colours)
    _drift(panels[1, 1], lines, colours)
    _title(figure, summary)
    figure.savefig(run.picture)
    return run.picture


def _heldout(panel: Axes, lines: Sequence[Line]) -> None:
    where = next((w for w in ("central", "federated") if _evaluations(lines, w)), "central")
    evaluations = _evaluations(lines, where)
    by_byte = any("nats_per_byte" in e["overall"] for _, e in evaluations)
    metric, unit = ("nats_per_byte", "nats per byte") if by_byte else ("loss", "loss")
    of_images = any("accuracy" in e["overall"] for _, e in evaluations)
    parts = "client" if where == "federated" else "label" if of_images else "domain"
    named(panel, "Held-out loss", f"{unit} of the averaged model; thin lines by {parts}")
    if not evaluations:
        _empty(panel, "not evaluated")
        return
    overall = _points((step, e["overall"].get(metric)) for step, e in evaluations)
    final = evaluations[-1][1]
    labels = []
    few = len(final["parts"]) <= len(_PART_COLOURS)
    for part, colour in zip(final["parts"], cycle(_PART_COLOURS if few else [_GREY])):
        points = _points((step, e["parts"].get(part, {}).get(metric)) for step, e in evaluations)
        if points:
            panel.plot(*zip(*points, strict=True), color=colour, lw=1.2 if few else 0.6)
            labels += [Label(points[-1], part, colour)] if few else []
    # The training loss is per token; here is what that makes per byte, on the held-out text.
    per_token = (final["overall"].get("loss"), final["overall"].get(metric))
    scale = per_token[1] / per_token[0] if all(per_token) else 1.0
    train = [(step, loss * scale) for step, loss in _mean_losses(lines)]
    if train:
        panel.plot(*zip(*train, strict=True), color=_FAINT, lw=1, zorder=0)
        labels.append(Label(train[-1], "training", _GREY))
    if overall:
        panel.plot(
            *zip(*overall, strict=True),
            color=_INK,
            lw=2.4,
            marker="o",
            ms=_size(overall),
            clip_on=False,
        )
        right = final["overall"].get("accuracy")
        behind = "" if right is None else f", {percent_text(right)} right"
        labels.append(Label(overall[-1], f"all {overall[-1][1]:.3f}{behind}", _INK, bold=True))
    beside(panel, labels, _GAP)


def _sent(
    panel: Axes, lines: Sequence[Line], summary: dict[str, Any], colours: dict[str, str]
) -> None:
    named(panel, "Sent by all clients", "bytes to the server, since the start")
    uploads = _uploads(summary)
    steps: list[float] = [0]
    local_adam, ddp = [0], [0]
    streams = {stream: [0] for stream in colours}
    for line in lines:
        uploads.add_lines([line])
        steps.append(line["step"])
        local_adam.append(sum(uploads.local_adam.values()))
        ddp.append(uploads.ddp)
        for stream, course in streams.items():
            course.append(course[-1] + line["bytes_up"].get(stream, 0))
    # The end of training is a sync: its step has to have some width to be seen.
    for course in (local_adam, ddp, *streams.values()):
        course.append(course[-1])
    steps.append(panel.get_xlim()[1])
    below = [0] * len(steps)
    labels = []
    for stream, course in streams.items():
        top = [low + more for low, more in zip(below, course, strict=True)]
        panel.fill_between(steps, below, top, step="post", color=colours[stream], alpha=0.85, lw=0)
        if course[-1]:
            middle = (steps[-1], (below[-1] + top[-1]) / 2)
            labels.append(Label(middle, f"{stream} {bytes_text(course[-1])}", colours[stream]))
        below = top
    most = max(local_adam[-1], below[-1])
    if not most:
        _empty(panel, "nothing was sent")
        return
    panel.plot(steps[:-1], ddp[:-1], color=_INK, lw=1.8, ls=":")
    if local_adam[-1]:  # data parallelism has no such counterpart
        panel.plot(steps, local_adam, color=_INK, lw=1.8, ls=(0, (5, 2)), drawstyle="steps-post")
        labels.append(
            Label((steps[-1], local_adam[-1]), f"Local Adam {bytes_text(local_adam[-1])}", _INK)
        )
    # In proportion, or stacking says nothing; so DDP leaves at the top, with its number.
    panel.set_ylim(0, most * 1.15)
    panel.yaxis.set_major_formatter(
        FuncFormatter(lambda count, _: bytes_text(count).replace(".0 ", " "))
    )
    if ddp[-1] <= most * 1.15:
        labels.append(Label((steps[-1], ddp[-1]), f"DDP {bytes_text(ddp[-1])}", _INK))
    else:
        leaves = steps[-2] * most * 1.15 / ddp[-1]
        panel.annotate(
            f"DDP, up to {bytes_text(ddp[-1])} ↑",
            (leaves, most * 1.15),
            xytext=(6, -14),
            textcoords="offset points",
            fontsize=_TEXT,
            color=_INK,
        )
    beside(panel, labels, _GAP)


def _timeline(
    panel: Axes, lines: Sequence[Line], summary: dict[str, Any], colours: dict[str, str]
) -> None:
    named(panel, "When each stream was averaged", "one mark a sync")
    rows = list(colours)
    width = min(4.0, max(0.8, 160 / max(1, *summary["syncs"].values())))
    for row, stream in enumerate(rows):
        steps = [line["step"] for line in lines if stream in line["streams"]]
        panel.axhline(row, color=_FAINT, lw=1, zorder=0)
        panel.vlines(steps, row - 0.3, row + 0.3, color=colours[stream], lw=width)
        panel.annotate(
            f"{len(steps)} times" if len(steps) != 1 else "once",
            (1.015, row),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=_TEXT,
            color=colours[stream],
        )
    periods = summary["config"]["periods"]
    names = [f"{stream}\n{period_text(periods[stream])}" for stream in rows]
    evaluated = [line["step"] for line in lines if "evaluation" in line]
    left_out = [line["step"] for line in lines if line["left_out"]]
    for name, steps, colour in (
        ("evaluated", evaluated, _GREY),
        ("left out", left_out, _ALARM),
    ):
        if steps:
            panel.plot(
                steps, [len(names)] * len(steps), "d", color=colour, ms=_size(steps), clip_on=False
            )
            names.append(name)
    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.tick_params(axis="y", length=0, pad=9)
    panel.spines["left"].set_visible(False)
    panel.grid(visible=False, axis="y")


def _drift(panel: Axes, lines: Sequence[Line], colours: dict[str, str]) -> None:
    named(panel, "Drift between clients", "spread over clients / norm of the mean, at every sync")
    labels = []
    for stream, colour in colours.items():
        points = _points(
            (line["step"], _relative(line["drift"][stream]))
            for line in lines
            if stream in line["drift"]
        )
        if points:
            size = _size(points)
            panel.plot(
                *zip(*points, strict=True), color=colour, lw=1.8, marker="o", ms=size, clip_on=False
            )
            labels.append(Label(points[-1], stream, colour))
    if not labels:
        _empty(panel, "no drift was seen")
        return
    panel.set_yscale("log")
    low, high = panel.get_ylim()
    if high / low < 10:  # less than a decade may hold no tick at all
        panel.set_ylim(low / 2, high * 2)
    decades = math.log10(high / low)
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 3 else (1,)))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    beside(panel, labels, _GAP)


def _title(figure: Figure, summary: dict[str, Any]) -> None:
    config, ratio = summary["config"], summary["ratio"]
    streams = ", ".join(f"{s} {period_text(p)}" for s, p in config["periods"].items())
    average = " on average" if config["coin_seed"] is not None else ""
    clients = f"{summary['clients']} client{'' if summary['clients'] == 1 else 's'}"
    text = f"{config['optimizer']} on {clients}, averaged: {streams} steps{average}"
    name = config["name"]
    if summary["status"] != "completed":
        name += f" ({summary['status']} after {summary['steps']} of {config['steps']} steps)"
    figure.text(0.02, 0.975, name, fontsize=17, fontweight="bold", color=_INK, va="top")
    figure.text(0.02, 0.93, text, fontsize=11.5, color=_INK, va="top")
    colour = _STREAM_COLOURS[0]
    for text, height, size, weight in (
        (f"Local Adam: {figures(ratio['local_adam'])} times the traffic", 0.975, 14, "bold"),
        (f"data parallelism: {figures(ratio['ddp'])} times", 0.93, 11.5, "normal"),
    ):
        if ratio["local_adam"] is not None:
            figure.text(
                0.98, height, text, fontsize=size, weight=weight, color=colour, ha="right", va="top"
            )


def _tidy(panel: Axes, num_steps: int, period: Period) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(_GREY)
    panel.tick_params(labelsize=_TEXT, color=_GREY, labelcolor=_INK)
    panel.grid(visible=True, axis="y", color="#EDEDED", lw=0.8)
    panel.set_axisbelow(True)
    panel.set_xlim(0, _WIDTH * num_steps)
    panel.yaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
    panel.xaxis.set_major_locator(_ticks(num_steps, period))
    panel.set_xlabel("local steps", fontsize=_TEXT, color=_INK)


def _ticks(num_steps: int, period: Period) -> Locator:
    """Return ticks at averages of params, where those divide the run evenly."""
    rounds, rest = divmod(num_steps, period) if isinstance(period, int) else (0, 1)
    for ticks in (6, 8, 5, 7, 4) if not rest else ():
        if rounds % ticks == 0:
            return MultipleLocator(num_steps // ticks)
    return MaxNLocator(6, integer=True)


def _size(points: Sequence[object]) -> float:
    """Return the size of a marker, smaller where there are many."""
    return max(1.5, 5 - len(points) / 25)


def _empty(panel: Axes, text: str) -> None:
    panel.text(0.5, 0.5, text, transform=panel.transAxes, ha="center", fontsize=_TEXT, color=_GREY)
    panel.set_yticks([])


def _uploads(summary: dict[str, Any]) -> Uploads:
    config = summary["config"]
    schedule = SyncSchedule(config["periods"], config["coin_seed"], frozenset(config["once_at"]))
    return Uploads(
        schedule,
        summary["stream_bytes"],
        summary.get("wire_bytes", summary["stream_bytes"]),
        config["steps"],
    )


def _evaluations(lines: Sequence[Line], where: str) -> list[tuple[int, dict[str, Any]]]:
    return [
        (line["step"], line["evaluation"][where])
        for line in lines
        if where in line.get("evaluation", {})
    ]


def _mean_losses(lines: Sequence[Line]) -> list[tuple[int, float]]:
    points = []
    for line in lines:
        losses = [client["losses"] for client in line["clients"].values()]
        for step, values in enumerate(zip(*losses, strict=False), line["start"] + 1):
            if None not in values:
                points.append((step, sum(values) / len(values)))
    return points


def _points(values: Iterable[tuple[int, float | None]]) -> list[tuple[int, float]]:
    return [(step, value) for step, value in values if value is not None]


def _relative(drift: dict[str, float | None]) -> float | None:
    spread, norm = drift["spread"], drift["norm"]
    return spread / norm if spread and norm else None  # zero has no logarithm
