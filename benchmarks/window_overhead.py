"""Overhead of a window in simulation, beyond the clients' own work, compared with Flower's FedAvg.

    python benchmarks/window_overhead.py [--clients 4] [--windows 60] [--json FILE]

The model has six parameters, so that only the round trip is measured: DesLoc with three streams and
different periods, then Flower's FedAvg on the same nodes. Overhead is a window's wall-clock time
minus the slowest client's own time. The first windows start processes and are left out.
"""

import argparse
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import flwr
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from flower_desloc import DesLoc, SyncSchedule
from flower_desloc.flower.client import client_app
from flower_desloc.flower.observer import WindowRecord
from flower_desloc.flower.records import to_record
from flower_desloc.flower.worker import Worker
from flower_desloc.optim import ADOPT

WARM_UP = 5


def build(_config: Any, _context: Context) -> Worker:
    module = torch.nn.Linear(2, 2)
    return Worker(
        module=module,
        optimizer=ADOPT(module.parameters()),
        loss_at=lambda _step: module(torch.ones(2)).square().sum(),
        num_examples=1,
    )


desloc_client = client_app(build)
fedavg_client = ClientApp()


@fedavg_client.train()
def train(message: Message, _context: Context) -> Message:
    """Do the same work as in Flower's examples."""
    began = time.perf_counter()
    module = torch.nn.Linear(2, 2)
    module.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    optimizer = ADOPT(module.parameters())
    optimizer.zero_grad()
    module(torch.ones(2)).square().sum().backward()
    optimizer.step()
    metrics = MetricRecord({"num-examples": 1, "seconds": time.perf_counter() - began})
    content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


class Timed(FedAvg):
    """FedAvg that records the overhead of each round."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.overheads: list[float] = []
        self._began = 0.0

    def configure_train(self, *args: Any, **kwargs: Any) -> Iterable[Message]:
        self._began = time.perf_counter()
        return super().configure_train(*args, **kwargs)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        result = super().aggregate_train(server_round, replies)
        slowest = max(r.content.metric_records["metrics"]["seconds"] for r in replies)
        self.overheads.append(time.perf_counter() - self._began - slowest)
        return result


class Overheads:
    """Observer that records the overhead of each window."""

    def __init__(self) -> None:
        self.overheads: list[float] = []

    def started(self, plan: Any) -> None: ...

    def joined(self, client: str, about: Any) -> None: ...

    def window(self, record: WindowRecord) -> None:
        if record.round > 0:
            self.overheads.append(record.seconds["total"] - record.seconds["clients"])


def both() -> ClientApp:
    """One ClientApp that serves both strategies: DesLoc's messages carry a run key."""
    app = ClientApp()

    @app.train()
    def dispatch(message: Message, context: Context) -> Message:
        desloc = "run-key" in message.content.config_records.get("config", ConfigRecord())
        return (desloc_client if desloc else fedavg_client)(message, context)

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        return desloc_client(message, context)

    @app.query("goodbye")
    def goodbye(message: Message, context: Context) -> Message:
        return desloc_client(message, context)

    return app


def measure(num_clients: int, num_windows: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    server = ServerApp()

    @server.main()
    def main(grid: Grid, _context: Context) -> None:
        schedule = SyncSchedule({"params": 1, "exp_avg": 3, "exp_avg_sq": 6})
        watch = Overheads()
        initial = to_record(dict(torch.nn.Linear(2, 2).named_parameters()))
        strategy = DesLoc(schedule, num_windows, evaluate_clients=False)
        strategy.start(grid, initial, observer=watch)
        fedavg = Timed(fraction_evaluate=0.0, min_available_nodes=num_clients)
        initial = ArrayRecord(torch.nn.Linear(2, 2).state_dict())
        fedavg.start(grid, initial, num_rounds=num_windows)
        found["desloc"] = watch.overheads[WARM_UP:]
        found["fedavg"] = fedavg.overheads[WARM_UP:]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_simulation(
            server,
            both(),
            num_supernodes=num_clients,
            backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--windows", type=int, default=60)
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args()
    found = measure(args.clients, args.windows)
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"flwr": flwr.__version__, "torch": torch.__version__},
        "clients": args.clients,
        "windows": args.windows - WARM_UP,
        "overhead_seconds": {
            name: {
                "median": statistics.median(times),
                "p10": statistics.quantiles(times, n=10)[0],
                "p90": statistics.quantiles(times, n=10)[-1],
            }
            for name, times in found.items()
        },
    }
    medians = {name: spread["median"] for name, spread in result["overhead_seconds"].items()}
    result["ratio"] = medians["desloc"] / medians["fedavg"]
    for name, spread in result["overhead_seconds"].items():
        print(f"{name:8}", *(f"{what} {seconds:.3f} s  " for what, seconds in spread.items()))
    print(f"desloc / fedavg  {result['ratio']:.2f}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
