"""Figures of a study: scores, searches, and losses against steps and against bytes.

Each value of the study's longest axis is one line, with the same colour in every figure. Each
combination of the other axes is one panel.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator

from flower_desloc.runs.figures.curves import Array, Band, Curve, at, heldout, sent
from flower_desloc.runs.figures.style import (
    GREY,
    HEAD,
    INK,
    PARTS,
    Label,
    beside,
    bytes_axis,
    figure,
    headline,
    log_axis,
    rows_axis,
    short_bytes,
    title,
)
from flower_desloc.runs.record import RunRecord, load
from flower_desloc.tools.study.grid import ScoreSpec
from flower_desloc.tools.study.results import CellResult

_DPI: Final = 130
_TEXT: Final = 9
_BYTES: Final = "bytes sent by a client"
_MOST_TICKS: Final = 7
_FROM: Final = 0.25
"""Share of a run before which losses do not set the limits of a panel."""


def draw(results: Sequence[CellResult], folder: Path) -> list[Path]:
    """Draw the figures that have data into ``folder``; return their paths."""
    figures: dict[str, Callable[[_Layout], Figure]] = {}
    if any(cell.scores for cell in results):
        figures["scores.png"] = _scores
        figures["loss_by_step.png"] = _loss_by_step
        figures["loss_by_bytes.png"] = _loss_by_bytes
    if any(len(cell.tried) > 1 for cell in results):
        figures["sweep.png"] = _sweep
    layout = _Layout.of(results)
    for name, make in figures.items():
        make(layout).savefig(folder / name, dpi=_DPI)
    return [folder / name for name in figures]


@dataclass(frozen=True)
class _Layout:
    """Panel and colour of each cell."""

    results: Sequence[CellResult]
    axis: str | None
    """The longest axis, whose values are the lines of the panels."""
    styles: Mapping[str, dict[str, Any]]
    """Colour of each line; dashed if there are more lines than colours."""

    @classmethod
    def of(cls, results: Sequence[CellResult]) -> "_Layout":
        axes = results[0].study.axes
        axis = max(axes, key=lambda each: len(axes[each]), default=None)
        names = axes[axis] if axis else (results[0].study.name,)
        return cls(
            results,
            axis,
            {
                name: {"color": colour, "ls": "-" if number < len(PARTS) else "--"}
                for number, (name, colour) in enumerate(zip(names, cycle(PARTS), strict=False))
            },
        )

    @property
    def score(self) -> ScoreSpec:
        """The number of a run that counts."""
        return self.results[0].study.score

    @property
    def seeds(self) -> int:
        """Number of seeds of a complete cell."""
        return len(self.results[0].study.seeds)

    @property
    def panels(self) -> dict[str, dict[str, CellResult]]:
        """The cell of each line, by panel."""
        panels: dict[str, dict[str, CellResult]] = {}
        for cell in self.results:
            others = [label for axis, label in cell.labels.items() if axis != self.axis]
            line = cell.labels[self.axis] if self.axis else cell.study.name
            panels.setdefault(", ".join(others), {})[line] = cell
        return panels

    def figure(
        self, what: str, height: float
    ) -> tuple[Figure, list[tuple[Axes, dict[str, CellResult]]]]:
        """Return a figure, and its panels, ``height`` inches high, with the cells of each."""
        panels = self.panels
        columns = min(3, len(panels)) if len(panels) != 4 else 2
        lines = math.ceil(len(panels) / columns)
        width = max(7.2, 0.3 + columns * (3.7 + 0.075 * max(map(len, self.styles))))
        made, axes = figure(lines, columns, HEAD + lines * (height + 0.8))
        made.set_figwidth(width)
        headline(made, self.results[0].study.name, what)
        for panel in axes[len(panels) :]:
            panel.set_visible(False)
        for panel, panel_name in zip(axes, panels, strict=False):
            title(panel, panel_name)
        return made, list(zip(axes, panels.values(), strict=False))


def _scores(layout: _Layout) -> Figure:
    """Draw the score of each seed, their mean and standard deviation."""
    text = layout.score.text
    what = _sentence(text)
    if layout.seeds > 1:
        what += ": a dot per seed, a bar for the mean, a line for the standard deviation"
    made, panels = layout.figure(what, 0.25 * len(layout.styles) + 0.3)
    for panel, cells in panels:
        rows_axis(panel, list(cells))
        panel.grid(visible=True, axis="x", color="#EDEDED", lw=0.8)
        panel.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        panel.set_xlabel(text, fontsize=_TEXT, color=INK)
        for height, (line, cell) in enumerate(cells.items()):
            colour = layout.styles[line]["color"]
            if cell.mean is not None:
                spread = cell.std or 0.0
                panel.plot(
                    [cell.mean - spread, cell.mean + spread], [height] * 2, color=colour, lw=2
                )
                panel.plot(cell.mean, height, "|", color=colour, ms=12, mew=2.4)
                panel.plot(cell.scores, [height] * len(cell.scores), "o", color=colour, ms=5,
                           alpha=0.55, mew=0)  # fmt: skip
            panel.annotate(
                _text(cell), (1.02, height), xycoords=("axes fraction", "data"), va="center",
                fontsize=_TEXT, color=INK if cell.mean is not None else GREY,
            )  # fmt: skip
        if not any(cell.scores for cell in cells.values()):
            panel.set_xticks([])
    return made


def _sweep(layout: _Layout) -> Figure:
    """Draw the score by tuned value."""
    text = layout.score.text
    what = f"{_sentence(text)} over the values tried; filled: the best; crosses on top: diverged"
    made, panels = layout.figure(what, 3.3)
    low, high = _range([list(cell.tried.values()) for cell in layout.results])
    handles = {}
    values = sorted({value for cell in layout.results for value in cell.tried})
    for panel, cells in panels:
        panel.set_ylim(low, high)
        log_axis(panel.xaxis, values[0], values[-1])
        if len(values) <= _MOST_TICKS:
            panel.xaxis.set_major_locator(FixedLocator(values))
        for line, cell in cells.items():
            if not cell.tried:
                continue
            style = layout.styles[line]
            tried = {value: s for value, s in cell.tried.items() if math.isfinite(s)}
            [handles[line]] = panel.plot([*tried], [*tried.values()], lw=1.5, marker="o", ms=4.5,
                                         mfc="white", mew=1.2, label=line, **style)  # fmt: skip
            if lost := [value for value in cell.tried if value not in tried]:
                panel.plot(lost, [high] * len(lost), "x", color=style["color"], ms=6, mew=1.6,
                           clip_on=False)  # fmt: skip
            if cell.tuned in tried:
                panel.plot(cell.tuned, tried[cell.tuned], "o", color=style["color"], ms=6.5)
        panel.set_xlabel(_keys(cells.values()), fontsize=_TEXT, color=INK)
        panel.set_ylabel(text, fontsize=_TEXT, color=INK)
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
    bands = {cell.state.cell.slug: _band(cell, against) for cell in layout.results}
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
        for line, cell in cells.items():
            if band := bands[cell.state.cell.slug]:
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


def _band(cell: CellResult, against: str) -> tuple[Array, Array, Array] | None:
    """Return x, mean and standard deviation over the seeds that did not diverge."""
    runs = [load(done.folder.path) for done in cell.runs if not done.diverged]
    band = Band.of([_loss(run, cell.study.score) for run in runs]).between()
    if not band.x.size:
        return None
    x = band.x
    if against == _BYTES:  # with coins each seed sends at other steps
        x = np.mean([at(sent(run), x) / run.summary["clients"] for run in runs], axis=0)
    return x, band.mean().y, band.std()


def _loss(run: RunRecord, score: ScoreSpec) -> Curve:
    """Return a run's loss by step, from the first window on."""
    if score.where == "train":
        return Curve.of((line["step"], line["train_loss"]) for line in run.windows)
    curve = heldout(run, score.metric, score.where)
    return Curve(curve.x[curve.x > 0], curve.y[curve.x > 0])


def _range(courses: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return limits that show the best of each course, and the whole of half of them."""
    finite = [[y for y in course if math.isfinite(y)] for course in courses]
    finite = [course for course in finite if course]
    if not finite:
        return 0.0, 1.0
    low = min(map(min, finite))
    high = max(*map(min, finite), float(np.median([max(course) for course in finite])))
    margin = 0.06 * (high - low or 1)
    return low - margin, high + margin


def _text(cell: CellResult) -> str:
    if cell.mean is None:
        return "diverged" if cell.diverged or cell.all_diverged else "not run"
    spread = "" if cell.std is None else f" ± {cell.std:.3f}"
    return f"{cell.mean:.3f}{spread}" + (f", {cell.diverged} diverged" if cell.diverged else "")


def _keys(results: Iterable[CellResult]) -> str:
    return " / ".join(dict.fromkeys(cell.key for cell in results if cell.key))


def _fit(names: Iterable[str]) -> int:
    """Return how many columns of a legend fit below the panels."""
    names = list(names)
    return min(len(names), max(1, 110 // (max(map(len, names)) + 7)))


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
