"""Timeline of the averages and of the clients that took part."""

from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flower_desloc.app.runs.figures import style
from flower_desloc.app.runs.record import RunRecord

_MAX_BARS = 2000
"""With more bars the report contains them as an image, which is smaller."""


def draw_timeline(run: RunRecord) -> Figure | None:
    """Draw the averages of the streams and the presence of the clients, by step."""
    if not run.windows:
        return None
    rows = len(run.streams) + any(line["evaluation"] for line in run.lines)
    heights = (0.36 * rows, min(4.5, max(0.5, 0.2 * len(run.clients))))
    made, (streams, clients) = style.figure(
        2, 1, sum(heights) + 1.5, sharex=True, height_ratios=heights
    )
    fill_averages(streams, run)
    _fill_presence(clients, run)
    style.steps_axis(clients, [run])
    return made


def fill_averages(panel: Axes, run: RunRecord) -> None:
    """Draw a mark for each average of each stream, and for each evaluation."""
    style.title(panel, "When each stream was averaged", "one mark per average")
    colours = style.stream_colours(run.streams, run.kinds)
    names, half = [], run.num_steps / 300
    for row, stream in enumerate(run.streams):
        steps = [line["step"] for line in run.windows if stream in line["streams"]]
        panel.axhline(row, color=style.FAINT, lw=1, zorder=0)
        marks = _joined((step - half, step + half) for step in steps)
        panel.broken_barh(marks, (row - 0.3, 0.6), color=colours[stream], lw=0)
        style.aside(panel, row, _times(len(steps)), colours[stream])
        known = stream in run.periods
        names.append(f"{stream}, {run.schedule.period_text(stream)}" if known else stream)
    if evaluated := [line["step"] for line in run.lines if line["evaluation"]]:
        row, size = len(names), max(1.5, 4.5 - len(evaluated) / 25)
        panel.plot(evaluated, [row] * len(evaluated), "D", color=style.GREY, ms=size, clip_on=False)
        style.aside(panel, row, _times(len(evaluated)), style.GREY)
        names.append("evaluated")
    style.rows_axis(panel, names, grid=False)
    panel.tick_params(axis="y", pad=9)


def _fill_presence(panel: Axes, run: RunRecord) -> None:
    row = {name: index for index, name in enumerate(run.clients)}
    missed = [
        ((line["start"] + line["step"]) / 2, row[name])
        for line in run.windows
        for name in line["left_out"]
        if name not in line["clients"]
    ]
    meaning = "a bar where a client's work is in the averages"
    style.title(panel, "Clients", meaning + ("; a cross where it was left out" if missed else ""))
    many = len(row) * len(run.windows) > _MAX_BARS
    for name in row:
        lines = (line for line in run.windows if name in line["clients"])
        bars = _joined((line["start"], line["step"]) for line in lines)
        panel.broken_barh(bars, (row[name] - 0.32, 0.64), color=style.BAR, lw=0, rasterized=many)
    if missed:
        panel.plot(*zip(*missed, strict=True), "x", color=style.ALARM, ms=5, mew=1.6, clip_on=False)
    style.rows_axis(panel, [*row], grid=False)


def _joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return starts and widths of ``spans``; those that touch become one."""
    joined: list[tuple[float, float]] = []
    for start, stop in spans:
        if joined and start <= sum(joined[-1]):
            start, stop = joined[-1][0], max(stop, sum(joined.pop()))
        joined.append((start, stop - start))
    return joined


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times" if count else "never"
