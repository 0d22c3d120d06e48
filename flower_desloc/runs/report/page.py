"""From runs to files: the page, in one HTML file, and its figures as PNGs."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from flower_desloc import __version__
from flower_desloc.runs.report import tables
from flower_desloc.runs.loaded import Run, find, grouped, load
from flower_desloc.runs.report.sections import Section, sections
from flower_desloc.runs.report.template import PAGE, STYLE
from flower_desloc.runs.report.time_model import DEFAULT_LINK
from flower_desloc.plan.wall_clock import Link

_DPI = 150


def write_report(
    paths: Sequence[str | Path],
    output: str | Path | None = None,
    *,
    link: Link = DEFAULT_LINK,
    pngs: bool = True,
) -> Path:
    """Write the report of the runs at and below ``paths``; return the path of the page.

    Parameters
    ----------
    paths
        Runs' folders, or folders of runs.
    output
        The HTML file; without it ``report.html`` in the run's folder, or, for several runs, here.
    link
        The link of the modelled wall-clock.
    pngs
        Write every figure as a PNG as well, into a folder beside the page that has its name.

    Raises
    ------
    NoRunError
        Where there is no run, or its files cannot be read.
    OSError
        When a file cannot be written.

    """
    runs = [load(path) for path in find(paths)]
    default = runs[0].path if len(runs) == 1 else Path.cwd()
    page = Path(output).expanduser() if output else default / "report.html"
    parts = sections(runs, link)
    # The same report is the same bytes: otherwise there is chance in the ids of an SVG.
    with mpl.rc_context({"svg.hashsalt": "flower-desloc"}):
        text = render(runs, parts)
    page.parent.mkdir(parents=True, exist_ok=True)
    partial = page.with_name(f".{page.name}-partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(page)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if pngs:
        folder = page.with_suffix("")
        folder.mkdir(exist_ok=True)
        for part in parts:
            if part.figure is not None:
                FigureCanvasAgg(part.figure)
                part.figure.savefig(folder / f"{part.key}.png", dpi=_DPI)
    return page


def render(runs: Sequence[Run], parts: Sequence[Section]) -> str:
    """Return the page as HTML that needs nothing else."""
    template = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    ).from_string(PAGE)
    return template.render(
        **(_head_of_one(runs[0]) if len(runs) == 1 else _head_of_many(runs)),
        sections=[_section(part) for part in parts],
        style=STYLE,
        version=__version__,
    )


def _head_of_one(run: Run) -> dict[str, Any]:
    return {
        "title": run.name,
        "badge": run.status,
        "subtitle": f"{tables.sentence(run)} {tables.progress(run).capitalize()}.",
        "error": run.summary.get("error"),
        "tiles": tables.tiles(run),
    }


def _head_of_many(runs: Sequence[Run]) -> dict[str, Any]:
    groups = grouped(runs)
    labels = ", ".join(group.label for group in groups)
    return {
        "title": f"{len(runs)} runs",
        "badge": "",
        "subtitle": labels if len(groups) > 1 else f"{labels}, with several seeds",
        "error": "",
        "tiles": [],
    }


def _section(part: Section) -> Mapping[str, Any]:
    made = part.figure
    return {
        "key": part.key,
        "title": part.title,
        "caption": part.caption,
        "tables": part.tables,
        "small": part.small,
        "image": _image(made) if made is not None else "",
        "width": round(96 * made.get_figwidth()) if made is not None else 0,
        "height": round(96 * made.get_figheight()) if made is not None else 0,
    }


def _image(made: Figure) -> str:
    """Return the figure as a data URI: an SVG of its own, its ids cannot meet another's."""
    file = io.BytesIO()
    made.savefig(file, format="svg", metadata={"Date": None})
    made.set_layout_engine("none")  # laid out; a PNG takes it as it is
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"
