"""Wall-clock time of the quickstart, compared with another version of the code.

    git clone . ../earlier && git -C ../earlier checkout 7279700^
    (cd ../earlier && python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e '.[app]')
    python benchmarks/quickstart_time.py ../earlier [--pairs 3] [--nodes 3] [--json F] [SETTINGS]

Both versions are set up as the README says, in a clone with its own virtual environment, and run
`desloc run quickstart` with the settings given, in turns: the order is reversed with each pair.
Without settings it is the earlier quickstart, with ADOPT. With `--nodes` it is `desloc federate`.
"""

import tempfile
import time
from collections import defaultdict
from pathlib import Path

import typer
from common import Overrides, commit_of, desloc, extremes, ratios, report

from flower_desloc.app.runs.folder import read_lines

ROOT = Path(__file__).resolve().parents[1]
ADOPT = ["optimizer.name=adopt", "optimizer.lr=0.0021", "optimizer.betas=[0.95,0.9999]"]
ADOPT += ["optimizer.eps=1e-6"]


def seconds(clone: Path, arguments: list[str]) -> dict[str, float]:
    """Return the seconds of one run with a clone's own virtual environment, and of its parts."""
    python = clone / ".venv" / "bin" / "python"
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        done = desloc(clone, [*arguments, "--output-dir", folder], python)
        took = time.perf_counter() - began
        if done.returncode != 0:
            raise RuntimeError(f"{clone}: {done.stdout}{done.stderr}")
        (path,) = Path(folder).glob("*/metrics.jsonl")
        windows = [line["seconds_split"] for line in read_lines(path)]
    parts = {name: sum(split[name] for split in windows) for name in ("total", "averaging")}
    return {"command": took, "windows": parts["total"], "averaging": parts["averaging"]}


def main(
    earlier: Path,
    overrides: Overrides = None,
    pairs: int = 3,
    nodes: int = 0,
    json: Path | None = None,
) -> None:
    """Wall-clock time of the quickstart, compared with another version of the code."""
    settings = overrides or ADOPT
    command = ["federate", "--nodes", str(nodes)] if nodes else ["run"]
    arms = {"now": ROOT, "earlier": earlier.resolve()}
    took: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in arms}
    for pair in range(pairs):
        for name in list(arms) if pair % 2 == 0 else reversed(arms):
            for part, value in seconds(arms[name], [*command, "quickstart", *settings]).items():
                took[name][part].append(value)
    now, before = took["now"], took["earlier"]
    result = {
        "commit": commit_of(ROOT),
        "earlier_commit": commit_of(earlier),
        "command": " ".join(command),
        "settings": settings,
        "pairs": pairs,
        "seconds": {
            name: {part: extremes(values) for part, values in parts.items()}
            for name, parts in took.items()
        },
        "now_to_earlier": {part: extremes(ratios(now[part], to=before[part])) for part in now},
    }
    report(result, json)


if __name__ == "__main__":
    typer.run(main)
