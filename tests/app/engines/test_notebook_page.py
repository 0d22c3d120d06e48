"""The notebook of the documentation, run by a kernel; and what a run prints without one."""

import io
import sys
from pathlib import Path

import pytest

from flower_desloc.app.engines.shown import Shown

PAGE = Path(__file__).resolve().parents[3] / "docs" / "tutorials" / "notebook.ipynb"
LINES = "size: 1 MB\nstep  8/64  window 1/8  synced params\nstep  8/64  held-out loss 5\n"


def test_without_a_notebook_every_line_is_printed():
    stream = io.StringIO()
    shown = Shown(stream)
    for i in range(0, len(LINES), 7):
        shown.write(LINES[i : i + 7])
    assert stream.getvalue() == LINES


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_notebook_runs_and_shows_bars_tables_and_a_figure(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="needs the extra notebook")
    nbclient = pytest.importorskip("nbclient", reason="needs the extra notebook")
    page = nbformat.read(PAGE, as_version=4)
    assert not [cell for cell in page.cells if cell.get("outputs")]  # kept without
    nbclient.NotebookClient(
        page, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    outputs = [output for cell in page.cells for output in cell.get("outputs", [])]
    shown = [each["data"].get("text/html", "") for each in outputs if "data" in each]
    bars = [html for html in shown if "<progress" in html]
    assert len(bars) == 2
    assert all("value='32'" in bar and "max='32'" in bar for bar in bars)
    assert any("data:image/png;base64," in html for html in shown)
    tables = [html for html in shown if "<table" in html]
    assert any("times_less" in html for html in tables)
    printed = "".join(each["text"] for each in outputs if each.get("name") == "stdout")
    assert "held-out loss" in printed
    assert "synced params" not in printed
    assert sys.getsizeof(nbformat.writes(page)) < 2_000_000
