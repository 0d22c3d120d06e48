"""Bytes by stream, up and down, next to those of Local Adam and data parallelism."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from flower_desloc.config.units import bytes_text, figures
from flower_desloc.runs.figures.style import (
    GRID,
    INK,
    TEXT_SIZE,
    bytes_axis,
    figure,
    rows_axis,
    stream_colours,
)
from flower_desloc.runs.groups import grouped
from flower_desloc.runs.record import RunRecord


@dataclass(frozen=True)
class StackedBar:
    """The bytes of each stream in one direction."""

    name: str
    counts: Mapping[str, float]
    factor: float | None = None
    """How many times the bytes of the run."""
    by_formula: bool = False

    @property
    def total(self) -> float:
        """The length of the bar."""
        return sum(self.counts.values())


def draw_bytes(runs: Sequence[RunRecord]) -> Figure | None:
    """Draw the bytes of each stream as stacked bars."""
    bars = _bars(runs)
    if not any(bar.total for bar in bars):
        return None
    made, (panel,) = figure(1, 1, 0.75 + 0.42 * len(bars))
    fill_bytes(panel, runs)
    return made


def fill_bytes(panel: Axes, runs: Sequence[RunRecord]) -> None:
    """Draw the bars in proportion; one that is far longer than the others leaves the panel."""
    bars = _bars(runs)
    colours = stream_colours(dict.fromkeys(stream for bar in bars for stream in bar.counts))
    totals = sorted(bar.total for bar in bars)
    end = 1.08 * (totals[-1] if len(totals) < 4 or totals[-1] < 4 * totals[-2] else totals[-2]) or 1
    for row, bar in enumerate(bars):
        left = 0.0
        style: dict[str, Any] = {"height": 0.62, "lw": 0}
        if bar.by_formula:
            style |= {"alpha": 0.35, "hatch": "////", "edgecolor": "white"}
        for stream, count in bar.counts.items():
            width = min(count, end - left)
            panel.barh(row, width, left=left, facecolor=colours[stream], **style)
            left += width
        text = bytes_text(bar.total) + (f", {figures(bar.factor)} times" if bar.factor else "")
        leaves = bar.total > end
        panel.annotate(
            f"{text} →" if leaves else text, (min(bar.total, end), row),
            xytext=(-6 if leaves else 5, 0), textcoords="offset points", va="center",
            ha="right" if leaves else "left", fontsize=TEXT_SIZE, color=INK,
        )  # fmt: skip
    panel.set_xlim(0, end)
    bytes_axis(panel.xaxis)
    rows_axis(panel, [bar.name for bar in bars])
    panel.set_xlabel("bytes of all clients together", fontsize=TEXT_SIZE, color=INK)
    panel.grid(visible=True, axis="x", color=GRID, lw=0.8)
    sent = {stream for bar in bars for stream, count in bar.counts.items() if count}
    panel.legend(
        handles=[Patch(color=colours[s], label=s) for s in colours if s in sent],
        loc="lower left", bbox_to_anchor=(0, 1), ncols=6, frameon=False, fontsize=TEXT_SIZE,
        labelcolor=INK, handlelength=1, handleheight=1, borderaxespad=0.2,
    )  # fmt: skip


def _bars(runs: Sequence[RunRecord]) -> list[StackedBar]:
    groups = grouped(runs)
    bars = []
    for group in groups:
        before = f"{group.label}, " if len(groups) > 1 else ""
        for way in ("up", "down"):
            counts = [_streams(run.summary["bytes"]["measured"][way]) for run in group.runs]
            streams = dict.fromkeys(stream for each in counts for stream in each)
            means = {stream: fmean(each.get(stream, 0) for each in counts) for stream in streams}
            bars.append(StackedBar(f"{before}{way}", means))
    if len(groups) == 1:
        counts, factors = runs[0].summary["bytes"], runs[0].summary["ratio"]
        if any((local_adam := _streams(counts["local_adam"]["up"])).values()):
            bars.append(StackedBar("Local Adam, up", local_adam, factors["local_adam"], True))
        ddp = {"params": counts["ddp"]["up"]["total"]}
        bars.append(StackedBar("DDP, up", ddp, factors["ddp"], True))
    return bars


def _streams(counts: Mapping[str, int]) -> dict[str, float]:
    return {stream: count for stream, count in counts.items() if stream != "total"}
