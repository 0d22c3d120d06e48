"""A plan as a figure: time by bandwidth for every method, and drift bound by period."""

import math
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, NullLocator

from flower_desloc.app.config import units
from flower_desloc.app.plan.planned_run import PlannedRun
from flower_desloc.app.plan.theory import drift_bound, half_life
from flower_desloc.app.plan.wall_clock import Link, Topology
from flower_desloc.app.runs.figures.style import GREY, INK, figure, stream_colours, title
from flower_desloc.core.traffic import MethodRates

# Okabe and Ito's palette, for any colour vision.
_METHODS: Final = {
    "DDP": "#222222",
    "Local Adam": "#D55E00",
    "this run": "#0072B2",
    "FedAvg": "#009E73",
}
_POINTS: Final = 240
_TICKS: Final = [
    *(10.0**power for power in range(-6, 2)),
    *(60, 600, 3600, 36_000),
    *(86_400 * 10.0**power for power in range(8)),
]
"""Seconds at which an axis of time has ticks."""
_MARGIN: Final = 30
"""Factor between the outermost marks of a panel and its limits."""
_CHARACTERS: Final = 10.5
"""Characters of the subtitle per inch."""
_LINE: Final = 0.2
"""Height of a line of the subtitle in inches."""


def draw(run: PlannedRun, path: Path) -> None:
    """Draw into ``path``, whose suffix is the format.

    Raises ``ValueError`` for a format that matplotlib does not know.
    """
    width = 5 * (len(run.topologies) + 1)
    subtitle = textwrap.wrap(_subtitle(run), int(width * _CHARACTERS))
    head = 0.58 + _LINE * len(subtitle)
    height = 4.42 + head
    made, (*times, drift) = figure(1, len(run.topologies) + 1, height)
    made.set_figwidth(width)
    made.get_layout_engine().set(rect=(0.008, 0.01, 0.984, 0.99 - head / height))  # type: ignore[union-attr, call-arg]
    for panel in made.axes:
        panel.set_xscale("log")
        panel.set_yscale("log")
    for panel, topology in zip(times, run.topologies, strict=True):
        _draw_times(panel, run, topology)
        panel.set_ylim(times[0].get_ylim())
        _set_time_ticks(panel)
    _draw_drift(drift, run)
    made.text(
        0.012, 1 - 0.16 / height, run.name,
        fontsize=16, fontweight="bold", color=INK, va="top",
    )  # fmt: skip
    made.text(0.012, 1 - 0.49 / height, "\n".join(subtitle), fontsize=10.5, color=INK, va="top")
    made.savefig(path, dpi=130)


def _draw_times(panel: Axes, run: PlannedRun, topology: Topology) -> None:
    compute = run.steps * run.compute
    title(
        panel,
        f"Time of the run on a {topology}",
        "by bandwidth; dot: half is waiting",
    )

    def time(method: MethodRates, bandwidth: float) -> float:
        link = Link(bandwidth=bandwidth, latency=run.link.latency)
        return run.steps * (run.compute + run.waiting(method, topology, link))

    bandwidths = _bandwidths(run)
    for method in run.methods:
        colour, width = _METHODS[method.name], 2.6 if method is run.desloc else 1.6
        times = [time(method, bandwidth) for bandwidth in bandwidths]
        panel.plot(bandwidths, times, color=colour, lw=width, label=method.name)
        if half := run.bandwidth_for(method, topology, 1):
            panel.plot(half, time(method, half), "o", color=colour, ms=6)
    panel.axhline(compute, color=GREY, lw=1, ls=":")
    panel.annotate(
        f"compute alone, {units.seconds_text(compute)}", (bandwidths[0], compute),
        xytext=(4, -12), textcoords="offset points", color=GREY, fontsize=9,
    )  # fmt: skip
    panel.axvline(run.link.bandwidth, color=GREY, lw=1, ls="--")
    panel.set_xlim(bandwidths[0], bandwidths[-1])
    panel.set_ylim(bottom=compute / 2)
    panel.xaxis.set_major_formatter(lambda value, _: units.bandwidth_text(value))
    # Powers of ten of bits, not of bytes.
    first, last = (math.ceil(math.log10(8 * end)) for end in (bandwidths[0], bandwidths[-1]))
    panel.set_xticks([10.0**power / 8 for power in range(first, last, 1 + (last - first) // 5)])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.legend(frameon=False, fontsize=9)


def _set_time_ticks(panel: Axes) -> None:
    """Set ticks at whole units of time: a log scale of one unit has ticks such as 10,000,000 ms."""
    first, last = panel.get_ylim()
    within = [seconds for seconds in _TICKS if first <= seconds <= last]
    panel.set_yticks(within[:: 1 + len(within) // 8])
    panel.yaxis.set_major_formatter(
        lambda value, _: "1 day" if value == 86_400 else units.seconds_text(value)
    )
    panel.yaxis.set_minor_locator(NullLocator())


def _draw_drift(panel: Axes, run: PlannedRun) -> None:
    title(
        panel,
        "Drift bound of a moment",
        "share of its ceiling, by period; dot: stated; bar: half-life",
    )
    stated = [
        (stream, stream.beta, period if isinstance(period, int) else run.steps)
        for stream in run.moments
        if stream.beta and (period := run.periods[stream.name])
    ]
    longest = _MARGIN * max([10, *(max(half_life(beta), period) for _, beta, period in stated)])
    periods = np.geomspace(1, longest, _POINTS)
    kinds = {stream.name: stream.kind for stream in run.streams}
    colours = stream_colours(kinds, kinds)
    for stream, beta, period in stated:
        colour = colours[stream.name]
        bounds = [drift_bound(beta, steps, 1) for steps in periods]
        panel.plot(periods, bounds, color=colour, lw=2, label=stream.name)
        tau = half_life(beta)
        panel.plot(tau, drift_bound(beta, tau, 1), "|", color=colour, ms=16, mew=2)
        panel.plot(period, drift_bound(beta, period, 1), "o", color=colour, ms=7)
    panel.set_xlabel("local steps between averages", color=GREY, fontsize=9)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_formatter(NullFormatter())
    if stated:
        panel.legend(frameon=False, fontsize=9)


def _bandwidths(run: PlannedRun) -> list[float]:
    """Return bandwidths around the link's and those at which a method waits half of the time."""
    halves: Iterable[float | None] = (
        run.bandwidth_for(method, topology, 1)
        for method in run.methods
        for topology in run.topologies
    )
    known = [run.link.bandwidth, *(half for half in halves if half)]
    return list(np.geomspace(min(known) / _MARGIN, max(known) * _MARGIN, _POINTS))


def _subtitle(run: PlannedRun) -> str:
    averaged = units.schedule_text(run.schedule)
    return (
        f"{run.optimizer} on {units.count_text(run.workers, 'worker')}, averaged: {averaged}; "
        f"dashed: the link, {units.bandwidth_text(run.link.bandwidth)}"
    )
