"""Time of a window and memory with hundreds of simulated clients on one machine.

    python benchmarks/many_clients.py [--clients 64,128,256] [--windows 12] [--json FILE]

`desloc run` of a small language model in Flower's simulation, with windows of two local steps.
Every client has a part of the text and a state file of its own. For each number of clients the
output has the median time of a window, also divided by the number of clients; the clients' own
seconds; the peak memory of all processes (PSS, which counts shared memory once); and its slope over
the second half of the windows.
"""

import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import typer
from common import DESLOC, report, slope

from flower_desloc.app.runs.folder import read_lines

SETTINGS = [
    *("run.eval_every=0", "sync.params=2", "sync.exp_avg=6", "sync.exp_avg_sq=12"),
    *("model.hidden_size=64", "model.intermediate_size=128", "model.num_hidden_layers=2"),
    *("data.partition=iid", "data.seq_len=64", "data.batch_size=4"),
    *("evaluation.federated=false", "evaluation.sequences=8"),
]
WARM_UP = 3  # windows in which processes start and the text is partitioned


def samples(process: psutil.Popen, metrics: Path) -> Iterator[tuple[int, int]]:
    """Yield the window and the memory of a process and its descendants, once a second."""
    while process.poll() is None:
        total = 0
        for one in [process, *process.children(recursive=True)]:
            try:
                total += one.memory_full_info().pss
            except psutil.Error:
                continue
        yield metrics.read_text().count("\n") if metrics.exists() else 0, total
        time.sleep(1)


def measure(clients: int, windows: int, folder: Path) -> dict[str, Any]:
    command = [DESLOC, "run", "quickstart", *SETTINGS, f"run.steps={2 * windows}"]
    command += [f"simulation.num_clients={clients}", f"federation.min_clients={clients}"]
    metrics = folder / "quickstart" / "metrics.jsonl"
    process = psutil.Popen([*command, "--output-dir", str(folder)], stdout=subprocess.DEVNULL)
    memory = list(samples(process, metrics))
    assert process.returncode == 0
    later = list(read_lines(metrics))[1 + WARM_UP :]
    seconds = median(line["seconds"] for line in later)
    # The clients' own seconds: two at a time share the machine.
    own = median(sum(c["seconds"] for c in line["clients"].values()) for line in later)
    return {
        "clients": clients,
        "window_seconds": seconds,
        "window_seconds_per_client": seconds / clients,
        "clients_own_seconds_per_client": own / clients,
        "peak_memory_bytes": max(size for _, size in memory),
        "memory_slope_bytes_per_window": slope([m for m in memory if m[0] <= windows]),
        "state_files_left": len(list(folder.rglob("client-*"))),
    }


def main(clients: str = "64,128,256", windows: int = 12, json: Path | None = None) -> None:
    """Time of a window and memory with hundreds of simulated clients on one machine."""
    runs = []
    for number in map(int, clients.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(measure(number, windows, Path(folder)))
    per_client = [run["window_seconds_per_client"] for run in runs]
    report({"runs": runs, "slowest_to_fastest": max(per_client) / min(per_client)}, json)


if __name__ == "__main__":
    typer.run(main)
