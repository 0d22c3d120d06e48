"""Figures of a study: scores, searches, and losses against steps and against bytes.

Each value of the study's longest axis is one line, with the same colour in every figure. Each
combination of the other axes is one panel.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flower_desloc.app.runs.figures import style
from flower_desloc.app.runs.figures.curves import Array, Curve, aligned, at, heldout, sent
from flower_desloc.app.runs.record import RunRecord, load
from flower_desloc.app.study.cells import CellState
from flower_desloc.app.study.grid import ScoreSpec

_DPI: Final = 130
_BYTES: Final = "bytes sent by a client"
_MOST_TICKS: Final = 7
_FROM: Final = 0.25
"""Share of a run before which losses do not set the limits of a panel."""


def draw(cells: Sequence[CellState], folder: Path) -> list[Path]:
    """Draw the figures that have data into ``folder``; return their paths."""
    figures: dict[str, Callable[[_Grid], Figure]] = {}
    if any(cell.scores for cell in cells):
        figures["scores.png"] = _scores
        figures["loss_by_step.png"] = lambda grid: _losses(grid, "local steps")
        figures["loss_by_bytes.png"] = lambda grid: _losses(grid, _BYTES)
    if any(len(cell.tried) > 1 for cell in cells):
        figures["sweep.png"] = _sweep
    for name, make in figures.items():
        make(_Grid(cells)).savefig(folder / name, dpi=_DPI)
    return [folder / name for name in figures]


class _Grid:
    """The lines of a study's figures, and the panels that they are in."""

    def __init__(self, cells: Sequence[CellState]) -> None:
        study, axes = cells[0].study, cells[0].study.axes
        longest = study.compared
        self.cells = cells
        self.name = study.name
        self.score = study.shown
        self.seeds = len(study.seeds)
        # Dashed if there are more lines than colours.
        names, colours = axes[longest] if longest else (study.name,), cycle(style.PARTS)
        self.styles: dict[str, dict[str, Any]] = {
            name: {"color": colour, "ls": "-" if number < len(style.PARTS) else "--"}
            for number, (name, colour) in enumerate(zip(names, colours, strict=False))
        }
        self.panels: dict[str, dict[str, CellState]] = {}
        for cell in cells:
            labels = cell.cell.labels
            others = [f"{axis} {label}" for axis, label in labels.items() if axis != longest]
            line = labels[longest] if longest else study.name
            self.panels.setdefault(", ".join(others), {})[line] = cell

    def figure(
        self, what: str, height: float
    ) -> tuple[Figure, Iterator[tuple[Axes, dict[str, CellState]]]]:
        """Return a figure, and its panels, ``height`` inches high, with the cell of each line."""
        columns = min(3, len(self.panels)) if len(self.panels) != 4 else 2
        rows = math.ceil(len(self.panels) / columns)
        made, axes = style.figure(rows, columns, style.HEAD + rows * (height + 0.8))
        made.set_figwidth(max(7.2, 0.3 + columns * (3.7 + 0.075 * max(map(len, self.styles)))))
        style.headline(made, self.name, what[0].upper() + what[1:])
        for panel in axes[len(self.panels) :]:
            panel.set_visible(False)
        for panel, name in zip(axes, self.panels, strict=False):
            style.title(panel, name)
        return made, zip(axes, self.panels.values(), strict=False)


def _scores(grid: _Grid) -> Figure:
    """Draw the score of each seed, their mean and standard deviation."""
    what = grid.score.text
    if grid.seeds > 1:
        what += ": a dot per seed, a bar for the mean, a line for the standard deviation"
    made, panels = grid.figure(what, 0.25 * len(grid.styles) + 0.3)
    for panel, cells in panels:
        style.rows_axis(panel, list(cells))
        panel.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        panel.set_xlabel(grid.score.text)
        for row, (line, cell) in enumerate(cells.items()):
            colour, mean = grid.styles[line]["color"], cell.spread.mean
            if mean is not None:
                panel.errorbar(mean, row, xerr=cell.spread.std or 0, color=colour, lw=2)
                panel.plot(mean, row, "|", color=colour, ms=12, mew=2.4)
                panel.plot(cell.scores, [row] * len(cell.scores), "o", color=colour, ms=5,
                           alpha=0.55, mew=0)  # fmt: skip
            style.aside(panel, row, _text(cell), style.GREY if mean is None else style.INK)
        if not any(cell.scores for cell in cells.values()):
            panel.set_xticks([])
    return made


def _sweep(grid: _Grid) -> Figure:
    """Draw the score by tuned value."""
    score = grid.cells[0].study.score
    what = f"{score.text} over the values tried; filled: the best; crosses on top: diverged"
    made, panels = grid.figure(what, 3.3)
    handles = {}
    values = sorted({value for cell in grid.cells for value in cell.tried})
    for panel, cells in panels:
        low, high = _range([list(cell.tried.values()) for cell in cells.values()], score)
        panel.set_ylim(low, high)
        style.log_axis(panel.xaxis, values[0], values[-1])
        if len(values) <= _MOST_TICKS:
            panel.set_xticks(values)
        for line, cell in cells.items():
            if not cell.tried:
                continue
            look = grid.styles[line]
            tried = {value: s for value, s in cell.tried.items() if math.isfinite(s)}
            [handles[line]] = panel.plot([*tried], [*tried.values()], lw=1.5, marker="o", ms=4.5,
                                         mfc="white", mew=1.2, label=line, **look)  # fmt: skip
            if lost := [value for value in cell.tried if value not in tried]:
                panel.plot(lost, [high] * len(lost), "x", color=look["color"], ms=6, mew=1.6,
                           clip_on=False)  # fmt: skip
            if cell.tuned in tried:
                panel.plot(cell.tuned, tried[cell.tuned], "o", color=look["color"], ms=6.5)
        keys = dict.fromkeys(cell.key for cell in cells.values() if cell.key)
        panel.set_xlabel(" / ".join(keys))
        panel.set_ylabel(score.text)
    columns = min(len(handles), max(1, 110 // (max(map(len, handles)) + 7)))
    made.legend(handles=[*handles.values()], loc="outside lower center", ncols=columns,
                fontsize=style.TEXT_SIZE, labelcolor=style.INK, frameon=False)  # fmt: skip
    return made


def _losses(grid: _Grid, against: str) -> Figure:
    """Draw the mean loss over the seeds and its standard deviation, by steps or by bytes."""
    text = grid.score.text.removeprefix("final ").removeprefix("smallest ")
    what = f"{text} against {against}"
    if grid.seeds > 1:
        what += f": mean over {grid.seeds} seeds, and the standard deviation"
    made, panels = grid.figure(what, 3.3)
    bands = {cell.cell.slug: _band(cell, against) for cell in grid.cells}
    drawn = [band for band in bands.values() if band]
    last = max(x[-1] for x, _, _ in drawn)
    for panel, cells in panels:
        shown = [band for cell in cells.values() if (band := bands[cell.cell.slug])]
        late = [list(middle[x >= _FROM * x[-1]]) for x, middle, _ in shown]
        low, high = _range(late, grid.score)
        panel.set_ylim(low, high)
        panel.set_xlim(0, 1.02 * last)
        panel.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        if against == _BYTES:
            panel.xaxis.set_major_formatter(style.bytes_tick)
            if last > 8 * min(x[-1] for x, _, _ in drawn):
                first = min(x[x >= _FROM * x[-1]][0] for x, _, _ in drawn)
                style.log_axis(panel.xaxis, 0.8 * first, last, style.bytes_tick)
        labels = []
        for line, cell in cells.items():
            if band := bands[cell.cell.slug]:
                x, middle, spread = band
                look = grid.styles[line]
                panel.plot(x, middle, lw=1.7, marker="o" if len(x) == 1 else "", **look)
                panel.fill_between(x, middle - spread, middle + spread, color=look["color"],
                                   alpha=0.15, lw=0)  # fmt: skip
                end = (x[-1], middle[-1])
                labels.append(style.Label(end, line, look["color"]))
        panel.set_xlabel(against)
        panel.set_ylabel(text)
        style.label_right(panel, labels)
    return made


def _band(cell: CellState, against: str) -> tuple[Array, Array, Array] | None:
    """Return x, mean and standard deviation over the seeds that did not diverge."""
    runs = [load(done.folder.path) for done in cell.runs if not done.diverged]
    table = aligned((_loss(run, cell.study.shown) for run in runs), interpolate=True)
    if table.empty:
        return None
    x = table.index.to_numpy()
    if against == _BYTES:  # with coins each seed sends at other steps
        x = np.mean([at(sent(run), x) / run.summary["clients"] for run in runs], axis=0)
    return x, table.mean(axis=1).to_numpy(), table.std(axis=1).fillna(0).to_numpy()


def _loss(run: RunRecord, score: ScoreSpec) -> Curve:
    """Return a run's loss by step, from the first window on."""
    if score.where == "train":
        return Curve.of((line["step"], line["train_loss"]) for line in run.windows)
    curve = heldout(run, score.metric, score.where)
    return Curve(curve.x[curve.x > 0], curve.y[curve.x > 0])


def _range(courses: Sequence[Sequence[float]], score: ScoreSpec) -> tuple[float, float]:
    """Return limits that show the best and the last of each course, and the whole of half of them.

    >>> _range([[9.0, 1.0, 2.0], [3.0, 2.0, 2.0]], ScoreSpec())
    (0.7, 6.3)
    """
    finite = [[score.sign * y for y in course if math.isfinite(y)] for course in courses]
    finite = [course for course in finite if course]
    if not finite:
        return 0.0, 1.0
    best = min(map(min, finite))
    worst = max(*(c[-1] for c in finite), *map(min, finite), float(np.median([*map(max, finite)])))
    margin = 0.06 * (worst - best or 1)
    first, last = score.sign * (best - margin), score.sign * (worst + margin)
    return min(first, last), max(first, last)


def _text(cell: CellState) -> str:
    if cell.spread.mean is None:
        return "diverged" if cell.diverged or cell.all_diverged else "not run"
    diverged = f", {cell.diverged} diverged" if cell.diverged else ""
    return cell.spread.text(3) + diverged
