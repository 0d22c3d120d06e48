"""What was averaged when, and who took part."""

from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flower_desloc.runs.units import period_text
from flower_desloc.runs.loaded import Run
from flower_desloc.runs.figures.style import (
    ALARM,
    FAINT,
    GREY,
    figure,
    rows_axis,
    steps_axis,
    stream_colours,
    title,
)

_PRESENT = "#9DB7CC"
_MANY_WINDOWS = 2000


def timeline(run: Run) -> Figure | None:
    """Draw the streams' averages and the clients' presence along the steps."""
    if not run.windows:
        return None
    rows = len(run.streams) + any("evaluation" in line for line in run.lines)
    heights = (0.36 * rows, min(4.5, max(0.5, 0.2 * len(run.clients))))
    made, (streams, clients) = figure(
        2, 1, sum(heights) + 1.5, sharex=True, gridspec_kw={"height_ratios": heights}
    )
    _averages(streams, run)
    _presence(clients, run)
    steps_axis(clients, [run])
    return made


def _averages(panel: Axes, run: Run) -> None:
    title(panel, "Averages", "one mark each")
    periods = run.summary["config"]["periods"]
    colours = stream_colours(run.streams)
    names = []
    for row, stream in enumerate(run.streams):
        steps = [line["step"] for line in run.windows if stream in line["streams"]]
        panel.axhline(row, color=FAINT, lw=1, zorder=0)
        _marks(panel, steps, row, colours[stream], run.num_steps)
        _aside(panel, row, _times(len(steps)), colours[stream])
        names.append(f"{stream}, {period_text(periods[stream])}" if stream in periods else stream)
    evaluated = [line["step"] for line in run.lines if "evaluation" in line]
    if evaluated:
        size = max(1.5, 4.5 - len(evaluated) / 25)
        panel.plot(
            evaluated, [len(names)] * len(evaluated), "D", color=GREY, ms=size, clip_on=False
        )
        _aside(panel, len(names), _times(len(evaluated)), GREY)
        names.append("evaluated")
    rows_axis(panel, names)
    panel.tick_params(axis="y", pad=9)


def _marks(panel: Axes, steps: Sequence[int], row: int, colour: str, num_steps: int) -> None:
    """Draw a mark at each step; where they would touch, one bar for all of them."""
    half = num_steps / 500
    spans = _joined((step - half, step + half) for step in steps)
    panel.broken_barh(
        [(start, stop - start) for start, stop in spans], (row - 0.3, 0.6), color=colour, lw=0
    )


def _presence(panel: Axes, run: Run) -> None:
    names = run.clients
    row = {name: index for index, name in enumerate(names)}
    missed = [
        ((line["start"] + line["step"]) / 2, row[name])
        for line in run.windows
        for name, reason in line["left_out"].items()
        if name not in line["clients"] and not reason.startswith("evaluation")
    ]
    meaning = "a bar where a client's work is in the averages"
    title(panel, "Clients", meaning + ("; a cross where it was left out" if missed else ""))
    if len(names) * len(run.windows) > _MANY_WINDOWS:
        _presence_image(panel, run, row)
    else:
        for name in names:
            spans = _joined(
                (line["start"], line["step"]) for line in run.windows if name in line["clients"]
            )
            panel.broken_barh(
                [(start, stop - start) for start, stop in spans],
                (row[name] - 0.32, 0.64),
                color=_PRESENT,
                lw=0,
            )
    if missed:
        panel.plot(*zip(*missed, strict=True), "x", color=ALARM, ms=5, mew=1.6, clip_on=False)
    rows_axis(panel, names)


def _presence_image(panel: Axes, run: Run, row: dict[str, int]) -> None:
    columns = np.linspace(0, run.num_steps, 801)
    image = np.ones((len(row), 800, 4))
    colour = [int(_PRESENT[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    for line in run.windows:
        first, last = np.searchsorted(columns, (line["start"], line["step"]))
        for name in line["clients"]:
            image[row[name], first : max(first + 1, last), :3] = colour
    panel.imshow(
        image,
        aspect="auto",
        interpolation="nearest",
        extent=(0, run.num_steps, len(row) - 0.5, -0.5),
    )


def _joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, stop in spans:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def _aside(panel: Axes, row: int, text: str, colour: str) -> None:
    panel.annotate(
        text,
        (1.015, row),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=9,
        color=colour,
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times" if count else "never"
