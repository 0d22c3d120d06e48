"""A plan as a picture: time by bandwidth for every method, and drift by period."""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from flower_desloc.plan.moments import drift_bound, half_life
from flower_desloc.plan.setting import Setting, Stream
from flower_desloc.plan.traffic import Method
from flower_desloc.plan.units import bandwidth_text, seconds_text, unit_of
from flower_desloc.plan.wall_clock import Link, Topology, crossing
from flower_desloc.runs.figures.labels import named
from flower_desloc.runs.units import period_text

# Okabe and Ito's palette: told apart with any colour vision.
_METHODS: Final = {
    "DDP": "#222222",
    "Local Adam": "#D55E00",
    "DES-LOC": "#0072B2",
    "FedAvg": "#009E73",
}
_MOMENTS: Final = ("#E69F00", "#009E73", "#CC79A7")
_INK: Final = "#222222"
_GREY: Final = "#8A8A8A"
_FAINT: Final = "#D9D9D9"
_POINTS: Final = 240
_BEYOND: Final = 30
"""How far the panels reach past what is marked in them."""


def draw(setting: Setting, path: Path) -> None:
    """Draw into ``path``, whose suffix says in which format.

    Raises ``ValueError`` for a format that matplotlib does not know.
    """
    figure = Figure(figsize=(15, 5.2), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(rect=(0.008, 0.01, 0.984, 0.84), wspace=0.04)  # type: ignore[union-attr, call-arg]
    star, ring, drift = figure.subplots(1, 3)
    for panel in (star, ring, drift):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color=_FAINT, lw=0.6)
        panel.set_axisbelow(True)
        panel.set_xscale("log")
        panel.set_yscale("log")
    _times(star, setting, Topology.STAR)
    _times(ring, setting, Topology.RING)
    ring.set_ylim(star.get_ylim())
    _drift(drift, setting)
    figure.text(0.012, 0.97, setting.name, fontsize=16, fontweight="bold", color=_INK, va="top")
    figure.text(0.012, 0.905, _subtitle(setting), fontsize=10.5, color=_INK, va="top")
    figure.savefig(path)


def _times(panel: Axes, setting: Setting, topology: Topology) -> None:
    compute = setting.steps * setting.compute
    size, unit = unit_of(compute)
    named(
        panel,
        f"Time of the run on a {topology}",
        f"in {unit}, by bandwidth; dot: half of it waiting; cross: two as fast",
    )

    def time(method: Method, bandwidth: float) -> float:
        link = Link(bandwidth=bandwidth, latency=setting.link.latency)
        return setting.steps * (setting.compute + setting.waiting(method, topology, link)) / size

    bandwidths = _bandwidths(setting)
    for method in setting.methods:
        colour, width = _METHODS[method.name], 2.6 if method is setting.desloc else 1.6
        times = [time(method, bandwidth) for bandwidth in bandwidths]
        panel.plot(bandwidths, times, color=colour, lw=width, label=method.name)
        if half := setting.bandwidth_for(method, topology, 1):
            panel.plot(half, time(method, half), "o", color=colour, ms=6)
    for one, other in combinations(setting.methods, 2):
        where = crossing(one, other, setting.workers, setting.link.latency, topology)
        if where and bandwidths[0] <= where <= bandwidths[-1]:
            panel.plot(where, time(one, where), "x", color=_INK, ms=8, mew=1.8, zorder=3)
    panel.axhline(compute / size, color=_GREY, lw=1, ls=":")
    panel.annotate(
        f"compute alone, {seconds_text(compute)}",
        (bandwidths[0], compute / size),
        xytext=(4, -12),
        textcoords="offset points",
        color=_GREY,
        fontsize=9,
    )
    panel.axvline(setting.link.bandwidth, color=_GREY, lw=1, ls="--")
    panel.set_xlim(bandwidths[0], bandwidths[-1])
    panel.set_ylim(bottom=compute / size / 2)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: bandwidth_text(value)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    # Powers of ten of bits, not of bytes.
    first, last = (math.ceil(math.log10(8 * end)) for end in (bandwidths[0], bandwidths[-1]))
    panel.set_xticks([10.0**power / 8 for power in range(first, last, 1 + (last - first) // 5)])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.legend(frameon=False, fontsize=9)


def _drift(panel: Axes, setting: Setting) -> None:
    named(
        panel,
        "Drift bound of a moment",
        "in shares of its ceiling, by period; dot: as stated; bar: half-life",
    )
    moments = [stream for stream in setting.moments if stream.beta]
    known = [half_life(stream.beta) for stream in moments if stream.beta]
    longest = _BEYOND * max(*known, *(period for period, _ in _marked(moments, setting)), 10)
    for stream, colour in zip(moments, _MOMENTS, strict=False):
        assert stream.beta is not None
        periods = [longest ** (i / _POINTS) for i in range(_POINTS + 1)]
        bounds = [drift_bound(stream.beta, period, 1) for period in periods]
        label = f"{stream.name}, {period_text(stream.period)}"
        panel.plot(periods, bounds, color=colour, lw=2, label=label)
        tau = half_life(stream.beta)
        panel.plot(tau, drift_bound(stream.beta, tau, 1), "|", color=colour, ms=16, mew=2)
    for period, stream in _marked(moments, setting):
        assert stream.beta is not None
        panel.plot(
            period,
            drift_bound(stream.beta, period, 1),
            "o",
            color=_MOMENTS[moments.index(stream) % len(_MOMENTS)],
            ms=7,
        )
    panel.set_xlabel("local steps between averages", color=_GREY, fontsize=9)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_formatter(NullFormatter())
    if moments:
        panel.legend(frameon=False, fontsize=9)


def _marked(moments: Sequence[Stream], setting: Setting) -> Iterator[tuple[float, Stream]]:
    for stream in moments:
        yield (stream.period if isinstance(stream.period, int) else setting.steps), stream


def _bandwidths(setting: Setting) -> list[float]:
    """Return bandwidths that show where each method waits half of the time, and the link."""
    marks = [
        setting.bandwidth_for(method, topology, 1)
        for method in setting.methods
        for topology in Topology
    ]
    known = [setting.link.bandwidth, *(mark for mark in marks if mark)]
    low, high = min(known) / _BEYOND, max(known) * _BEYOND
    return [low * (high / low) ** (i / _POINTS) for i in range(_POINTS + 1)]


def _subtitle(setting: Setting) -> str:
    periods = ", ".join(f"{s} {period_text(p)}" for s, p in setting.periods.items())
    return (
        f"{setting.optimizer} on {setting.workers} workers, averaged: {periods} steps; dashed: the "
        f"link, {bandwidth_text(setting.link.bandwidth)}"
    )
