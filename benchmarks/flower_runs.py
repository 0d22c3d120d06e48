"""Shared by the benchmarks: runs in Flower's simulation and deployments, and what they record."""

import json
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import common  # noqa: F401  (before Flower and Ray: it sets their environment)
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from flower_desloc.app.engines.superlink import CONNECTION, SuperLink
from flower_desloc.app.sites.deployment.environment import as_argument
from flower_desloc.flower.observer import Observer, WindowRecord


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
        own: list[Any] = [r.content.metric_records["metrics"]["seconds"] for r in replies]
        self.overheads.append(time.perf_counter() - self._began - max(own))
        return result


def simulate(main: Callable[[Grid, Context], None], app: ClientApp, num_clients: int) -> None:
    """Run ``main`` as the ServerApp of Flower's simulation, with a core for each client."""
    server = ServerApp()
    server.main()(main)
    resources: dict[str, Any] = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
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
