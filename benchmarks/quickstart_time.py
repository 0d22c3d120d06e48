"""Wall-clock time of the quickstart, compared with another version of the code.

    git worktree add ../earlier 7279700^
    python benchmarks/quickstart_time.py ../earlier [--pairs 3] [--json FILE] [KEY=VALUE ...]

Both versions run the command `desloc run quickstart` in Flower's simulation with the settings
given, in turns: the order is reversed with each pair. Without settings it is the earlier
quickstart, with ADOPT.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import typer
from common import Overrides, extremes, ratios, report

ROOT = Path(__file__).resolve().parents[1]
ADOPT = ["optimizer.name=adopt", "optimizer.lr=0.0021", "optimizer.betas=[0.95,0.9999]"]
ADOPT += ["optimizer.eps=1e-6"]
COMMAND = [sys.executable, "-c", "from flower_desloc.cli import app; app()", "run", "quickstart"]


def seconds(code: Path, settings: list[str]) -> float:
    """Return the wall-clock time of one run with the code of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(code)}
    with tempfile.TemporaryDirectory() as folder:
        command = [*COMMAND, *settings, "--output-dir", folder]
        began = time.perf_counter()
        subprocess.run(command, cwd=code, env=environment, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - began


def main(
    earlier: Path, overrides: Overrides = None, pairs: int = 3, json: Path | None = None
) -> None:
    """Wall-clock time of the quickstart, compared with another version of the code."""
    settings = overrides or ADOPT
    arms = {"now": ROOT, "earlier": earlier.resolve()}
    took: dict[str, list[float]] = {name: [] for name in arms}
    for pair in range(pairs):
        for name in list(arms) if pair % 2 == 0 else reversed(arms):
            took[name].append(seconds(arms[name], settings))
    commit = ["git", "-C", str(earlier), "rev-parse", "HEAD"]
    result = {
        "earlier_commit": subprocess.run(commit, capture_output=True, text=True).stdout.strip(),
        "settings": settings,
        "pairs": pairs,
        "seconds": {name: extremes(values) for name, values in took.items()},
        "now_to_earlier": extremes(ratios(took["now"], to=took["earlier"])),
    }
    report(result, json)


if __name__ == "__main__":
    typer.run(main)
