"""Shared by the benchmarks: statistics, results, Flower's simulation and deployments.

A benchmark is `typer.run(main)`: the arguments of `main` are its options. `--json FILE` stores the
result that is printed.
"""

import json
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import numpy as np
import psutil
import torch
import typer
import yaml
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from flower_desloc.flower.observer import Observer, WindowRecord
from flower_desloc.sites.deployment.environment import as_argument
from flower_desloc.tools.engines.superlink import CONNECTION, SuperLink

Overrides = Annotated[list[str] | None, typer.Argument(help="settings of the runs, KEY=VALUE")]
Times = dict[str, list[float]]
DESLOC = str(Path(sys.executable).with_name("desloc"))


def spread(values: Iterable[float]) -> dict[str, float]:
    """Return the median, and the 10th and 90th percentile."""
    values = list(values)
    tenths = statistics.quantiles(values, n=10)
    return {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[-1]}


def extremes(values: list[float]) -> dict[str, float]:
    """Return the median, the least and the most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def ratios(values: list[float], to: list[float]) -> list[float]:
    """Return the quotients of values that were measured in turns, pair by pair."""
    return [a / b for a, b in zip(values, to, strict=True)]


def slope(points: list[tuple[int, int]]) -> float:
    """Return the least-squares slope of y over x, where x is beyond half of the last one."""
    half = [(x, y) for x, y in points if x > points[-1][0] / 2]
    return float(np.polyfit(*np.array(half).T, 1)[0])


def take_turns(arms: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, Times]:
    """Return wall-clock and CPU seconds of each arm, ``repeats`` times after one warm-up turn."""
    times: dict[str, Times] = {clock: {name: [] for name in arms} for clock in ("wall", "cpu")}
    order = list(arms)
    for turn in range(1 + repeats):
        for name in order:
            began, busy = time.perf_counter(), time.process_time()
            result = arms[name]()
            took, worked = time.perf_counter() - began, time.process_time() - busy
            del result
            if turn > 0:
                times["wall"][name].append(took)
                times["cpu"][name].append(worked)
        order.append(order.pop(0))
    return times


def report(result: dict[str, Any], path: Path | None, device: torch.device | None = None) -> None:
    """Print a result; write it to ``path``, if given, with machine, versions and date."""
    text = yaml.safe_dump(_rounded(result), sort_keys=False, default_flow_style=None, width=110)
    print(text, flush=True)
    if path is None:
        return
    memory = psutil.virtual_memory().total / 1e9
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GB"
    if device is not None and device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    about = {
        "date": date.today().isoformat(),
        "machine": machine,
        "versions": {name: version(name) for name in ("flwr", "ray", "torch", "transformers")},
        "threads": torch.get_num_threads(),
    }
    path.write_text(json.dumps(about | result, indent=2) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


class Windows(Observer):
    """Observer that keeps the record of every window."""

    def __init__(self) -> None:
        self.records: list[WindowRecord] = []

    def window(self, record: WindowRecord) -> None:
        if record.round > 0:
            self.records.append(record)

    def overheads(self) -> list[float]:
        """Return the seconds of each window minus those of its slowest client."""
        return [r.seconds["total"] - r.seconds["clients"] for r in self.records]


class TimedFedAvg(FedAvg):
    """Flower's FedAvg, with the overhead of each round: its seconds minus its slowest client's."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(fraction_evaluate=0.0, **kwargs)
        self.overheads: list[float] = []
        self._began = 0.0

    def configure_train(self, *args: Any, **kwargs: Any) -> Iterable[Message]:
        self._began = time.perf_counter()
        for message in super().configure_train(*args, **kwargs):
            message.metadata.message_type = "train.fedavg"
            yield message

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        result = super().aggregate_train(server_round, replies)
        slowest = max(r.content.metric_records["metrics"]["seconds"] for r in replies)
        self.overheads.append(time.perf_counter() - self._began - slowest)
        return result


def simulate(main: Callable[[Grid, Context], None], app: ClientApp, num_clients: int) -> None:
    """Run ``main`` as the ServerApp of Flower's simulation, with a core for each client."""
    server = ServerApp()
    server.main()(main)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_simulation(server, app, num_supernodes=num_clients, backend_config=resources)


def run_app(
    superlink: SuperLink, app: Path, settings: dict[str, Any], *options: str
) -> dict[str, Any]:
    """Run a Flower app to its end; return the JSON that its ServerApp writes to ``output``."""
    config = as_argument(settings)
    command = ["flwr", "run", str(app), CONNECTION, "--format", "json", "--run-config", config]
    run = superlink.submit([*command, *options])
    log = "\n".join(superlink.log(run))
    if not superlink.status(run).completed:
        raise RuntimeError(log)
    found: dict[str, Any] = json.loads(Path(settings["output"]).read_text())
    return found
