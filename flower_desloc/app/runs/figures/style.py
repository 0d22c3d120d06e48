"""The style of all figures: colours, axes, titles and line labels."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, MultipleLocator, NullLocator

from flower_desloc.app.config.units import bytes_text
from flower_desloc.app.runs.figures.curves import Array, Curve, aligned, mean
from flower_desloc.app.runs.groups import SeedGroup
from flower_desloc.app.runs.record import RunRecord
from flower_desloc.core.kinds import Kind, Kinds, kind_of
from flower_desloc.core.schedule import GRADIENTS, PARAMS

INK: Final = "#222222"
GREY: Final = "#7A7A7A"
FAINT: Final = "#D9D9D9"
GRID: Final = "#EDEDED"
ALARM: Final = "#D55E00"
BAR: Final = "#9DB7CC"

PARTS: Final = (
    "#332288", "#CC6677", "#117733", "#4477AA", "#AA4499", "#999933",
    "#44AA99", "#882255", "#B8860B", "#88CCEE", "#DDCC77", "#661100",
)  # fmt: skip
"""Colours of clients, domains and labels: Paul Tol's muted palette, for any colour vision."""

_KINDS: Final = {
    Kind.PARAMS: "#0072B2",
    Kind.FIRST_MOMENT: "#E69F00",
    Kind.SECOND_MOMENT: "#009E73",
    Kind.MAXIMUM: "#CC79A7",
    Kind.GRADIENTS: "#D55E00",
    Kind.BUFFERS: "#56B4E9",
}
"""The colour of the first stream of each kind; further ones have those of ``PARTS``."""

WIDTH: Final = 10.4
"""Width of every figure in inches."""
HEAD: Final = 0.66
"""Height of a headline in inches."""
TEXT_SIZE: Final = 9
DASHED: Final = (0, (4, 2))
MAX_NAMES: Final = 30
"""Maximum number of rows that are all labelled with their names."""
MAX_LINES: Final = 12
"""Maximum number of lines that are distinguishable."""
_LEGEND_CHARACTERS: Final = 130
_LOG_TICKS: Final = ((1.3, (1, 2, 3, 5)), (2.6, (1, 2, 5)), (4, (1, 3)), (math.inf, (1,)))
"""Upper bounds on an axis's decades, each with the digits that have a tick."""
_RC: Final[dict[Any, Any]] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelsize": TEXT_SIZE,
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
}


def stream_colours(streams: Iterable[str], kinds: Kinds) -> dict[str, str]:
    """Return the colour of each stream by its kind, the same in every figure."""
    of_kind, others = dict(_KINDS), cycle(PARTS)
    return {name: of_kind.pop(kind_of(name, kinds), "") or next(others) for name in streams}


def part_colours(parts: Sequence[str]) -> dict[str, str]:
    """Return a colour for each of a few clients or domains; grey for each of many."""
    if len(parts) > len(PARTS):
        return dict.fromkeys(parts, GREY)
    return dict(zip(parts, PARTS, strict=False))


def figure(rows: int, columns: int, height: float, **grid: Any) -> tuple[Figure, list[Axes]]:
    """Return an empty figure ``height`` inches high, and its panels row by row."""
    made = Figure(figsize=(WIDTH, height), facecolor="white", layout="constrained")
    FigureCanvasAgg(made)
    made.get_layout_engine().set(w_pad=0.12, h_pad=0.09, wspace=0.03, hspace=0.06)  # type: ignore[union-attr, call-arg]
    with mpl.rc_context(_RC):
        panels = list(made.subplots(rows, columns, squeeze=False, **grid).flat)
    for panel in panels:  # not in _RC, which is read again when the figure is drawn
        panel.tick_params(labelsize=TEXT_SIZE, color=GREY, labelcolor=INK, length=3)
        panel.grid(visible=True, axis="y", color=GRID, lw=0.8)
        panel.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    return made, panels


def headline(made: Figure, name: str, text: str) -> None:
    """Write a bold and a plain line above the panels."""
    made.get_layout_engine().set(rect=(0, 0, 1, 1 - HEAD / made.get_figheight()))  # type: ignore[union-attr, call-arg]
    left, inch = 0.12 / made.get_figwidth(), 1 / made.get_figheight()
    made.text(left, 1 - 0.13 * inch, name, va="top", fontsize=14, fontweight="bold", color=INK)
    made.text(left, 1 - 0.45 * inch, text, va="top", fontsize=TEXT_SIZE, color=GREY)


def title(panel: Axes, name: str, meaning: str = "") -> None:
    """Write a panel's title and its meaning above it."""
    panel.set_title(
        name, loc="left", fontsize=10.5, fontweight="bold", color=INK, pad=19 if meaning else 8
    )
    if meaning:
        panel.annotate(
            meaning, (0, 1), xytext=(0, 6), xycoords="axes fraction", textcoords="offset points",
            fontsize=TEXT_SIZE - 0.5, color=GREY,
        ).set_in_layout(False)  # fmt: skip


def empty(panel: Axes, text: str) -> None:
    """Write the reason for missing data into an empty panel."""
    panel.text(0.5, 0.5, text, transform=panel.transAxes, ha="center", fontsize=9, color=GREY)
    panel.set_yticks([])


def steps_axis(panel: Axes, runs: Sequence[RunRecord]) -> None:
    """Label the horizontal axis in local steps, with ticks at averages of params."""
    steps = max([1, *(run.num_steps for run in runs)])
    panel.set_xlim(0, 1.02 * steps)  # marks at the end are visible
    panel.set_xlabel("local steps")
    periods = [run.periods.get(PARAMS, run.periods.get(GRADIENTS)) for run in runs]
    period = max((period for period in periods if isinstance(period, int)), default=0)
    rounds, rest = divmod(steps, period) if period else (0, 1)
    fits = [ticks for ticks in (6, 4, 5, 3, 2) if not rest and rounds % ticks == 0]
    locator = MultipleLocator(steps // fits[0]) if fits else MaxNLocator(5, integer=True)
    panel.xaxis.set_major_locator(locator)


def log_axis(axis: Axis, low: float, high: float, text: Any = "{x:g}") -> None:
    """Make an axis logarithmic from ``low`` to ``high``, with every tick labelled."""
    panel = axis.axes
    vertical = axis is panel.yaxis
    (panel.set_yscale if vertical else panel.set_xscale)("log")
    # Less than half a decade may have no tick at all.
    margin = max(1.12, (3.2 * low / high) ** 0.5)
    (panel.set_ylim if vertical else panel.set_xlim)(low / margin, high * margin)
    decades = math.log10(high / low * margin**2)
    subs = next(s for limit, s in _LOG_TICKS if decades * (1 if vertical else 1.8) < limit)
    axis.set_major_locator(LogLocator(subs=subs, numticks=9))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(text)


def log_scale(panel: Axes, curves: Iterable[Curve]) -> None:
    """Make the vertical axis logarithmic, with limits around the curves."""
    values = np.concatenate([curve.y for curve in curves])
    values = values[np.isfinite(values) & (values > 0)]
    if values.size:
        log_axis(panel.yaxis, float(values.min()), float(values.max()))


def percent_tick(share: float, _: object) -> str:
    """Return a share of 1 as the label of a tick."""
    return f"{100 * share:.3g} %"


def bytes_tick(count: float, _: object) -> str:
    """Return ``count`` bytes as the label of a tick."""
    return bytes_text(count).replace(".0 ", " ")


def rows_axis(panel: Axes, names: Sequence[str], *, grid: bool = True) -> None:
    """Make the vertical axis one of named rows, the first on top; ``grid`` has vertical lines."""
    every = 1 if len(names) <= MAX_NAMES else -(-len(names) // 12)
    panel.set_yticks(range(0, len(names), every), names[::every])
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.tick_params(axis="y", length=0)
    panel.spines["left"].set_visible(False)
    panel.grid(visible=False, axis="y")
    if grid:
        panel.grid(visible=True, axis="x", color=GRID, lw=0.8)


def aside(panel: Axes, row: int, text: str, colour: str = INK) -> None:
    """Write text to the right of a row."""
    panel.annotate(
        text, (1.015, row), xycoords=("axes fraction", "data"), va="center", fontsize=9,
        color=colour, annotation_clip=False,
    )  # fmt: skip


def plot(panel: Axes, curve: Curve, colour: str, *, dots: bool = False, **style: Any) -> None:
    """Draw a curve; with ``dots`` at each point, smaller where there are many.

    A single point is always a dot.
    """
    style = {"lw": 1.6, **style}
    if np.isfinite(curve.y).sum() == 1 or (dots and len(curve.x) < 60):
        # Dots at the edge of the panel are not clipped.
        size = 4.5 - len(curve.x) / 25 if dots else 4
        style |= {"marker": "o", "ms": size, "clip_on": False}
    panel.plot(curve.x, curve.y, color=colour, **style)


def by_client(
    panel: Axes, curves: Mapping[str, Curve], colours: Mapping[str, str], *, named: bool
) -> None:
    """Draw a curve for each client, or bands for many clients, and their mean."""
    labels = []
    if len(curves) > MAX_LINES:
        table = aligned(curve.thinned() for curve in curves.values())
        edges = table.quantile([0, 0.1, 0.9, 1], axis=1).to_numpy()
        panel.fill_between(table.index, edges[0], edges[3], color=FAINT, alpha=0.5, lw=0)
        panel.fill_between(table.index, edges[1], edges[2], color=BAR, alpha=0.8, lw=0)
        for edge, name in zip(edges, ("lowest", "10 %", "90 %", "highest"), strict=True):
            colour = "#5B7C99" if name.endswith("%") else GREY
            labels.append(Label((table.index[-1], edge[-1]), name, colour))
    else:
        for name, curve in curves.items():
            plot(panel, curve.thinned(), colours[name], lw=0.9, alpha=0.85)
            labels.append(Label(curve.thinned().last, name, colours[name]))
    middle = mean(curves.values()).thinned()
    plot(panel, middle, INK, lw=1.8)
    labels.append(Label(middle.last, "mean", INK, bold=True))
    if named:
        label_right(panel, labels)


def by_group(
    panel: Axes,
    group: SeedGroup,
    curves: Sequence[Curve],
    cost: Callable[[Array], Array] = lambda steps: steps,
    **style: Any,
) -> None:
    """Draw the mean over a group's runs, with a band of one standard deviation.

    The x axis is ``cost`` of the local steps.
    """
    table = aligned(curve.thinned() for curve in curves)
    if table.empty:
        return
    x, middle = cost(table.index.to_numpy()), table.mean(axis=1).to_numpy()
    plot(panel, Curve(x, middle), group.colour, **style)
    if len(curves) > 1:
        spread = table.std(axis=1).fillna(0).to_numpy()  # a single value has none
        panel.fill_between(
            x, middle - spread, middle + spread, color=group.colour, alpha=0.18, lw=0
        )


def legend(made: Figure, groups: Sequence[SeedGroup]) -> None:
    """Name the groups above the panels, if there are several."""
    if len(groups) > 1:
        name_colours(made, [(group.label, group.colour) for group in groups])


def name_colours(made: Figure, named: Sequence[tuple[str, str]]) -> None:
    """Write names above the panels, each with its colour."""
    widths = [len(name) + 7 for name, _ in named]
    one_line = sum(widths) <= _LEGEND_CHARACTERS
    made.legend(
        handles=[Line2D([], [], color=colour, lw=2.2, label=name) for name, colour in named],
        loc="outside upper left",
        ncols=len(named) if one_line else max(1, _LEGEND_CHARACTERS // max(widths)),
        fontsize=TEXT_SIZE,
        labelcolor=INK,
        frameon=False,
        handlelength=1.6,
        columnspacing=1.6,
    )


@dataclass(frozen=True)
class Label:
    """Text to the right of a panel, for a line that ends at ``end`` in data coordinates."""

    end: tuple[float, float]
    text: str
    colour: str
    bold: bool = False


def label_right(panel: Axes, labels: Sequence[Label]) -> None:
    """Write the labels to the right of the panel, spread so that they do not overlap."""
    panel.set_ylim(panel.get_ylim())  # fixes the scale before it is used
    panel.set_xlim(panel.get_xlim())
    to_axes = panel.transData + panel.transAxes.inverted()
    labels = sorted(labels, key=lambda label: label.end[1])
    heights = [float(to_axes.transform(label.end)[1]) for label in labels]
    gap = TEXT_SIZE * 1.35 / 72 / _inches(panel)
    for label, height in zip(labels, apart(heights, gap), strict=True):
        panel.annotate(
            label.text, label.end, xytext=(1.04, height), textcoords="axes fraction", va="center",
            fontsize=TEXT_SIZE, fontweight="bold" if label.bold else "normal", color=label.colour,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": label.colour, "lw": 0.6, "shrinkA": 1,
                        "shrinkB": 2, "relpos": (0, 0.5)},
        )  # fmt: skip


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Return ascending ``heights`` moved at least ``gap`` apart, each cluster around its mean.

    >>> apart([0.5, 0.5, 0.9], 0.25)
    [0.375, 0.625, 0.9]
    """
    crowds: list[list[float]] = []

    def bottom(crowd: Sequence[float]) -> float:
        return max(0.02, sum(crowd) / len(crowd) - gap * (len(crowd) - 1) / 2)

    for height in heights:
        crowds.append([height])
        while len(crowds) > 1 and bottom(crowds[-2]) + gap * len(crowds[-2]) > bottom(crowds[-1]):
            crowds[-2:] = [crowds[-2] + crowds[-1]]
    return [bottom(crowd) + gap * i for crowd in crowds for i in range(len(crowd))]


def _inches(panel: Axes) -> float:
    """Return the approximate height of a panel; the layout is computed later."""
    made = panel.get_figure()
    assert isinstance(made, Figure)
    spec = panel.get_subplotspec()
    rows = spec.get_gridspec().nrows if spec else 1
    return max(0.5, made.get_figheight() / rows - 0.95)
