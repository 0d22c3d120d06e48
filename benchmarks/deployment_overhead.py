"""Overhead of a window in a deployment, beyond the clients' own work, compared with FedAvg.

    python benchmarks/deployment_overhead.py [--windows 4] [--blocks 3] [--output FILE]

A SuperLink and two SuperNodes run on loopback. Three variants take turns in one run, a block of
windows each: DesLoc with warm clients, DesLoc without, and Flower's ``FedAvg.start``. A window is
one local step of the same small Llama on the same data, so almost only the overhead is measured: a
window's wall-clock time minus the slowest client's own time, from the built model to the reply. The
first window of every block is left out, because it begins at another point of the SuperNodes'
polling interval than the others.

The parts of a window are measured by the clients' clocks, the SuperNodes' logs and the server's
grid, as the median over clients and windows.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import flwr
import torch

from flower_desloc.sites.deployment.environment import free_port
from flower_desloc.sites.deployment.node import COMMAND

APP = Path(__file__).with_name("deployment_app")
CLIENTS = 2
WHO = ("warm", "cold", "fedavg")
SMALL = (
    "model.hidden_size=64 model.intermediate_size=128 model.num_hidden_layers=2 data.batch_size=1 "
    "evaluation.federated=false evaluation.central=false"
)
# (from, to, name), in order; a part that does not apply takes no time.
PARTS = [
    ("sent", "received", "SuperNode polls the SuperLink"),
    ("received", "process", "SuperExec polls, downloads the message's objects"),
    ("process", "began", "process starts, imports Flower, downloads message and app"),
    ("began", "called", "imports the ClientApp"),
    ("called", "asked", "imports PyTorch, model's library, client; or forwards to the trainer"),
    ("asked", "built", "builds model and data"),
    ("built", "done", "own work: state, training"),
    ("done", "answered", "trainer returns the reply"),
    ("answered", "sending", "SuperNode polls for the reply"),
    ("sending", "uploaded", "uploads the reply"),
    ("uploaded", "had", "server receives the reply, in its turn"),
]


class Mark(NamedTuple):
    """A line of a SuperNode's log about a message: Receiving, Sending or Sent."""

    time: float
    node: str
    what: str
    message: str


class Federation:
    """A SuperLink and SuperNodes on loopback, with their own folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.marks: list[Mark] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._environment = {
            **{k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "OMP_NUM_THREADS": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self.port = free_port()
        address = f"127.0.0.1:{self.port}"
        self._start(
            "superlink",
            *("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self.port)),
            "--disable-runtime-dependency-installation",
        )
        self._wait_for("Uvicorn running", "superlink")
        for i in range(CLIENTS):
            self._start(
                f"node{i}",
                *(*COMMAND, "--insecure", "--superlink", address),
                *("--host", "127.0.0.1", "--port", str(free_port())),
                "--node-config",
                f'partition-id={i} num-partitions={CLIENTS} state-dir="{folder}/state{i}"',
            )

    def run(self, run_config: str, output: Path, timeout: float) -> dict[str, Any]:
        """Run the app; return what its ServerApp writes to ``output``."""
        shutil.copytree(APP, self.folder / "app", ignore=shutil.ignore_patterns("__pycache__"))
        home = self._home("cli")
        (home / "config.toml").write_text(
            '[superlink]\ndefault = "here"\n\n[superlink.here]\n'
            f'address = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        subprocess.run(
            ["flwr", "run", str(self.folder / "app"), "here", "--run-config", run_config],
            env={**self._environment, "FLWR_HOME": str(home)},
            check=True,
        )
        deadline = time.monotonic() + timeout
        while not output.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no result after {timeout:g} s; logs are in {self.folder}")
            time.sleep(0.5)
        found: dict[str, Any] = json.loads(output.read_text())
        if "error" in found:
            raise RuntimeError(found["error"])
        return found

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()

    def _start(self, name: str, *command: str) -> None:
        process = subprocess.Popen(
            command,
            env={**self._environment, "FLWR_HOME": str(self._home(name))},
            cwd=self._home(name),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._processes.append(process)
        threading.Thread(target=self._read, args=(name, process), daemon=True).start()

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with (self.folder / f"{name}.log").open("w", buffering=1) as log:
            for line in process.stdout:
                now = time.time()
                log.write(f"{now:.3f} {line}")
                if match := re.search(r"(Receiving|Sending): .*\(ID: (\w+)\)", line):
                    self.marks.append(Mark(now, name, *match.groups()))
                elif "Sent successfully" in line:
                    self.marks.append(Mark(now, name, "Sent", ""))

    def _home(self, name: str) -> Path:
        home = self.folder / name
        home.mkdir(exist_ok=True)
        return home

    def _wait_for(self, words: str, name: str) -> None:
        log = self.folder / f"{name}.log"
        deadline = time.monotonic() + 60
        while not (log.exists() and words in log.read_text()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} did not start; see {log}")
            time.sleep(0.1)


@contextlib.contextmanager
def federation() -> Iterator[Federation]:
    folder = Path(tempfile.mkdtemp(prefix="desloc-bench-"))
    made = Federation(folder)
    try:
        yield made
    finally:
        made.stop()
    shutil.rmtree(folder, ignore_errors=True)


def breakdown(windows: list[dict[str, Any]], marks: list[Mark]) -> dict[str, float]:
    """Return the median seconds of every part."""
    times: dict[str, list[float]] = {}
    for exchange in (e for window in windows for e in window["exchanges"]):
        received = next(m for m in marks if m[2:] == ("Receiving", exchange["id"]))
        at = {**exchange, "received": received.time}
        # The log gives a reply another id: it is the next one of the node.
        for what, name in (("Sending", "sending"), ("Sent", "uploaded")):
            at[name] = next(
                m.time
                for m in marks
                if (m.node, m.what) == (received.node, what) and m.time > received.time
            )
        for begin, end, name in PARTS:
            times.setdefault(name, []).append(max(at[end] - at[begin], 0.0))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "windows": len(values),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=4, help="of a block")
    parser.add_argument("--blocks", type=int, default=3, help="of each")
    parser.add_argument("--output", type=Path, help="write the result here as well, as JSON")
    args = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM")
    )  # so that processes are ended
    with federation() as made:
        output = made.folder / "result.json"
        config = (
            f'blocks={args.blocks} windows={args.windows} overrides="{SMALL}" output="{output}"'
        )
        limit = 300 + 300 * args.blocks * args.windows  # also on a busy machine
        windows = made.run(config, output, limit)["windows"]
        marks = list(made.marks)
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"flwr": flwr.__version__, "torch": torch.__version__},
        "clients": CLIENTS,
        "overhead_seconds": {},
        "parts_seconds": {},
    }
    blocks: dict[str, list[float]] = {}
    for who in WHO:
        kept = [w for w in windows if w["who"] == who and not w["first"]]
        overheads = [w["seconds"] - max(e["own"] for e in w["exchanges"]) for w in kept]
        size = args.windows - 1
        blocks[who] = [
            statistics.median(overheads[i : i + size]) for i in range(0, len(overheads), size)
        ]
        result["overhead_seconds"][who] = spread(overheads)
        result["parts_seconds"][who] = breakdown(kept, marks)
    # Ratios of medians, and block by block, because the noise varies over time.
    medians = {who: found["median"] for who, found in result["overhead_seconds"].items()}
    result["to_fedavg"] = {
        who: {
            "ratio": medians[who] / medians["fedavg"],
            "blocks": [d / f for d, f in zip(blocks[who], blocks["fedavg"], strict=True)],
        }
        for who in WHO[:-1]
    }
    show(result)
    if args.output:
        args.output.write_text(json.dumps(result, indent=2) + "\n")


def show(result: dict[str, Any]) -> None:
    for who, seconds in result["overhead_seconds"].items():
        print(f"{who:8}", *(f"{what} {value:.2f}  " for what, value in seconds.items()))
    for who, found in result["to_fedavg"].items():
        ratio, blocks = found["ratio"], found["blocks"]
        print(f"{who} / fedavg  {ratio:.2f}  (blocks: {min(blocks):.2f} to {max(blocks):.2f})")
    parts = result["parts_seconds"]
    print("\n" + "".join(f"{who:>8}" for who in WHO), " seconds, median over clients and windows")
    for _, _, name in PARTS:
        print("".join(f"{parts[who][name]:8.2f}" for who in WHO), f" {name}")


if __name__ == "__main__":
    main()
