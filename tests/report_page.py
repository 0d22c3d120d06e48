"""Reports of runs: the page as a test reads it, and the shortest runs that have one."""

from html.parser import HTMLParser
from typing import Any

from matplotlib.figure import Figure
from tiny import TINY

from flower_desloc.app.plan.wall_clock import REPORTED
from flower_desloc.app.runs.report import write_report
from flower_desloc.app.runs.report.sections import sections

PNG = b"\x89PNG\r\n\x1a\n"
SHORT = [*TINY, "run.steps=8", "run.eval_every=4", "simulation.num_clients=2"]
CLOCKS = ["sync.params=2", "sync.exp_avg=4", "sync.exp_avg_sq=8"]


class Page(HTMLParser):
    """The text, attributes and rows of tables of a page; fails if tags do not match."""

    def __init__(self, path):
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, Any]] = []
        self.text: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data.strip())
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)

    def having(self, tag, name):
        return [value for *where, value in self.attributes if where == [tag, name]]

    @property
    def sections(self):
        return self.having("section", "id")


def page_of(path, output):
    return Page(write_report([path], output, pngs=False))


def skip_images(patch):
    """Leave the pictures of a page empty: they take most of its time."""
    empty = {"uri": "data:,", "width": 1, "height": 1}
    patch.setattr("flower_desloc.app.runs.report.page._image", lambda _: empty)


def keys(*runs):
    return [section.key for section in sections(runs, REPORTED)]


def made(figure: Figure | None) -> Figure:
    assert figure is not None
    return figure


def skip_pages(patch):
    """Skip the slowest step at the end of a run."""
    patch.setattr("flower_desloc.app.runs.report.write_page", lambda *_: None)
