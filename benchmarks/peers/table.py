"""The tables of the peers: python benchmarks/peers/table.py [FILE]."""

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from common import table

FILE = HERE.parent / "results" / "peers.jsonl"


def cell(lines: list[dict[str, Any]]) -> str:
    """Return the medians over repeats: seconds, CPU-seconds, memory."""
    good = [line for line in lines if "error" not in line]
    if not good:
        return "failed" if lines else ""
    seconds, busy, memory = (
        median(line[key] for line in good) for key in ("seconds", "cpu_seconds", "memory_bytes")
    )
    return f"{seconds:.2g} s, {busy:.2g} CPU-s, {memory / 1e9:.2g} GB"


def main(file: Path) -> None:
    """Print a table for each number of steps a window has."""
    every = [json.loads(line) for line in file.read_text().splitlines()]
    for steps in sorted({line.get("steps", 1) for line in every}):
        lines = [line for line in every if line.get("steps", 1) == steps]
        sizes = sorted({line["size"] for line in lines})
        rows = [
            [
                f"`{peer}`",
                *(cell([x for x in lines if (x["peer"], x["size"]) == (peer, s)]) for s in sizes),
            ]
            for peer in dict.fromkeys(line["peer"] for line in lines)
        ]
        what = "a window of" if steps == 1 else f"a window of {steps} steps and"
        print(table([what, *(f"{size} MB" for size in sizes)], rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else FILE)
