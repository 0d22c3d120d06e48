"""Differences paired by seed, tables and figures: shared by everything in this folder."""

import csv
import io
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from matplotlib.axes import Axes

from flower_desloc.app.runs.figures import style
from flower_desloc.app.runs.paired import Estimate as Estimate
from flower_desloc.app.runs.paired import differences as differences

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from common import about as about
from common import commit_of as commit_of
from common import table as markdown

ROOT = Path(__file__).resolve().parents[1]
RESEARCH = ROOT / "research"
RESULTS = RESEARCH / "results"
TABLES = RESEARCH / "tables"
PARTITIONS = {"iid": "IID", "by_domain": "by domain"}
BLUE, RED, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
PINK, LIGHT, GREY = "#CC79A7", "#999999", "#777777"
SPARE = 100
"""Seeds from here on tune learning rates; they are not in any comparison."""

Run = dict[str, Any]
T = TypeVar("T")


def spread(values: Sequence[float]) -> str:
    """Return the mean and the standard deviation."""
    mean = f"{statistics.fmean(values):.4g}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.2g}"


def required(runs: Sequence[T], where: Path) -> Sequence[T]:
    """Return what was found of some runs; exits where there are none: results would be lost."""
    if not runs:
        sys.exit(f"{where} has no finished runs; the results in {RESULTS} stay as they are")
    return runs


# ----------------------------------------------------------------------------------------- Tables


class Table(NamedTuple):
    """A table of a page, or of research/tables."""

    heads: Sequence[str]
    rows: Sequence[Sequence[object]]

    @property
    def markdown(self) -> str:
        return markdown(self.heads, self.rows)

    @property
    def csv(self) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.heads, *self.rows])
        return text.getvalue()


Draw = Callable[[], Table]


def between(page: Path, marker: str) -> tuple[str, str, str]:
    """Return what is before, between and after the two markers of a page."""
    pattern = rf"(.*<!-- {marker} -->\n)(.*?)\n?(<!-- /{marker} -->.*)"
    found = re.fullmatch(pattern, page.read_text(), flags=re.S)
    assert found, f"{page}: no markers of {marker}"
    return found[1], found[2], found[3]


def write_between(page: Path, marker: str, text: str) -> None:
    """Replace what is between the two markers of a page."""
    before, _, after = between(page, marker)
    page.write_text(f"{before}{text}\n{after}")


# ---------------------------------------------------------------------------------------- Figures

Line = tuple[str, str, str, Iterable[tuple[float, Estimate]]]
"""A label, a colour, matplotlib's format and the points."""
Ticks = Sequence[float] | Mapping[float, str]


def published(name: str) -> Path:
    """Return the path of a figure."""
    return RESEARCH / name


def draw_lines(
    panel: Axes, lines: Iterable[Line], title: str, x: str, ticks: Ticks = (), **axes: Any
) -> None:
    """Draw lines with intervals into a panel."""
    for name, colour, form, points in lines:
        at, y = zip(*points, strict=True)
        reach = [one.reach if math.isfinite(one.reach) else math.nan for one in y]
        how: dict[str, Any] = {"ms": 4, "lw": 1.2, "capsize": 3, "color": colour, "label": name}
        panel.errorbar(at, [one.mean for one in y], reach, fmt=form, **how)
    panel.set(**axes)
    label(panel, title, x, ticks)


def label(panel: Axes, title: str, x: str, ticks: Ticks = ()) -> None:
    """Write a panel's title, x axis and legend; with ``ticks`` the axis is logarithmic."""
    style.title(panel, title)
    panel.set_xlabel(x)
    if ticks:
        panel.set_xscale("log")
        words = ticks.values() if isinstance(ticks, Mapping) else ticks
        panel.set_xticks(list(ticks), list(map(str, words)))
        panel.minorticks_off()
    panel.legend(frameon=False, fontsize=8)


def figure(
    name: str, panels: Mapping[str, Iterable[Line]], x: str, y: str, zero: bool = True, **axes: Any
) -> None:  # fmt: skip
    """Draw research/NAME.png: panels of lines side by side, by title."""
    made, places = style.figure(1, len(panels), 3.6, sharey=True)
    for panel, (title, lines) in zip(places, panels.items(), strict=True):
        if zero:
            panel.axhline(0, color=GREY, lw=0.8)
        draw_lines(panel, lines, title, x, **axes)
    places[0].set_ylabel(y)
    made.savefig(published(f"{name}.png"), dpi=100)
