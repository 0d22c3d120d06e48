"""Cost of a window, compared with NVFlare, torchft and Flower on the same machine.

    python benchmarks/peers/run.py [--peers desloc-federate,nvflare-poc] [--sizes 4,120,540]
                                   [--steps 1] [--repeats 2] [--environments FOLDER] [--out FILE]

Four sites and a server; a window is so many steps of AdamW on 32 tokens each, after which the
parameters are averaged; nothing is evaluated. ``desloc-federate-moments`` also averages the first
moment after every third window and the second after every sixth, the paper's periods, and
``desloc-federate-lean`` sends what the preset ``lean`` does.

The peers take turns, and the turns begin with another peer each time. FOLDER holds the virtual
environments of NVFlare and torchft (README.md in this folder). Results are appended to FILE, a line
each, and runs that are there are not repeated.

Seconds are those between the beginnings of a site's windows, the median over sites and windows
after the first two; for windows of several steps the mean over six, one cycle of the paper's
periods. CPU-seconds and memory are of all processes, as in federate_window.py. A peer on a busy
machine may give up.
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
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Case:
    """What is measured."""

    size: int
    """Megabytes of parameters."""
    steps: int
    """Local steps of a window."""
    windows: int
    folder: Path
    """To work in."""
    environments: Path


Command = Callable[[Case], list[str]]


def _desloc(command: str, *more: str, moments: tuple[int, int] | None = None) -> Command:
    """``moments``: after how many windows the first and the second are averaged."""

    def words(case: Case) -> list[str]:
        app = "from flower_desloc.app.cli import app; app()"
        k = case.steps
        periods = [f"sync.params={k}", f"run.steps={k * case.windows}"]
        if moments:
            periods += [f"sync.exp_avg={k * moments[0]}", f"sync.exp_avg_sq={k * moments[1]}"]
        return [
            *(sys.executable, "-c", app, command, "quickstart"),
            *(*run_settings(case.size, case.windows), *periods),
            "optimizer.clip_norm=null",  # as the peers' sites
            "run.preflight=warn",  # measured, also where it would be refused
            *more,
            *("--output-dir", str(case.folder)),
        ]

    return words


def _nvflare(where: str) -> Command:
    return lambda case: [
        *(str(case.environments / "nvflare/bin/python"), str(HERE / "nvflare_run.py")),
        *(where, str(SITES), str(case.windows), str(case.folder)),
    ]


def _torchft(case: Case) -> list[str]:
    script = str(HERE / "torchft_run.py")
    return [str(case.environments / "torchft/bin/python"), script, str(SITES), str(case.windows)]


def _flower(where: str) -> Command:
    return lambda case: [
        *(sys.executable, str(HERE / "flower_run.py")),
        *(where, str(SITES), str(case.windows), str(case.folder)),
    ]


PEERS: dict[str, Command] = {
    "desloc-federate": _desloc("federate", "--nodes", str(SITES)),
    "desloc-federate-moments": _desloc("federate", "--nodes", str(SITES), moments=(3, 6)),
    "desloc-federate-lean": _desloc(
        *("federate", "--nodes", str(SITES), "compression.params=int8", "compression.exp_avg=int4"),
        "compression.exp_avg_sq=int8",
        moments=(1, 6),
    ),
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
    steps: int = 1,
    repeats: int = 2,
    environments: Path = ENVIRONMENTS,
    out: Path = HERE.parent / "results" / "peers.jsonl",
) -> None:
    """Measure the peers in turns."""
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    known = {(line["peer"], line["size"], line.get("steps", 1), line["repeat"]) for line in done}
    names = peers.split(",")
    for repeat in range(repeats):
        for size in map(int, sizes.split(",")):
            for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
                if (name, size, steps, repeat) in known:
                    continue
                print(name, size, repeat, flush=True)
                found = measure(name, size, steps, windows, environments)
                of = {"peer": name, "size": size, "steps": steps, "repeat": repeat}
                line = {**of, **found, **about()}
                with out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(json.dumps(found), flush=True)


def measure(name: str, size: int, steps: int, windows: int, environments: Path) -> dict[str, Any]:
    """Return seconds, CPU-seconds and memory of a window; with ``error`` of one that failed."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "stamps").mkdir()
        case = Case(size, steps, WARM_UP + windows, folder, environments.resolve())
        with _running(PEERS[name](case), case) as (run, usage):
            used = usage.at_each(run, lambda: min(map(len, _windows(name, folder)), default=0))
        begun = _windows(name, folder)
        if run.returncode or min(map(len, begun), default=0) <= WARM_UP + 1:
            return {"error": (folder / "log").read_text()[-2000:]}
    at = [sum(each.values()) for each in used]  # CPU-seconds when each window begins
    seconds = [b - a for t in begun for a, b in pairwise(t[WARM_UP - 1 :])]
    return {
        "seconds": statistics.mean(seconds) if steps > 1 else statistics.median(seconds),
        "cpu_seconds": (at[-1] - at[WARM_UP - 1]) / (len(at) - WARM_UP),
        "memory_bytes": usage.memory.total(),
    }


@contextmanager
def _running(command: list[str], case: Case) -> Iterator[tuple["subprocess.Popen[bytes]", Usage]]:
    mark = uuid.uuid4().hex
    environment = {
        **os.environ,
        "BENCHMARK_MARK": mark,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}",
        "PEERS_SHAPE": json.dumps(SHAPES[case.size]),
        "PEERS_STEPS": str(case.steps),
        "PEERS_STAMPS": str(case.folder / "stamps"),
        "NVFLARE_POC_WORKSPACE": str(case.folder / "poc"),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with (case.folder / "log").open("wb") as log:
        run = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=case.folder)
        try:
            yield run, Usage(mark)
        finally:
            run.kill()


def _windows(name: str, folder: Path) -> list[list[float]]:
    """Return for each site the times at which its windows begin; of our runs, for all at once."""
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
