"""Cost of a window, compared with NVFlare, torchft and Flower on the same machine.

    python benchmarks/peers/run.py [--peers desloc-federate,nvflare-poc] [--sizes 4,120,540]
                                   [--repeats 2] [--environments FOLDER] [--out FILE]

Four sites and a server; a window is one step of AdamW on 32 tokens, after which the parameters are
averaged; nothing is evaluated. The peers take turns, and the turns begin with another peer each
time. FOLDER holds the virtual environments of NVFlare and torchft (README.md in this folder).
Results are appended to FILE, a line each, and runs that are there are not repeated.

Seconds are those between the beginnings of a site's steps, the median over sites and windows after
the first two. CPU-seconds and memory are of all processes, as in federate_window.py. A peer on a
busy machine may give up.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import typer
from common import about
from federate_window import SHAPES, WARM_UP, Usage, run_settings

from flower_desloc.app.runs.folder import read_lines

SITES = 4
ENVIRONMENTS = HERE.parents[1] / ".peers"
Command = Callable[[int, int, Path, Path], list[str]]
"""From size, windows, a folder to work in and the folder of environments to a command."""


def _desloc(command: str, *more: str) -> Command:
    def words(size: int, windows: int, folder: Path, _: Path) -> list[str]:
        app = "from flower_desloc.app.cli import app; app()"
        return [
            *(sys.executable, "-c", app, command, "quickstart", *run_settings(size, windows)),
            "run.preflight=warn",  # measured, also where it would be refused
            *more,
            *("--output-dir", str(folder)),
        ]

    return words


def _nvflare(where: str) -> Command:
    return lambda _, windows, folder, environments: [
        *(str(environments / "nvflare/bin/python"), str(HERE / "nvflare_run.py")),
        *(where, str(SITES), str(windows), str(folder)),
    ]


def _torchft(_: int, windows: int, __: Path, environments: Path) -> list[str]:
    script = str(HERE / "torchft_run.py")
    return [str(environments / "torchft/bin/python"), script, str(SITES), str(windows)]


def _flower(where: str) -> Command:
    return lambda _, windows, folder, __: [
        *(sys.executable, str(HERE / "flower_run.py")),
        *(where, str(SITES), str(windows), str(folder)),
    ]


PEERS: dict[str, Command] = {
    "desloc-federate": _desloc("federate", "--nodes", str(SITES)),
    "nvflare-poc": _nvflare("poc"),
    "flower-deployment": _flower("deployment"),
    "torchft": _torchft,
    "desloc-run": _desloc("run", f"simulation.num_clients={SITES}"),
    # As with FedAvg, no client keeps states between windows.
    "desloc-run-reset": _desloc(
        "run", f"simulation.num_clients={SITES}", "sync.exp_avg=reset", "sync.exp_avg_sq=reset"
    ),
    "flower-simulation": _flower("simulation"),
    "nvflare-simulator": _nvflare("simulator"),
}


def main(
    peers: str = ",".join(PEERS),
    sizes: str = "4,120,540",
    windows: int = 6,
    repeats: int = 2,
    environments: Path = ENVIRONMENTS,
    out: Path = HERE.parent / "results" / "peers.jsonl",
) -> None:
    """Measure the peers in turns."""
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    known = {(line["peer"], line["size"], line["repeat"]) for line in done}
    names = peers.split(",")
    for repeat in range(repeats):
        for size in map(int, sizes.split(",")):
            for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
                if (name, size, repeat) in known:
                    continue
                print(name, size, repeat, flush=True)
                found = measure(name, size, windows, environments)
                line = {"peer": name, "size": size, "repeat": repeat, **found, **about()}
                with out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(json.dumps(found), flush=True)


def measure(name: str, size: int, windows: int, environments: Path) -> dict[str, Any]:
    """Return seconds, CPU-seconds and memory of a window; with ``error`` of one that failed."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "stamps").mkdir()
        command = PEERS[name](size, WARM_UP + windows, folder, environments.resolve())
        with _running(command, folder, size) as (run, usage):
            used = usage.at_each(run, lambda: min(map(len, _steps(name, folder)), default=0))
        steps = _steps(name, folder)
        if run.returncode or min(map(len, steps), default=0) <= WARM_UP + 1:
            return {"error": (folder / "log").read_text()[-2000:]}
    at = [sum(each.values()) for each in used]  # CPU-seconds when each step begins
    return {
        "seconds": statistics.median(b - a for t in steps for a, b in pairwise(t[WARM_UP - 1 :])),
        "cpu_seconds": (at[-1] - at[WARM_UP - 1]) / (len(at) - WARM_UP),
        "memory_bytes": usage.memory.total(),
    }


@contextmanager
def _running(
    command: list[str], folder: Path, size: int
) -> Iterator[tuple["subprocess.Popen[bytes]", Usage]]:
    mark = uuid.uuid4().hex
    environment = {
        **os.environ,
        "BENCHMARK_MARK": mark,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}",
        "PEERS_SHAPE": json.dumps(SHAPES[size]),
        "PEERS_STAMPS": str(folder / "stamps"),
        "NVFLARE_POC_WORKSPACE": str(folder / "poc"),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with (folder / "log").open("wb") as log:
        run = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
        try:
            yield run, Usage(mark)
        finally:
            run.kill()


def _steps(name: str, folder: Path) -> list[list[float]]:
    """Return for each site the times at which its steps begin; of our own runs, for all at once."""
    if not name.startswith("desloc"):
        files = (folder / "stamps").iterdir()
        return [[float(line) for line in file.read_text().splitlines()] for file in files]
    times: list[float] = []
    for file in folder.glob("*/metrics.jsonl"):
        windows = [line for line in read_lines(file) if line["round"] > 0]
        times = list(accumulate(line["seconds"] for line in windows))
    return [times]


if __name__ == "__main__":
    typer.run(main)
