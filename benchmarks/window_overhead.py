"""Overhead of a window in simulation, beyond the clients' own work, compared with Flower's FedAvg.

    python benchmarks/window_overhead.py [--windows 60] [--json FILE]
    python benchmarks/window_overhead.py --large [--parameters 135000000] [--json FILE]

The model has six parameters, so that only the round trip is measured. With --large it has 135
million in 16 tensors, on two clients, in four turns of five windows. Three arms take turns on the
same nodes. The first windows of every turn are warm-up.

- echo: Flower's transport alone; every client returns the parameters that it receives.
- fedavg: Flower's FedAvg, with clients as in Flower's examples.
- desloc: DesLoc with three streams of different periods; with --large its moments stay local, so
  that the traffic is FedAvg's. Its clients store what was not averaged in a file.

Overhead is a window's wall-clock time minus the slowest client's own time. The own time includes
reading the state file and copying received values into the model, but neither the serialisation of
the reply nor the writing of the state file. The time to write the file is also printed separately:
it lets a client resume after a crash, which FedAvg's clients cannot.

In Flower's simulation a message is pickled into Ray's object store in shared memory and unpickled
in the other process, and back; it is not hashed. A stream of P parameters takes about 40 P bytes of
memory in total for two clients, and 16 P bytes of disk for each.
"""

import os
import statistics
import tempfile
import time
from functools import cache
from itertools import product
from pathlib import Path

import torch
import typer
from common import report, spread
from flower_runs import TimedFedAvg, Windows, simulate
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from flower_desloc import DesLoc, SyncSchedule
from flower_desloc.core.schedule import Period
from flower_desloc.core.worker import Worker
from flower_desloc.flower.arrays import to_record
from flower_desloc.flower.client import client_app
from flower_desloc.flower.client_state import STATE_DIR, ClientState, StateFiles
from flower_desloc.optim import ADOPT

SHAPE = "BENCHMARK_SHAPE"  # Ray's processes inherit the environment
PEERS = ("fedavg", "echo")
ARMS = ("desloc", *PEERS)


class Many(torch.nn.Module):
    def __init__(self, tensors: int, values: int) -> None:
        super().__init__()
        each = torch.randn(values, generator=torch.Generator().manual_seed(0))
        self.parts = torch.nn.ParameterList([each + i for i in range(tensors)])

    def loss(self) -> torch.Tensor:
        return sum((part * 1e-3).sum() for part in self.parts)


@cache
def module() -> Many:
    """Return the model of this process, built once for all arms."""
    return Many(*map(int, os.environ[SHAPE].split()))


@cache
def worker() -> Worker:
    model = module()
    optimizer = ADOPT(model.parameters())
    time_file_writes()
    return Worker(
        module=model, optimizer=optimizer, loss_at=lambda _step: model.loss(), num_examples=1
    )


def time_file_writes() -> None:
    """Record how long each write of a client's state takes."""
    write = StateFiles.write

    def timed(self: StateFiles, state: ClientState, **options: bool) -> None:
        began = time.perf_counter()
        write(self, state, **options)
        took = time.perf_counter() - began
        with Path(os.environ[STATE_DIR], "writes").open("a") as file:
            file.write(f"{took}\n")

    StateFiles.write = timed  # type: ignore[method-assign]  # to time it


app = client_app(lambda _config, _context: worker())


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


def overheads(arm: str, grid: Grid, windows: int, *, local: bool) -> list[float]:
    """Return the overhead of each window of one turn of an arm."""
    if arm == "desloc":
        watch = Windows()
        moments: tuple[Period, Period] = ("never", "never") if local else (3, 6)
        schedule: dict[str, Period] = {"params": 1, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
        strategy = DesLoc(SyncSchedule(schedule), windows, evaluate_clients=False)
        strategy.start(grid, to_record(dict(module().named_parameters())), observer=watch)
        return watch.overheads()
    arrays = ArrayRecord(module().state_dict())
    if arm == "fedavg":
        fedavg = TimedFedAvg()
        fedavg.start(grid, arrays, num_rounds=windows)
        return fedavg.overheads
    times = []
    for _ in range(windows):
        began = time.perf_counter()
        content = RecordDict({"arrays": arrays})
        nodes = grid.get_node_ids()
        list(grid.send_and_receive([Message(content, node, "query.echo") for node in nodes]))
        times.append(time.perf_counter() - began)
    return times


def slowest(writes: list[float], clients: int) -> list[float]:
    """Return the longest write of each window; each client writes once in it."""
    return [max(writes[i : i + clients]) for i in range(0, len(writes), clients)]


def main(
    large: bool = False, parameters: int = 0, windows: int = 0, json: Path | None = None
) -> None:
    """Overhead of a window in simulation, beyond the clients' own work."""
    clients, tensors, turns, warm_up = (2, 16, 4, 2) if large else (4, 2, 1, 5)
    parameters = parameters or (135_000_000 if large else 6)
    windows = windows or (5 if large else 60)
    if windows <= warm_up:
        raise typer.BadParameter(f"--windows must be more than the {warm_up} of warm-up")
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}

    def serve(grid: Grid, _context: Context) -> None:
        for turn in range(turns):
            for arm in sorted(ARMS, reverse=turn % 2 == 1):
                found[arm] += overheads(arm, grid, windows, local=large)

    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {SHAPE: f"{tensors} {parameters // tensors}", STATE_DIR: folder}
        simulate(serve, app, clients)
        writes = [float(line) for line in Path(folder, "writes").read_text().splitlines()]
    found["its file"] = slowest(writes, clients)
    found = {  # without the first windows of every turn
        name: [time for i, time in enumerate(times) if i % windows >= warm_up]
        for name, times in found.items()
    }
    pairs = zip(found["desloc"], found["its file"], strict=True)
    found["desloc without"] = [total - file for total, file in pairs]
    median = {name: statistics.median(times) for name, times in found.items()}
    arms = product({"desloc": "desloc", "desloc_without_file": "desloc without"}.items(), PEERS)
    result = {
        "parameters": parameters,
        "clients": clients,
        "windows": len(found["desloc"]),
        "overhead_seconds": {name: spread(times) for name, times in found.items()},
        **{f"{ours}_to_{peer}": median[arm] / median[peer] for (ours, arm), peer in arms},
    }
    report(result, json)


if __name__ == "__main__":
    # Ray pickles objects of __main__ by value, which would lose the caches.
    import window_overhead

    typer.run(window_overhead.main)
