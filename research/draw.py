"""Draw every table and figure of this folder from research/results; nothing is trained.

    python research/draw.py            # all of them
    python research/draw.py theorem    # those whose name starts so

Tables are written to research/tables/NAME.csv, and between the markers of the pages that show one.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import attacks
import bounded_averages
import doubling
import entropy
import error_feedback
import ladder
import late_averages
import leanest
import non_iid
import paper
import sparse_loco
import theorem
import unequal_speeds
from paired import RESEARCH, ROOT, TABLES, Draw, write_between

sys.path.append(str(RESEARCH / "thin_links"))
import report

SMALL = (bounded_averages, doubling, error_feedback, late_averages, leanest, sparse_loco)
CSV: dict[str, Draw] = {
    **ladder.TABLES,
    **paper.TABLES,
    **{study.__name__: study.table for study in (*SMALL, unequal_speeds)},
    "unequal_speeds_sooner": unequal_speeds.sooner,
    "attacks": attacks.table,
    "entropy": entropy.table,
    **theorem.TABLES,
    **non_iid.TABLES,
    **report.TABLES,
}
"""The tables of research/tables."""
ON_PAGES: dict[tuple[str, str], Draw] = {
    ("research/paper.md", "half the bytes"): ladder.first_table,
    ("research/ladder.md", "ladder"): ladder.lean_table,
    ("research/theorem.md", "theorem"): theorem.TABLES["theorem"],
    ("research/thin-links.md", "thin links"): report.summary,
    ("docs/how-to/compress.md", "compression"): paper.formats,
}
"""The tables of pages, by page and marker."""
FIGURES: dict[str, Callable[[], None]] = {
    "ladder": ladder.picture,
    "theorem": theorem.picture,
    "thin_links": report.picture,
    **{m.__name__: m.picture for m in (doubling, late_averages, leanest)},
    "unequal_speeds": unequal_speeds.picture,
    **non_iid.FIGURES,
}


def main(prefix: str = "") -> None:
    for name, draw in CSV.items():
        if name.startswith(prefix):
            path = TABLES / f"{name}.csv"
            path.write_text(draw().csv)
            print(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    for (page, marker), draw in ON_PAGES.items():
        if marker.replace(" ", "_").startswith(prefix):
            write_between(ROOT / page, marker, draw().markdown)
    for name, picture in FIGURES.items():
        if name.startswith(prefix):
            picture()


if __name__ == "__main__":
    main(*sys.argv[1:])
