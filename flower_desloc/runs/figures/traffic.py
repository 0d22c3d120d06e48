"""Bytes by stream, up and down, beside what Local Adam and data parallelism would send."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flower_desloc.runs.units import bytes_text, figures
from flower_desloc.runs.loaded import Run, grouped
from flower_desloc.runs.figures.style import (
    INK,
    bytes_axis,
    figure,
    rows_axis,
    stream_colours,
)


def traffic(runs: Sequence[Run]) -> Figure | None:
    """Draw the bytes of each stream as stacked bars."""
    groups = grouped(runs)
    rows: list[tuple[str, Mapping[str, float], str]] = []
    for group in groups:
        before = f"{group.label}, " if len(groups) > 1 else ""
        for way in ("up", "down"):
            counts = [_streams(run.summary["bytes"]["measured"][way]) for run in group.runs]
            rows.append((f"{before}{way}", _mean(counts), ""))
    if len(groups) == 1:
        counts = runs[0].summary["bytes"]
        factors = runs[0].summary["ratio"]
        if any((local_adam := _streams(counts["local_adam"]["up"])).values()):
            rows.append(("Local Adam, up", local_adam, _times(factors["local_adam"])))
        rows.append(("DDP, up", {"params": counts["ddp"]["up"]["total"]}, _times(factors["ddp"])))
    if not any(sum(by_stream.values()) for _, by_stream, _ in rows):
        return None
    made, (panel,) = figure(1, 1, 0.75 + 0.42 * len(rows))
    _bars(panel, rows, measured=2 * len(groups))
    return made


def _bars(panel: Axes, rows: Sequence[tuple[str, Mapping[str, float], str]], measured: int) -> None:
    colours = stream_colours(dict.fromkeys(stream for _, counts, _ in rows for stream in counts))
    totals = [sum(counts.values()) for _, counts, _ in rows]
    # In proportion, or stacking says nothing: what is far longer leaves the panel.
    near = sorted(totals)[-2] if len(totals) > 3 else max(totals)
    end = 1.08 * (max(totals) if max(totals) < 4 * near else near)
    named: set[str] = set()
    for row, ((_, counts, factor), total) in enumerate(zip(rows, totals, strict=True)):
        left = 0.0
        for stream, count in counts.items():
            width = min(count, end - left)
            style = {"color": colours[stream]} if row < measured else _formula(colours[stream])
            panel.barh(row, width, left=left, height=0.62, lw=0, **style)
            if count:
                named.add(stream)
            left += width
        text = bytes_text(total) + (f", {factor}" if factor else "")
        leaves = total > end
        panel.annotate(
            f"{text} →" if leaves else text,
            (min(total, end), row),
            xytext=(-6 if leaves else 5, 0),
            textcoords="offset points",
            va="center",
            ha="right" if leaves else "left",
            fontsize=9,
            color=INK,
        )
    panel.set_xlim(0, end)
    bytes_axis(panel.xaxis)
    rows_axis(panel, [name for name, _, _ in rows])
    panel.set_xlabel("bytes of all clients together", fontsize=9, color=INK)
    panel.grid(visible=True, axis="x", color="#EDEDED", lw=0.8)
    handles = [
        panel.barh([0], [0], color=colour, label=stream)
        for stream, colour in colours.items()
        if stream in named
    ]
    panel.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=6, frameon=False,
        fontsize=9, labelcolor=INK, handlelength=1, handleheight=1, borderaxespad=0.2,
    )  # fmt: skip


def _formula(colour: str) -> dict[str, object]:
    """Return the look of what was not sent, but would have been."""
    return {"color": colour, "alpha": 0.35, "hatch": "////", "edgecolor": "white"}


def _streams(counts: Mapping[str, int]) -> dict[str, int]:
    return {stream: count for stream, count in counts.items() if stream != "total"}


def _mean(counts: Sequence[Mapping[str, int]]) -> dict[str, float]:
    streams = dict.fromkeys(stream for each in counts for stream in each)
    return {stream: fmean(each.get(stream, 0) for each in counts) for stream in streams}


def _times(factor: float | None) -> str:
    return f"{figures(factor)} times" if factor else ""
