"""The HTML page of a report, and its figures as PNGs."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
from matplotlib.figure import Figure

from flower_desloc import __version__
from flower_desloc.app.plan.wall_clock import REPORTED, Link
from flower_desloc.app.runs.groups import grouped
from flower_desloc.app.runs.record import RunRecord, find, load
from flower_desloc.app.runs.report import tables
from flower_desloc.app.runs.report.sections import Section, sections
from flower_desloc.app.runs.report.template import PAGE, STYLE
from flower_desloc.flower.atomic import atomic_write

_DPI = 150


def write_report(
    paths: Sequence[str | Path],
    output: str | Path | None = None,
    *,
    link: Link = REPORTED,
    pngs: bool = True,
) -> Path:
    """Write the report of the runs at and below ``paths``; return the path of the page.

    ``output`` is the HTML file; by default ``report.html`` in the run's folder or, for several
    runs, in the current one. ``link`` is that of the modelled wall-clock. With ``pngs`` a folder
    with the page's name gets every figure as a PNG.

    Raises ``NoRunError`` if there is no run or its files cannot be read, and ``OSError`` if a
    file cannot be written.
    """
    runs = [load(path) for path in find(paths)]
    default = runs[0].path if len(runs) == 1 else Path.cwd()
    page = Path(output).expanduser() if output else default / "report.html"
    parts = write_page(runs, page, link)
    if pngs:
        folder = page.with_suffix("")
        folder.mkdir(exist_ok=True)
        for part in parts:
            if part.figure is not None:
                part.figure.savefig(folder / f"{part.key}.png", dpi=_DPI)
    return page


def write_page(runs: Sequence[RunRecord], page: Path, link: Link = REPORTED) -> Sequence[Section]:
    """Write the page; return its sections."""
    html, parts = html_of(runs, link)
    with atomic_write(page) as partial:
        partial.write_text(html, encoding="utf-8")
    return parts


def html_of(
    runs: Sequence[RunRecord], link: Link = REPORTED, version: str = ""
) -> tuple[str, Sequence[Section]]:
    """Return the page and its sections.

    With a ``version`` the page asks its server for the present one (``live``), and loads itself
    again when that is another.
    """
    parts = sections(runs, link)
    template = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    ).from_string(PAGE)
    # Without a salt the ids in an SVG are random: the same runs should give the same page.
    with mpl.rc_context({"svg.hashsalt": "flower-desloc"}):
        images = {part.key: _image(part.figure) for part in parts if part.figure is not None}
    if len(runs) == 1:
        run = runs[0]
        what = f"{run.optimizer_and_clients}, task {run.task}, seed {run.seed}; {run.averaged}."
        head = {
            "title": run.name,
            "badge": run.status,
            "subtitle": f"{what} {tables.progress(run).capitalize()}.",
            "error": run.summary.get("error"),
            "tiles": tables.tiles(run),
        }
    else:
        labels = [group.label for group in grouped(runs)]
        seeds = ", with several seeds" if len(labels) == 1 else ""
        head = {"title": f"{len(runs)} runs", "subtitle": ", ".join(labels) + seeds}
        head |= {"badge": "", "error": "", "tiles": []}
    common = {"sections": parts, "images": images, "style": STYLE, "version": __version__}
    return template.render(**head, **common, live=version), parts


def _image(made: Figure) -> dict[str, Any]:
    """Return the figure as a data URI, so that its ids are separate from those of the others."""
    file = io.BytesIO()
    made.savefig(file, format="svg", metadata={"Date": None})
    made.set_layout_engine("none")  # a PNG keeps this layout
    data = base64.b64encode(file.getvalue()).decode()
    return {
        "uri": f"data:image/svg+xml;base64,{data}",
        "width": round(96 * made.get_figwidth()),
        "height": round(96 * made.get_figheight()),
    }
