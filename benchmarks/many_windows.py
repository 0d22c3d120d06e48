"""Memory, open files and leftovers over a thousand windows with a fault in every tenth.

    python benchmarks/many_windows.py [--windows 1000] [--clients 3] [--seed 0] [--json FILE]

Flower's simulation, with real ClientApp processes. Every tenth window has a fault drawn from the
seed: a client raises an exception before or after its steps, sends NaN, loses its files or corrupts
a byte of them, or the server dies and another one resumes from its last checkpoint. The output has
the least-squares slopes of memory and of open files over the second half, and the number of client
files, checkpoints and processes that are left.
"""

import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import typer
from common import report, slope
from flower_runs import simulate
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flower_desloc import DesLoc, SyncSchedule
from flower_desloc.core.worker import Worker
from flower_desloc.flower.arrays import to_record
from flower_desloc.flower.checkpoint import Checkpoint, Checkpoints
from flower_desloc.flower.client import client_app
from flower_desloc.flower.client_state import STATE_DIR, StateFiles
from flower_desloc.flower.observer import Observer, WindowRecord
from flower_desloc.flower.policy import Policy
from flower_desloc.optim import Adam

WIDTH = 64
EVERY = 10
SERVER = "the server dies"
CLIENT_FAULTS = ("raises before", "raises after", "sends NaN", "loses its files", "loses a byte")


class Died(BaseException):
    """Simulated death of the server."""


def fault_of(seed: int, step: int, num_clients: int) -> tuple[str, int]:
    """Return the fault in the window that begins at ``step``, and its client."""
    if step % EVERY != EVERY - 1:
        return "", -1
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


class Faulty(ClientApp):
    """Our ClientApp, with the faults of its clients drawn from the seed."""

    def __init__(self, seed: int, num_clients: int) -> None:
        super().__init__()
        self._seed, self._num_clients = seed, num_clients

    def __call__(self, message: Message, context: Context) -> Message:
        sound = client_app(build)
        config: Any = message.content.config_records["config"]
        partition = int(context.node_config["partition-id"])
        what, who = fault_of(self._seed, int(config["start-step"]), self._num_clients)
        if message.metadata.message_type != "train" or who != partition:
            return sound(message, context)
        own = StateFiles(Path(os.environ[STATE_DIR]), str(config["run-key"]), f"client-{who}")
        if what == "raises before":
            raise RuntimeError(what)
        if what == "loses its files":
            own.delete()
        if what == "loses a byte" and own.last():
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


class Watch(Observer):
    """Observer that measures memory and open files, and raises the server's faults."""

    def __init__(self, seed: int, num_clients: int) -> None:
        self.seed, self.num_clients = seed, num_clients
        self.server: list[tuple[int, int]] = []
        self.clients: list[tuple[int, int]] = []
        self.files: list[tuple[int, int]] = []
        self.events: Counter[str] = Counter()
        self.died: set[int] = set()

    def window(self, record: WindowRecord) -> None:
        for reason in record.left_out.values():
            self.events[reason.partition(":")[0]] += 1
        dies = fault_of(self.seed, record.start, self.num_clients)[0] == SERVER
        if dies and record.step not in self.died:
            self.died.add(record.step)
            self.events[SERVER] += 1
            raise Died
        if record.step % 5 == 0:
            me = psutil.Process()
            actors = [p for p in psutil.process_iter(["name"]) if "ClientAppActor" in p.name()]
            self.server.append((record.step, me.memory_info().rss))
            self.files.append((record.step, me.num_fds()))
            self.clients.append((record.step, max(p.memory_info().rss for p in actors)))


def run(seed: int, num_clients: int, num_windows: int, folder: Path) -> dict[str, Any]:
    watch = Watch(seed, num_clients)

    def main(grid: Grid, _context: Context) -> None:
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
                return
            except Died:
                continue

    began = time.perf_counter()
    simulate(main, Faulty(seed, num_clients), num_clients)
    seconds = time.perf_counter() - began
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


def main(windows: int = 1000, clients: int = 3, seed: int = 0, json: Path | None = None) -> None:
    """Memory, open files and leftovers over a thousand windows with faults."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[STATE_DIR] = str(Path(folder) / "clients")
        found = run(seed, clients, windows, Path(folder))
    report({"windows": windows, "clients": clients, **found}, json)


if __name__ == "__main__":
    typer.run(main)
