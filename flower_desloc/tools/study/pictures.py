"""The pictures of a study: scores, searches, and losses against steps and against bytes.

The longest axis of the study is the lines and rows of every panel, with a colour each that is the
same in every picture; each combination of the other axes is a panel.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator

from flower_desloc.runs.figures.labels import Label
from flower_desloc.runs.figures.series import Array, Band, Curve, at, heldout, sent
from flower_desloc.runs.figures.style import (
    GREY,
    INK,
    PARTS,
    beside,
    bytes_axis,
    figure,
    log_axis,
    rows_axis,
    short_bytes,
    title,
)
from flower_desloc.runs.report import Run, load
from flower_desloc.tools.study.results import Row
from flower_desloc.tools.study.spec import Score

_DPI: Final = 130
_TEXT: Final = 9
_BYTES: Final = "bytes sent by a client"
_MOST_TICKS: Final = 7
_FROM: Final = 0.25
"""Of a run: the loss before that would take most of the panel, and says little."""


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw what there is into ``folder``; return the pictures' paths."""
    pictures: dict[str, Callable[[_Layout], Figure]] = {}
    if any(row.scores for row in rows):
        pictures["scores.png"] = _scores
        pictures["loss_by_step.png"] = _loss_by_step
        pictures["loss_by_bytes.png"] = _loss_by_bytes
    if any(len(row.tried) > 1 for row in rows):
        pictures["sweep.png"] = _sweep
    layout = _Layout.of(rows)
    for name, make in pictures.items():
        make(layout).savefig(folder / name, dpi=_DPI)
    return [folder / name for name in pictures]


@dataclass(frozen=True)
class _Layout:
    """Which cell is drawn where, and how."""

    rows: Sequence[Row]
    axis: str | None
    """The longest, whose values are the lines and rows of the panels."""
    styles: Mapping[str, dict[str, Any]]
    """Line -> its colour; dashed where there are more lines than colours."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "_Layout":
        axes = rows[0].study.axes
        axis = max(axes, key=lambda each: len(axes[each]), default=None)
        names = axes[axis] if axis else (rows[0].study.name,)
        return cls(
            rows,
            axis,
            {
                name: {"color": colour, "ls": "-" if number < len(PARTS) else "--"}
                for number, (name, colour) in enumerate(zip(names, cycle(PARTS), strict=False))
            },
        )

    @property
    def score(self) -> Score:
        """Which number of a run counts."""
        return self.rows[0].study.score

    @property
    def seeds(self) -> int:
        """How many each cell has when all is done."""
        return len(self.rows[0].study.seeds)

    @property
    def panels(self) -> dict[str, dict[str, Row]]:
        """Panel -> line -> cell."""
        panels: dict[str, dict[str, Row]] = {}
        for row in self.rows:
            others = [label for axis, label in row.labels.items() if axis != self.axis]
            line = row.labels[self.axis] if self.axis else row.study.name
            panels.setdefault(", ".join(others), {})[line] = row
        return panels

    def figure(self, what: str, height: float) -> tuple[Figure, list[tuple[Axes, dict[str, Row]]]]:
        """Return a figure, and its panels, ``height`` inches high, with what belongs into each."""
        panels = self.panels
        columns = min(3, len(panels)) if len(panels) != 4 else 2
        lines = math.ceil(len(panels) / columns)
        width = max(7.2, 0.3 + columns * (3.7 + 0.075 * max(map(len, self.styles))))
        head = 0.66
        made, axes = figure(lines, columns, head + lines * (height + 0.8))
        made.set_figwidth(width)
        made.get_layout_engine().set(rect=(0, 0, 1, 1 - head / made.get_figheight()))  # type: ignore[union-attr, call-arg]
        FigureCanvasAgg(made)
        _write(made, 0.13, self.rows[0].study.name, fontsize=14, fontweight="bold", color=INK)
        _write(made, 0.45, what, fontsize=_TEXT, color=GREY)
        for panel in axes[len(panels) :]:
            panel.set_visible(False)
        for panel, panel_name in zip(axes, panels, strict=False):
            title(panel, panel_name)
        return made, list(zip(axes, panels.values(), strict=False))


def _write(made: Figure, down: float, text: str, **style: Any) -> None:
    """Write a line into the figure's head, so many inches below the top."""
    place = (0.12 / made.get_figwidth(), 1 - down / made.get_figheight())
    made.text(*place, text, va="top", **style)


def _scores(layout: _Layout) -> Figure:
    """A point a seed, the mean, and the standard deviation, cell by cell."""
    text = layout.score.text
    what = _sentence(text)
    if layout.seeds > 1:
        what += ": a dot a seed, a bar their mean, a line one standard deviation"
    made, panels = layout.figure(what, 0.25 * len(layout.styles) + 0.3)
    for panel, cells in panels:
        rows_axis(panel, list(cells))
        panel.grid(visible=True, axis="x", color="#EDEDED", lw=0.8)
        panel.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        panel.set_xlabel(text, fontsize=_TEXT, color=INK)
        for height, (line, row) in enumerate(cells.items()):
            colour = layout.styles[line]["color"]
            if row.mean is not None:
                spread = row.std or 0.0
                panel.plot([row.mean - spread, row.mean + spread], [height] * 2, color=colour, lw=2)
                panel.plot(row.mean, height, "|", color=colour, ms=12, mew=2.4)
                panel.plot(row.scores, [height] * len(row.scores), "o", color=colour, ms=5,
                           alpha=0.55, mew=0)  # fmt: skip
            panel.annotate(
                _text(row), (1.02, height), xycoords=("axes fraction", "data"), va="center",
                fontsize=_TEXT, color=INK if row.mean is not None else GREY,
            )  # fmt: skip
        if not any(row.scores for row in cells.values()):
            panel.set_xticks([])
    return made


def _sweep(layout: _Layout) -> Figure:
    """The score over the values that were tried."""
    text = layout.score.text
    what = f"{_sentence(text)} over the values tried; filled: the best; crosses on top: diverged"
    made, panels = layout.figure(what, 3.3)
    low, high = _range([list(row.tried.values()) for row in layout.rows])
    handles = {}
    values = sorted({value for row in layout.rows for value in row.tried})
    for panel, cells in panels:
        panel.set_ylim(low, high)
        log_axis(panel.xaxis, values[0], values[-1])
        if len(values) <= _MOST_TICKS:
            panel.xaxis.set_major_locator(FixedLocator(values))
        for line, row in cells.items():
            if not row.tried:
                continue
            style = layout.styles[line]
            tried = {value: s for value, s in row.tried.items() if math.isfinite(s)}
            [handles[line]] = panel.plot([*tried], [*tried.values()], lw=1.5, marker="o", ms=4.5,
                                         mfc="white", mew=1.2, label=line, **style)  # fmt: skip
            if lost := [value for value in row.tried if value not in tried]:
                panel.plot(lost, [high] * len(lost), "x", color=style["color"], ms=6, mew=1.6,
                           clip_on=False)  # fmt: skip
            if row.tuned in tried:
                panel.plot(row.tuned, tried[row.tuned], "o", color=style["color"], ms=6.5)
        panel.set_xlabel(_keys(cells.values()), fontsize=_TEXT, color=INK)
        panel.set_ylabel(text, fontsize=_TEXT, color=INK)
    # Not beside the lines: where a search ends says nothing of where it was.
    made.legend(handles=[*handles.values()], loc="outside lower center", ncols=_fit(handles),
                fontsize=_TEXT, labelcolor=INK, frameon=False)  # fmt: skip
    return made


def _loss_by_step(layout: _Layout) -> Figure:
    return _losses(layout, "local steps")


def _loss_by_bytes(layout: _Layout) -> Figure:
    return _losses(layout, _BYTES)


def _losses(layout: _Layout, against: str) -> Figure:
    text = layout.score.text.removeprefix("final ").removeprefix("smallest ")
    what = f"{_sentence(text)} against {against}"
    if layout.seeds > 1:
        what += f": mean over {layout.seeds} seeds, and the standard deviation"
    made, panels = layout.figure(what, 3.3)
    bands = {row.plan.cell.slug: _band(row, against) for row in layout.rows}
    drawn = [band for band in bands.values() if band]
    low, high = _range([list(middle[x >= _FROM * x[-1]]) for x, middle, _ in drawn])
    first = min(x[x >= _FROM * x[-1]][0] for x, _, _ in drawn)
    last = max(x[-1] for x, _, _ in drawn)
    is_wide = against == _BYTES and last > 8 * min(x[-1] for x, _, _ in drawn)
    for panel, cells in panels:
        panel.set_ylim(low, high)
        panel.set_xlim(0, 1.02 * last)
        panel.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        if against == _BYTES:
            bytes_axis(panel.xaxis)
        if is_wide:
            log_axis(panel.xaxis, 0.8 * first, last, lambda count, _: short_bytes(count))
        labels = []
        for line, row in cells.items():
            if band := bands[row.plan.cell.slug]:
                x, middle, spread = band
                style = layout.styles[line]
                panel.plot(x, middle, lw=1.7, **style)
                panel.fill_between(x, middle - spread, middle + spread, color=style["color"],
                                   alpha=0.15, lw=0)  # fmt: skip
                labels.append(Label((x[-1], min(middle[-1], high)), line, style["color"]))
        panel.set_xlabel(against, fontsize=_TEXT, color=INK)
        panel.set_ylabel(text, fontsize=_TEXT, color=INK)
        beside(panel, labels)
    return made


def _band(row: Row, against: str) -> tuple[Array, Array, Array] | None:
    """Return x, mean and standard deviation over the seeds that did not diverge."""
    runs = [load(done.folder.path) for done in row.runs if not done.diverged]
    band = Band.of([_loss(run, row.study.score) for run in runs]).between()
    if not band.x.size:
        return None
    x = band.x
    if against == _BYTES:  # with coins each seed sends when its own fall
        x = np.mean([at(sent(run), x) / run.summary["clients"] for run in runs], axis=0)
    return x, band.mean().y, band.std()


def _loss(run: Run, score: Score) -> Curve:
    """Return a run's loss by step, from the first window on."""
    if score.where == "train":
        return Curve.of((line["step"], line["train_loss"]) for line in run.windows)
    curve = heldout(run, score.metric, score.where)
    return Curve(curve.x[curve.x > 0], curve.y[curve.x > 0])


def _range(courses: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return what an axis has to show: the best of each course, and of most the whole."""
    finite = [[y for y in course if math.isfinite(y)] for course in courses]
    finite = [course for course in finite if course]
    if not finite:
        return 0.0, 1.0
    low = min(map(min, finite))
    high = max(*map(min, finite), float(np.median([max(course) for course in finite])))
    margin = 0.06 * (high - low or 1)
    return low - margin, high + margin


def _text(row: Row) -> str:
    if row.mean is None:
        return "diverged" if row.diverged or (row.tried and not row.plan.missing) else "not run"
    spread = "" if row.std is None else f" ± {row.std:.3f}"
    return f"{row.mean:.3f}{spread}" + (f", {row.diverged} diverged" if row.diverged else "")


def _keys(rows: Iterable[Row]) -> str:
    return " / ".join(dict.fromkeys(row.key for row in rows if row.key))


def _fit(names: Iterable[str]) -> int:
    """Return how many columns of a legend fit below the panels."""
    names = list(names)
    return min(len(names), max(1, 110 // (max(map(len, names)) + 7)))


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
