"""Memory, open files and leftovers over a thousand windows with a fault in every tenth.

    python benchmarks/soak.py [--windows 1000] [--clients 3] [--seed 0] [--json FILE]

Flower's simulation, with real ClientApp processes. Every tenth window has a fault drawn from the
seed: a client raises an exception before or after its steps, sends NaN, loses its files or corrupts
a byte of them, or the server dies and another one resumes from its last checkpoint. The output has
the least-squares slopes of memory and of open files over the second half, and the number of client
files, checkpoints and processes that are left.
"""

import argparse
import json
import os
import platform
import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import flwr
import numpy as np
import psutil
import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from flower_desloc import DesLoc, SyncSchedule
from flower_desloc.flower.checkpoint import Checkpoint, Checkpoints
from flower_desloc.flower.client import STATE_DIR, client_app
from flower_desloc.flower.client_state import StateFiles
from flower_desloc.flower.observer import WindowRecord
from flower_desloc.flower.policy import Policy
from flower_desloc.flower.records import to_record
from flower_desloc.flower.worker import Worker
from flower_desloc.optim import Adam

WIDTH = 64
EVERY = 10
CLIENT_FAULTS = ("raises before", "raises after", "sends NaN", "loses its files", "loses a byte")
SERVER = "the server dies"


class Died(BaseException):
    """Simulated death of the server."""


def fault_of(seed: int, step: int, num_clients: int) -> tuple[str, int] | None:
    """Return the fault in the window that begins at ``step``, and its client."""
    if step % EVERY != EVERY - 1:
        return None
    draw = random.Random(f"{seed}/{step}")
    return draw.choice([*CLIENT_FAULTS, SERVER]), draw.randrange(num_clients)


def build(_config: Any, context: Context) -> Worker:
    torch.manual_seed(0)
    module = torch.nn.Linear(WIDTH, WIDTH)
    partition = int(context.node_config["partition-id"])

    def loss_at(step: int) -> torch.Tensor:
        torch.manual_seed(step * 1000 + partition)
        x = torch.randn(8, WIDTH)
        return (module(x) - x.flip(1)).square().mean()

    return Worker(
        module=module, optimizer=Adam(module.parameters()), loss_at=loss_at, num_examples=1
    )


def clients(seed: int, num_clients: int) -> ClientApp:
    """Return the app, with the faults of its clients drawn from the seed."""
    sound, app = client_app(build), ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        config = message.content.config_records["config"]
        fault = fault_of(seed, int(config["start-step"]), num_clients)
        partition = int(context.node_config["partition-id"])
        what = fault[0] if fault and fault[1] == partition else ""
        own = StateFiles(Path(os.environ[STATE_DIR]), str(config["run-key"]), f"client-{partition}")
        if what == "raises before":
            raise RuntimeError(what)
        if what == "loses its files":
            own.delete()
        if what == "loses a byte" and own.held():
            last = max(own.folder.iterdir())
            data = bytearray(last.read_bytes())
            data[-1] ^= 1
            last.write_bytes(data)
        reply = sound(message, context)
        if what == "raises after":
            raise RuntimeError(what)
        if what == "sends NaN":
            for record in reply.content.array_records.values():
                for key, array in record.items():
                    record[key] = type(array)(array.numpy() * np.nan)
        return reply

    for name in ("hello", "goodbye"):
        app.query(name)(_passed_on(sound))
    return app


def _passed_on(app: ClientApp) -> Callable[[Message, Context], Message]:
    def answer(message: Message, context: Context) -> Message:
        return app(message, context)

    return answer


class Watch:
    """Observer that measures memory and open files, and raises the server's faults."""

    def __init__(self, seed: int, num_clients: int) -> None:
        self.seed, self.num_clients = seed, num_clients
        self.server: list[tuple[int, int]] = []
        self.clients: list[tuple[int, int]] = []
        self.files: list[tuple[int, int]] = []
        self.events: Counter[str] = Counter()
        self.died: set[int] = set()

    def started(self, plan: Any) -> None: ...

    def joined(self, client: str, about: Any) -> None: ...

    def window(self, record: WindowRecord) -> None:
        for reason in record.left_out.values():
            self.events[reason.partition(":")[0]] += 1
        fault = fault_of(self.seed, record.start, self.num_clients) if record.round else None
        if fault and fault[0] == SERVER and record.step not in self.died:
            self.died.add(record.step)
            self.events[SERVER] += 1
            raise Died
        if record.step % 5 == 0:
            me = psutil.Process()
            actors = [p for p in psutil.process_iter(["name"]) if "ClientAppActor" in p.name()]
            self.server.append((record.step, me.memory_info().rss))
            self.files.append((record.step, me.num_fds()))
            self.clients.append((record.step, max(p.memory_info().rss for p in actors)))


def soak(seed: int, num_clients: int, num_windows: int, folder: Path) -> dict[str, Any]:
    watch = Watch(seed, num_clients)
    server = ServerApp()
    seconds = 0.0

    @server.main()
    def main(grid: Grid, _context: Context) -> None:
        nonlocal seconds
        began = time.perf_counter()
        checkpoints = Checkpoints(folder / "checkpoints", 1)
        while True:
            found = checkpoints.all()
            strategy = DesLoc(
                SyncSchedule({"params": 1, "exp_avg": 3, "exp_avg_sq": 6}),
                num_windows,
                policy=Policy(min_clients=num_clients - 1, on_failure="continue"),
                evaluate_clients=False,
                checkpoints=checkpoints,
                resume=Checkpoint.read(found[-1]) if found else None,
            )
            torch.manual_seed(0)
            initial = to_record(dict(torch.nn.Linear(WIDTH, WIDTH).named_parameters()))
            try:
                strategy.start(grid, initial, ConfigRecord(), observer=watch)
                break
            except Died:
                continue
        seconds = time.perf_counter() - began

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_simulation(
            server,
            clients(seed, num_clients),
            num_supernodes=num_clients,
            backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        )
    left = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=10)[1]
    return {
        "seconds": seconds,
        "events": dict(watch.events),
        "bytes_per_window": {
            "server": slope(watch.server),
            "largest client": slope(watch.clients),
        },
        "end_bytes": {"server": watch.server[-1][1], "largest client": watch.clients[-1][1]},
        "open_files_per_window": slope(watch.files),
        "client_files_left": len(list((folder / "clients").rglob("*.*"))),
        "checkpoints_left": len(list((folder / "checkpoints").iterdir())),
        "processes_left": len(left),
    }


def slope(points: list[tuple[int, int]]) -> float:
    """Return the least-squares slope over the second half."""
    half = points[len(points) // 2 :]
    return float(np.polyfit(*zip(*half, strict=True), 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[STATE_DIR] = str(Path(folder) / "clients")
        found = soak(args.seed, args.clients, args.windows, Path(folder))
    result = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"flwr": flwr.__version__, "torch": torch.__version__},
        "windows": args.windows,
        "clients": args.clients,
        **found,
    }
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
