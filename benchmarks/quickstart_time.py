"""Wall-clock time of the quickstart, compared with another version of the code.

    git clone . ../earlier && git -C ../earlier checkout 7279700^
    (cd ../earlier && python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e .)
    python benchmarks/quickstart_time.py ../earlier [--pairs 3] [--json FILE] [KEY=VALUE ...]

Both versions are set up as the README says, in a clone with its own virtual environment, and run
`desloc run quickstart` with the settings given, in turns: the order is reversed with each pair.
Without settings it is the earlier quickstart, with ADOPT.
"""

import tempfile
import time
from pathlib import Path

import typer
from common import Overrides, commit_of, desloc_run, extremes, ratios, report

ROOT = Path(__file__).resolve().parents[1]
ADOPT = ["optimizer.name=adopt", "optimizer.lr=0.0021", "optimizer.betas=[0.95,0.9999]"]
ADOPT += ["optimizer.eps=1e-6"]


def seconds(clone: Path, settings: list[str]) -> float:
    """Return the wall-clock time of one run with a clone's own virtual environment."""
    python = clone / ".venv" / "bin" / "python"
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        done = desloc_run(clone, ["quickstart", *settings, "--output-dir", folder], python)
        took = time.perf_counter() - began
    if done.returncode != 0:
        raise RuntimeError(f"{clone}: {done.stdout}{done.stderr}")
    return took


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
    result = {
        "earlier_commit": commit_of(earlier),
        "settings": settings,
        "pairs": pairs,
        "seconds": {name: extremes(values) for name, values in took.items()},
        "now_to_earlier": extremes(ratios(took["now"], to=took["earlier"])),
    }
    report(result, json)


if __name__ == "__main__":
    typer.run(main)
