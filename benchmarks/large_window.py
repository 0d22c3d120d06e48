"""Overhead of a window with a large model in simulation, beyond the clients' own work.

    python benchmarks/large_window.py [--parameters 135000000] [--clients 2] [--json FILE]

Three arms take turns on the same nodes, a few rounds each. The first two rounds of every turn are
warm-up.

- echo: Flower's transport alone; every client returns the parameters that it receives.
- fedavg: Flower's FedAvg, with clients as in Flower's examples.
- desloc: DesLoc with the same traffic; its clients store parameters and both moments in a file.

Overhead is a round's wall-clock time minus the slowest client's own time. The own time includes
reading the state file and copying received values into the model, but neither the serialisation of
the reply nor the writing of the state file. The time to write the file is also printed separately:
it lets a client resume after a crash, which FedAvg's clients cannot.

In Flower's simulation a message is pickled into Ray's object store in shared memory and unpickled
in the other process, and back; it is not hashed. A stream of P parameters takes about 40 P bytes of
memory in total for two clients, and 16 P bytes of disk for each.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import torch
from aggregation import about, spread
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from window_overhead import Overheads, Timed

from flower_desloc import DesLoc, SyncSchedule
from flower_desloc.flower.client import STATE_DIR, client_app
from flower_desloc.flower.client_state import StateFiles
from flower_desloc.flower.records import to_record
from flower_desloc.flower.worker import Worker
from flower_desloc.optim import ADOPT

TENSORS = 16
PARAMETERS = "BENCHMARK_PARAMETERS"  # Ray's processes inherit the environment
ROUNDS, WARM_UP = 5, 2


class Many(torch.nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        each = torch.randn(number // TENSORS, generator=torch.Generator().manual_seed(0))
        self.parts = torch.nn.ParameterList([each + i for i in range(TENSORS)])

    def loss(self) -> torch.Tensor:
        return sum((part * 1e-3).sum() for part in self.parts)


@cache
def module() -> Many:
    """Return the model of this process, built once for all arms."""
    return Many(int(os.environ[PARAMETERS]))


@cache
def worker() -> Worker:
    model = module()
    optimizer = ADOPT(model.parameters())
    return Worker(
        module=model, optimizer=optimizer, loss_at=lambda _step: model.loss(), num_examples=1
    )


@cache
def timed_file() -> None:
    """Record how long each write of a client's state takes."""
    write = StateFiles.write

    def timed(self: StateFiles, *args: Any) -> None:
        began = time.perf_counter()
        write(self, *args)
        took = time.perf_counter() - began
        with Path(os.environ[STATE_DIR], "writes").open("a") as file:
            file.write(f"{took}\n")

    StateFiles.write = timed  # type: ignore[method-assign]


def build(_config: Any, _context: Context) -> Worker:
    timed_file()
    return worker()


desloc_client = client_app(build)
app = ClientApp()


@app.train()
def desloc(message: Message, context: Context) -> Message:
    return desloc_client(message, context)


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    return desloc_client(message, context)


@app.query("goodbye")
def goodbye(message: Message, context: Context) -> Message:
    return desloc_client(message, context)


@app.query("echo")
def echo(message: Message, _context: Context) -> Message:
    return Message(message.content, reply_to=message)


@app.train("fedavg")
def fedavg(message: Message, _context: Context) -> Message:
    """Take one step, as in Flower's examples."""
    began = time.perf_counter()
    model = module()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    optimizer = ADOPT(model.parameters())
    optimizer.zero_grad()
    model.loss().backward()
    optimizer.step()
    metrics = MetricRecord({"num-examples": 1, "seconds": time.perf_counter() - began})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


class Routed(Timed):
    """FedAvg over `train.fedavg`, timed."""

    def configure_train(self, *args: Any, **kwargs: Any) -> Iterable[Message]:
        for message in super().configure_train(*args, **kwargs):
            message.metadata.message_type = "train.fedavg"
            yield message


def echoes(grid: Grid) -> list[float]:
    params = to_record(dict(module().named_parameters()))
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        messages = [
            Message(RecordDict({"params": params}), node, "query.echo")
            for node in grid.get_node_ids()
        ]
        list(grid.send_and_receive(messages))
        times.append(time.perf_counter() - began)
    return times


def deslocs(_grid: Grid) -> list[float]:
    watch = Overheads()
    # Params in every window, as in FedAvg; the moments stay local.
    schedule = SyncSchedule({"params": 1, "exp_avg": "never", "exp_avg_sq": "never"})
    strategy = DesLoc(schedule, ROUNDS, evaluate_clients=False)
    strategy.start(_grid, to_record(dict(module().named_parameters())), observer=watch)
    return watch.overheads


def fedavgs(grid: Grid) -> list[float]:
    strategy = Routed(fraction_evaluate=0.0)
    strategy.start(grid, ArrayRecord(module().state_dict()), num_rounds=ROUNDS)
    return strategy.overheads


def measure(num_clients: int, turns: int) -> dict[str, list[float]]:
    arms = {"echo": echoes, "fedavg": fedavgs, "desloc": deslocs}
    found: dict[str, list[float]] = {name: [] for name in arms}
    server = ServerApp()

    @server.main()
    def main(grid: Grid, _context: Context) -> None:
        for turn in range(turns):
            for name in sorted(arms, reverse=turn % 2 == 1):
                found[name] += arms[name](grid)[WARM_UP:]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_simulation(
            server,
            app,
            num_supernodes=num_clients,
            backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        )
    return found


def slowest(writes: list[float], clients: int) -> list[float]:
    """Return the longest write of each window after the warm-up; each client writes once in it."""
    windows = [max(writes[i : i + clients]) for i in range(0, len(writes), clients)]
    return [took for i, took in enumerate(windows) if i % ROUNDS >= WARM_UP]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=135_000_000)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args()
    folder = tempfile.mkdtemp()
    os.environ |= {PARAMETERS: str(args.parameters), STATE_DIR: folder}
    try:
        found = measure(args.clients, args.turns)
        writes = [float(line) for line in Path(folder, "writes").read_text().splitlines()]
    finally:
        shutil.rmtree(folder)
    files = slowest(writes, args.clients)
    rest = [a - b for a, b in zip(found["desloc"], files, strict=True)]
    found |= {"its file": files, "desloc without": rest}
    median = {name: statistics.median(times) for name, times in found.items()}
    result = {
        **about(),
        "parameters": args.parameters,
        "clients": args.clients,
        "rounds": len(found["desloc"]),
        "overhead_seconds": {name: spread(times) for name, times in found.items()},
        "desloc_to_fedavg": median["desloc"] / median["fedavg"],
        "desloc_to_echo": median["desloc"] / median["echo"],
        "desloc_without_file_to_fedavg": median["desloc without"] / median["fedavg"],
        "desloc_without_file_to_echo": median["desloc without"] / median["echo"],
    }
    for name, times in result["overhead_seconds"].items():
        print(f"{name:15}", *(f"{what} {seconds:.2f} s  " for what, seconds in times.items()))
    for name in (name for name in result if "_to_" in name):
        print(f"{name} {result[name]:.2f}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    # Ray pickles objects of __main__ by value, which would lose the caches.
    sys.modules.pop("large_window", None)
    import large_window

    large_window.main()
