"""How the figures look: one width, quiet axes, names beside the lines, colours for everybody."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    MultipleLocator,
    NullFormatter,
    NullLocator,
)

from flower_desloc.runs.figures.labels import Label
from flower_desloc.runs.figures.labels import beside as labels_beside
from flower_desloc.runs.units import bytes_text
from flower_desloc.runs.loaded import Group, Run
from flower_desloc.runs.figures.series import Array, Band, Curve, mean
from flower_desloc.core.schedule import GRADIENTS, PARAMS

INK: Final = "#222222"
GREY: Final = "#7A7A7A"
FAINT: Final = "#D9D9D9"
ALARM: Final = "#D55E00"

PARTS: Final = (
    "#332288", "#CC6677", "#117733", "#4477AA", "#AA4499", "#999933",
    "#44AA99", "#882255", "#B8860B", "#88CCEE", "#DDCC77", "#661100",
)  # fmt: skip
"""Of clients, domains and labels: Paul Tol's muted palette, told apart with any colour vision."""

_STREAMS: Final = {
    "params": "#0072B2",
    "exp_avg": "#E69F00",
    "momentum_buffer": "#E69F00",
    "exp_avg_sq": "#009E73",
    "max_exp_avg_sq": "#CC79A7",
    "gradients": "#D55E00",
    "buffers": "#56B4E9",
}

WIDTH: Final = 10.4
"""Of every figure, in inches: a page's."""
_TEXT: Final = 9
_LINE: Final = 130
"""Characters that fit beside each other."""
_SUBS: Final = ((1.3, (1, 2, 3, 5)), (2.6, (1, 2, 5)), (4, (1, 3)), (math.inf, (1,)))
"""Below how many decades which digits have a tick."""
NAMED: Final = 30
"""So many rows have all their names."""
_MANY: Final = 12
"""More lines than this cannot be told apart."""


def stream_colours(streams: Iterable[str]) -> dict[str, str]:
    """Return the colour of each stream, the same in every figure."""
    others = cycle(PARTS)
    return {stream: _STREAMS.get(stream) or next(others) for stream in streams}


def part_colours(parts: Sequence[str]) -> dict[str, str]:
    """Return a colour for each of a few clients or domains; grey for each of many."""
    if len(parts) > len(PARTS):
        return dict.fromkeys(parts, GREY)
    return dict(zip(parts, PARTS, strict=False))


def figure(rows: int, columns: int, height: float, **grid: Any) -> tuple[Figure, list[Axes]]:
    """Return an empty figure ``height`` inches high, and its panels row by row."""
    made = Figure(figsize=(WIDTH, height), facecolor="white", layout="constrained")
    made.get_layout_engine().set(w_pad=0.06, h_pad=0.09, wspace=0.03, hspace=0.06)  # type: ignore[union-attr, call-arg]
    panels = list(made.subplots(rows, columns, squeeze=False, **grid).flat)
    for panel in panels:
        _tidy(panel)
    return made, panels


def title(panel: Axes, name: str, meaning: str = "") -> None:
    """Write what a panel shows above it."""
    panel.set_title(
        name, loc="left", fontsize=10.5, fontweight="bold", color=INK, pad=19 if meaning else 8
    )
    if meaning:
        panel.annotate(
            meaning,
            (0, 1),
            xytext=(0, 6),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=_TEXT - 0.5,
            color=GREY,
        )


def steps_axis(panel: Axes, runs: Sequence[Run]) -> None:
    """Make the horizontal axis that of local steps; ticks at averages of params where they fit."""
    steps = max([1, *(run.num_steps for run in runs)])
    panel.set_xlim(0, 1.02 * steps)  # what happens at the end is seen
    panel.set_xlabel("local steps", fontsize=_TEXT, color=INK)
    clocks = [run.summary["config"]["periods"] for run in runs]
    periods = [clock.get(PARAMS, clock.get(GRADIENTS)) for clock in clocks]
    period = max((period for period in periods if isinstance(period, int)), default=0)
    rounds, rest = divmod(steps, period) if period else (0, 1)
    fits = [ticks for ticks in (6, 4, 5, 3) if not rest and rounds % ticks == 0]
    locator = MultipleLocator(steps // fits[0]) if fits else MaxNLocator(5, integer=True)
    panel.xaxis.set_major_locator(locator)


def log_axis(
    axis: Axis, low: float, high: float, text: Any = lambda value, _: f"{value:g}"
) -> None:
    """Make an axis logarithmic from ``low`` to ``high``, with ticks that are always labelled."""
    panel = axis.axes
    vertical = axis is panel.yaxis
    (panel.set_yscale if vertical else panel.set_xscale)("log")
    # Less than a decade may hold no tick at all.
    room = max(1.12, (3.2 / (high / low)) ** 0.5 if high / low < 3.2 else 1.12)
    (panel.set_ylim if vertical else panel.set_xlim)(low / room, high * room)
    decades = math.log10(high / low * room**2)
    subs = next(s for limit, s in _SUBS if decades * (1 if vertical else 1.8) < limit)
    axis.set_major_locator(LogLocator(subs=subs, numticks=9))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(text))


def log_scale(panel: Axes, curves: Iterable[Curve]) -> None:
    """Make the vertical axis logarithmic, to hold the curves."""
    values = np.concatenate([curve.y for curve in curves])
    values = values[np.isfinite(values) & (values > 0)]
    if values.size:
        log_axis(panel.yaxis, float(values.min()), float(values.max()))


def percent_axis(axis: Axis) -> None:
    """Label an axis of shares by percent."""
    axis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g} %"))


def bytes_axis(axis: Axis) -> None:
    """Label a linear axis by units of 1000 bytes."""
    axis.set_major_formatter(FuncFormatter(lambda count, _: short_bytes(count)))


def short_bytes(count: float) -> str:
    """Return ``count`` bytes as a tick's label."""
    return bytes_text(count).replace(".0 ", " ")


def plot(panel: Axes, curve: Curve, colour: str, **style: Any) -> None:
    """Draw a curve; points as well where they are few."""
    alone = np.isfinite(curve.y).sum() == 1
    style = {"lw": 1.6, "marker": "o" if alone else None, "ms": 4, **style}
    # A mark at the edge of the panel is seen whole.
    panel.plot(curve.x, curve.y, color=colour, clip_on=style["marker"] is None, **style)


def dots(curve: Curve) -> dict[str, Any]:
    """Return the style of a curve with a mark at each point, smaller where there are many."""
    return {"marker": "o", "ms": 4.5 - len(curve.x) / 25} if len(curve.x) < 60 else {}


def by_client(
    panel: Axes, curves: Mapping[str, Curve], average: str = "mean", *, named: bool = True
) -> None:
    """Draw a curve for each client and their mean; bands in place of many curves."""
    if not curves:
        return
    labels = []
    if len(curves) > _MANY:
        band = Band.of([curve.thinned() for curve in curves.values()])
        low, tenth, ninetieth, high = band.quantiles(0, 0.1, 0.9, 1)
        panel.fill_between(band.x, low, high, color=FAINT, alpha=0.5, lw=0)
        panel.fill_between(band.x, tenth, ninetieth, color="#9DB7CC", alpha=0.8, lw=0)
        labels += [Label((band.x[-1], high[-1]), "highest", GREY)]
        labels += [Label((band.x[-1], ninetieth[-1]), "90 %", "#5B7C99")]
        labels += [Label((band.x[-1], tenth[-1]), "10 %", "#5B7C99")]
        labels += [Label((band.x[-1], low[-1]), "lowest", GREY)]
    else:
        colours = part_colours(list(curves))
        for name, curve in curves.items():
            plot(panel, curve.thinned(), colours[name], lw=0.9, alpha=0.85)
            labels.append(Label(curve.thinned().last, name, colours[name]))
    if len(curves) > 1:
        middle = mean(curves.values()).thinned()
        plot(panel, middle, INK, lw=1.8)
        labels.append(Label(middle.last, average, INK, bold=True))
    if named:
        beside(panel, labels)


def by_group(
    panel: Axes,
    group: Group,
    curves: Sequence[Curve],
    cost: Callable[[Array], Array] = lambda steps: steps,
    **style: Any,
) -> None:
    """Draw the mean over a group's runs, and a band of one standard deviation about it.

    Against local steps, or what ``cost`` makes of them.
    """
    band = Band.of([curve.thinned() for curve in curves])
    if not band.x.size:
        return
    x, middle = cost(band.x), band.mean()
    plot(panel, middle.against(x), group.colour, **style)
    if len(curves) > 1:
        low, high = middle.y - band.std(), middle.y + band.std()
        panel.fill_between(x, low, high, color=group.colour, alpha=0.18, lw=0)


def legend(made: Figure, groups: Sequence[Group]) -> None:
    """Name the groups above the panels."""
    widths = [len(group.label) + 7 for group in groups]
    columns = len(groups) if sum(widths) <= _LINE else max(1, _LINE // max(widths))
    made.legend(
        handles=[Line2D([], [], color=group.colour, lw=2.2, label=group.label) for group in groups],
        loc="outside upper left",
        ncols=columns,
        fontsize=_TEXT,
        labelcolor=INK,
        frameon=False,
        handlelength=1.6,
        columnspacing=1.6,
    )


def rows_axis(panel: Axes, names: Sequence[str]) -> None:
    """Make the vertical axis one of named rows, the first on top."""
    shown = range(len(names))
    if len(names) > NAMED:
        shown = range(0, len(names), -(-len(names) // 12))
    panel.yaxis.set_major_locator(FixedLocator(list(shown)))
    panel.set_yticklabels([names[row] for row in shown])
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.tick_params(axis="y", length=0)
    panel.spines["left"].set_visible(False)
    panel.grid(visible=False, axis="y")


def beside(panel: Axes, labels: Sequence[Label]) -> None:
    """Write the labels beside the panel, a line apart where they would overlap."""
    labels_beside(panel, labels, gap=_TEXT * 1.35 / 72 / _height(panel))


def _height(panel: Axes) -> float:
    """Return a panel's height in inches, before it is laid out: what its titles leave."""
    made = panel.get_figure()
    assert isinstance(made, Figure)
    spec = panel.get_subplotspec()
    rows = spec.get_gridspec().nrows if spec else 1
    return max(0.5, made.get_figheight() / rows - 0.95)


def _tidy(panel: Axes) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(GREY)
    panel.tick_params(labelsize=_TEXT, color=GREY, labelcolor=INK, length=3)
    panel.grid(visible=True, axis="y", color="#EDEDED", lw=0.8)
    panel.set_axisbelow(True)
    panel.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
