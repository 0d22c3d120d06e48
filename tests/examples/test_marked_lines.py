"""What a training script of one's own needs to become a client: the lines that are marked."""

import pytest
from scripts import ROOT


@pytest.mark.parametrize("name", ["own_loop", "hf_trainer", "lightning_client"])
def test_the_example_marks_five_lines_and_the_page_shows_them(name):
    lines = (ROOT / "examples" / f"{name}.py").read_text().splitlines()
    marked = [line for line in lines if "  # " in line and line.rpartition("  # ")[2][0] in "12345"]
    assert len(marked) == 5
    page = (ROOT / "docs" / "tutorials" / "your-own-app.md").read_text()
    assert [line for line in marked if line not in page] == []
