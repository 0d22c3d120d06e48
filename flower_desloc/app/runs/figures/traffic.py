"""Bytes by stream, up and down, next to those of Local Adam and data parallelism."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from flower_desloc.app.config.units import bytes_text, figures
from flower_desloc.app.runs.figures import style
from flower_desloc.app.runs.groups import grouped
from flower_desloc.app.runs.record import RunRecord
from flower_desloc.app.runs.summary import OTHER_METHODS
from flower_desloc.core.schedule import PARAMS


@dataclass(frozen=True)
class StackedBar:
    """The bytes of each stream in one direction."""

    name: str
    counts: Mapping[str, float]
    factor: float | None = None
    """Ratio to the bytes of the run."""
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
    made, (panel,) = style.figure(1, 1, 0.75 + 0.42 * len(bars))
    fill_bytes(panel, runs)
    return made


def fill_bytes(panel: Axes, runs: Sequence[RunRecord]) -> None:
    """Draw the bars in proportion; one that is far longer than the others leaves the panel."""
    bars = _bars(runs)
    streams = dict.fromkeys(stream for bar in bars for stream in bar.counts)
    colours = style.stream_colours(streams, ChainMap(*(dict(run.kinds) for run in runs)))
    totals = sorted(bar.total for bar in bars)
    end = 1.08 * (totals[-1] if len(totals) < 4 or totals[-1] < 4 * totals[-2] else totals[-2]) or 1
    for row, bar in enumerate(bars):
        left = 0.0
        look: dict[str, Any] = {"height": 0.62, "lw": 0}
        if bar.by_formula:
            look |= {"alpha": 0.35, "hatch": "////", "edgecolor": "white"}
        for stream, count in bar.counts.items():
            width = min(count, end - left)
            panel.barh(row, width, left=left, facecolor=colours[stream], **look)
            left += width
        text = bytes_text(bar.total) + (
            f", {figures(bar.factor)} times this run" if bar.factor else ""
        )
        leaves = bar.total > end
        panel.annotate(
            f"{text} →" if leaves else text, (min(bar.total, end), row),
            xytext=(-6 if leaves else 5, 0), textcoords="offset points", va="center",
            ha="right" if leaves else "left", fontsize=style.TEXT_SIZE, color=style.INK,
        )  # fmt: skip
    panel.set_xlim(0, end)
    panel.locator_params(axis="x", nbins=5)
    panel.xaxis.set_major_formatter(style.bytes_tick)
    style.rows_axis(panel, [bar.name for bar in bars])
    hatched = "; hatched: by formula" if any(bar.by_formula for bar in bars) else ""
    panel.set_xlabel(f"bytes of all clients together{hatched}")
    sent = {stream for bar in bars for stream, count in bar.counts.items() if count}
    panel.legend(
        handles=[Patch(color=colours[s], label=s) for s in colours if s in sent],
        loc="lower left", bbox_to_anchor=(0, 1), ncols=6, frameon=False, fontsize=style.TEXT_SIZE,
        labelcolor=style.INK, handlelength=1, handleheight=1, borderaxespad=0.2, borderpad=0,
        columnspacing=1.2, handletextpad=0.4,
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
        summary = runs[0].summary
        for method, name in OTHER_METHODS.items():
            sent, factor = summary["bytes"][method]["up"], summary["ratio"][method]
            # Data parallelism sends gradients, which have the size of params.
            by_stream = _streams(sent) or {PARAMS: float(sent["total"])}
            if method == "ddp" or sent["total"]:
                bars.append(StackedBar(f"{name}, up", by_stream, factor, by_formula=True))
    return bars


def _streams(counts: Mapping[str, int]) -> dict[str, float]:
    return {stream: count for stream, count in counts.items() if stream != "total"}
