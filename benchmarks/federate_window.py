"""Seconds, CPU-seconds and memory of a window of `desloc federate`, by size of the model.

    python benchmarks/federate_window.py [--sites 4] [--windows 6] [--sizes 4,120] [KEY=VALUE ...]

A SuperLink and its SuperNodes run on this machine, over TLS with warm clients. Only parameters are
averaged, after every step; nothing is evaluated. A step is one sequence of 32 tokens, so that
almost only the exchange is measured. Settings that are given as KEY=VALUE apply to every size.

The first two windows are left out. CPU-seconds are those of all processes of the run, read ten
times a second: what a process uses in its last tenth is not counted. Memory is anonymous memory.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import typer
from common import Overrides, extremes, report
from large_payload import ROLES

from flower_desloc.app.runs.folder import read_lines

WARM_UP = 2  # windows
SHAPES = {  # megabytes of parameters -> width, of the feed-forward part, blocks
    4: (128, 256, 6),
    120: (512, 1536, 9),
    540: (1024, 2816, 12),
}
SETTINGS = (
    "sync.params=1 sync.exp_avg=never sync.exp_avg_sq=never data.batch_size=1 data.seq_len=32 "
    "evaluation.federated=false evaluation.central=false run.eval_every=0 "
    "run.checkpoint_every=1000"
)


OWN_ROLES = {  # part of a command line -> role of the process
    "supervisor.py": "supervisors",
    "superexec": "SuperExec and ClientApps",  # what it forks has its command line
    "flwr log": "flwr log",
    "federate quickstart": "desloc federate",
}


def run_settings(size: int, windows: int) -> list[str]:
    """Return the settings of a run with a model of so many megabytes."""
    names = "model.hidden_size", "model.intermediate_size", "model.num_hidden_layers"
    shape = (f"{name}={value}" for name, value in zip(names, SHAPES[size], strict=True))
    return [*SETTINGS.split(), *shape, f"run.steps={windows}"]


class Usage:
    """CPU-seconds and memory, by role, of the processes that inherited ``mark`` in a variable."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.cpu: dict[psutil.Process, tuple[str, float]] = {}
        self.memory: Counter[str] = Counter()
        """When the sum was largest."""
        self._others: set[psutil.Process] = set()

    def sample(self) -> None:
        memory: Counter[str] = Counter()
        for process in psutil.process_iter():
            if process in self._others:
                continue
            with suppress(psutil.Error):
                if process not in self.cpu and self.mark not in process.environ().values():
                    self._others.add(process)
                    continue
                role, times, sizes = self._role(process), process.cpu_times(), process.memory_info()
                self.cpu[process] = role, times.user + times.system
                memory[role] += sizes.rss - sizes.shared
        self.memory = max(self.memory, memory, key=Counter.total)

    def seconds(self) -> dict[str, float]:
        total: dict[str, float] = defaultdict(float)
        for role, seconds in self.cpu.values():
            total[role] += seconds
        return total

    def at_each(
        self, run: "subprocess.Popen[Any]", count: Callable[[], int]
    ) -> list[dict[str, float]]:
        """Return the CPU-seconds whenever ``count`` has grown by one, until the run ends."""
        at: list[dict[str, float]] = []
        while run.poll() is None:
            self.sample()
            at += [self.seconds()] * (count() - len(at))
            time.sleep(0.1)
        return at

    @staticmethod
    def _role(process: psutil.Process) -> str:
        command = " ".join(process.cmdline())
        return next(
            (role for words, role in (OWN_ROLES | ROLES).items() if words in command), "others"
        )


def measure(size: int, sites: int, windows: int, settings: list[str]) -> dict[str, Any]:
    """Return the medians over the windows of one run."""
    mark = uuid.uuid4().hex
    usage = Usage(mark)
    with tempfile.TemporaryDirectory() as folder:
        words = run_settings(size, WARM_UP + windows)
        federate = "from flower_desloc.app.cli import app; app()"
        command = [sys.executable, "-c", federate, "federate", "quickstart", *words, *settings]
        with subprocess.Popen(
            [*command, "--nodes", str(sites), "--output-dir", folder],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "BENCHMARK_MARK": mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as run:
            at = usage.at_each(run, lambda: _windows(Path(folder)))
            output = run.stdout.read() if run.stdout else ""
        if run.returncode:
            raise RuntimeError(output)
        (metrics,) = Path(folder).glob("*/metrics.jsonl")
        records = [line for line in read_lines(metrics) if line["round"] > WARM_UP]
    used = {role: (at[-1][role] - at[WARM_UP - 1][role]) / windows for role in at[-1]}
    seconds = [line["seconds"] for line in records]
    exchange = statistics.median(line["seconds_split"]["exchange"] for line in records)
    return {
        "seconds": extremes(seconds),
        "exchange_seconds": exchange,
        "cpu_seconds": sum(used.values()),
        "cpu_seconds_by_process": used,
        "memory_bytes": usage.memory.total(),
        "memory_bytes_by_process": dict(usage.memory),
        "framed_bytes": records[-1]["framed_bytes_up"] + records[-1]["framed_bytes_down"],
    }


def _windows(folder: Path) -> int:
    """Return how many windows a run has completed."""
    found = list(folder.glob("*/metrics.jsonl"))
    return found[0].read_text().count("\n") - 1 if found else 0  # without window 0


def main(
    settings: Overrides = None,
    sites: int = 4,
    windows: int = 6,
    sizes: str = "4,120",
    json: Path | None = None,
) -> None:
    """Seconds, CPU-seconds and memory of a window of `desloc federate`."""
    found = {
        f"{size} MB": measure(int(size), sites, windows, settings or [])
        for size in sizes.split(",")
    }
    cores = len(os.sched_getaffinity(0))
    report({"sites": sites, "windows": windows, "cores": cores, **found}, json)


if __name__ == "__main__":
    typer.run(main)
