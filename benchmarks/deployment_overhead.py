"""Overhead of a window in a deployment, beyond the clients' own work, compared with FedAvg.

    python benchmarks/deployment_overhead.py [--windows 4] [--blocks 3] [--json FILE]

A SuperLink and two SuperNodes of `desloc federate` run on this machine. Three variants take turns
in one run, a block of windows each: DesLoc with warm clients, DesLoc without, and Flower's
``FedAvg.start``. A window is one local step of the same small Llama on the same data, so almost
only the overhead is measured: a window's wall-clock time minus the slowest client's own time, from
the built model to the reply. The first window of every block is left out, because it begins at
another point of the SuperNodes' polling interval than the others.

The parts of a window are measured by the clients' clocks, the SuperNodes' logs and the server's
grid, as the median over clients and windows.
"""

import os
import re
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import typer
from common import extremes, ratios, report
from flower_runs import run_app

from flower_desloc.app.engines.deployment import NodeConfig, deployment

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
    ("process", "began", "process is forked, downloads message and app"),
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
    node: Path
    what: str
    message: str


def follow(home: Path, marks: list[Mark]) -> None:
    """Add the marks of a SuperNode's log as they are written."""
    with (home / "log").open() as log:
        while True:
            where = log.tell()
            line, now = log.readline(), time.time()
            if not line.endswith("\n"):
                log.seek(where)
                time.sleep(0.005)
            elif match := re.search(r"(Receiving|Sending): .*\(ID: (\w+)\)", line):
                marks.append(Mark(now, home, *match.groups()))
            elif "Sent successfully" in line:
                marks.append(Mark(now, home, "Sent", ""))


def measure(settings: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Mark]]:
    """Return the windows of one run of the app, and the marks of its SuperNodes."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    marks: list[Mark] = []
    with tempfile.TemporaryDirectory() as folder:
        sites: list[NodeConfig] = [
            {"partition-id": i, "num-partitions": CLIENTS, "state-dir": f"{folder}/state{i}"}
            for i in range(CLIENTS)
        ]
        with deployment(sites, threads=1) as (superlink, nodes):
            for node in nodes:
                threading.Thread(target=follow, args=(node.home, marks), daemon=True).start()
            output = f"{folder}/result.json"
            found = run_app(superlink, APP, {**settings, "overrides": SMALL, "output": output})
            return found["windows"], marks


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


def main(windows: int = 4, blocks: int = 3, json: Path | None = None) -> None:
    """Overhead of a window in a deployment, beyond the clients' own work."""
    found, marks = measure({"blocks": blocks, "windows": windows})
    overheads: dict[str, list[float]] = {}
    parts: dict[str, dict[str, float]] = {}
    for who in WHO:
        kept = [w for w in found if w["who"] == who and not w["first"]]
        overheads[who] = [w["seconds"] - max(e["own"] for e in w["exchanges"]) for w in kept]
        parts[who] = breakdown(kept, marks)
    # Ratios of medians, and block by block, because the noise varies over time.
    size = windows - 1
    by_block = {
        who: [statistics.median(times[i : i + size]) for i in range(0, len(times), size)]
        for who, times in overheads.items()
    }
    median = {who: statistics.median(times) for who, times in overheads.items()}
    result = {
        "clients": CLIENTS,
        "windows": len(overheads["warm"]),
        "overhead_seconds": {who: extremes(times) for who, times in overheads.items()},
        "parts_seconds": {name: {who: parts[who][name] for who in WHO} for *_, name in PARTS},
        "to_fedavg": {
            who: {
                "ratio": median[who] / median["fedavg"],
                "blocks": ratios(by_block[who], to=by_block["fedavg"]),
            }
            for who in WHO[:-1]
        },
    }
    report(result, json)


if __name__ == "__main__":
    typer.run(main)
