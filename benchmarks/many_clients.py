"""Time of a window and memory with hundreds of simulated clients on one machine.

    python benchmarks/many_clients.py [--clients 64,128,256] [--windows 12] [--json FILE]

`desloc run` of a small language model in Flower's simulation, with windows of two local steps.
Every client has a part of the text and a state file of its own. For each number of clients the
output has the median time of a window, also divided by the number of clients; the clients' own
seconds; the peak memory of all processes (PSS, which counts shared memory once); and its slope over
the second half of the windows.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from pathlib import Path
from typing import Any

import flwr
import numpy as np
import psutil
import torch

SETTINGS = [
    "run.eval_every=0",
    "sync.params=2",
    "sync.exp_avg=6",
    "sync.exp_avg_sq=12",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "model.num_hidden_layers=2",
    "data.partition=iid",
    "data.seq_len=64",
    "data.batch_size=4",
    "evaluation.federated=false",
    "evaluation.sequences=8",
]
WARM_UP = 3  # windows in which processes start and the text is partitioned


class Memory(threading.Thread):
    """Samples the memory of a process and its descendants, and the window, once a second."""

    def __init__(self, process: psutil.Process, metrics: Path) -> None:
        super().__init__(daemon=True)
        self._process, self._metrics = process, metrics
        self.samples: list[tuple[int, int]] = []

    def run(self) -> None:
        while self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE:
            window = self._metrics.read_text().count("\n") if self._metrics.exists() else 0
            total = 0
            for one in [self._process, *self._process.children(recursive=True)]:
                try:
                    total += one.memory_full_info().pss
                except psutil.Error:
                    continue
            self.samples.append((window, total))
            time.sleep(1)


def measure(clients: int, windows: int, folder: Path) -> dict[str, Any]:
    desloc = str(Path(sys.executable).with_name("desloc"))
    command = [desloc, "run", "quickstart", *SETTINGS, f"run.steps={2 * windows}"]
    command += [f"federation.num_clients={clients}", f"federation.min_clients={clients}"]
    with subprocess.Popen(
        [*command, "--output-dir", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        memory = Memory(psutil.Process(process.pid), folder / "quickstart" / "metrics.jsonl")
        memory.start()
        output, _ = process.communicate()
    assert process.returncode == 0, output.decode()
    lines = [json.loads(x) for x in (folder / "quickstart/metrics.jsonl").read_text().splitlines()]
    later = lines[1 + WARM_UP :]
    seconds = [line["seconds"] for line in later]
    # The clients' own seconds: two at a time share the machine.
    own = [sum(client["seconds"] for client in line["clients"].values()) for line in later]
    half = [(w, m) for w, m in memory.samples if 1 + windows // 2 <= w <= windows]
    slope = np.polyfit(*np.array(half).T, 1)[0]
    return {
        "clients": clients,
        "window_seconds": statistics.median(seconds),
        "window_seconds_per_client": statistics.median(seconds) / clients,
        "clients_own_seconds_per_client": statistics.median(own) / clients,
        "peak_memory_bytes": max(m for _, m in memory.samples),
        "memory_slope_bytes_per_window": float(slope),
        "state_files_left": len(list(folder.rglob("client-*"))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", default="64,128,256")
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args()
    found = []
    for clients in map(int, args.clients.split(",")):
        with tempfile.TemporaryDirectory() as temporary:
            one = measure(clients, args.windows, Path(temporary))
        found.append(one)
        print(json.dumps(one), flush=True)
    per_client = [one["window_seconds_per_client"] for one in found]
    print(f"seconds per client and window, max over min: {max(per_client) / min(per_client):.2f}")
    if args.json:
        result = {
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "versions": {"flwr": flwr.__version__, "torch": torch.__version__},
            "runs": found,
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
