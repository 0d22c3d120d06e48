"""The ServerApp: timed blocks of DesLoc windows, warm and cold, and of FedAvg rounds."""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from flower_desloc import DesLoc, SyncSchedule
from flower_desloc.app.config import dump, load
from flower_desloc.app.tasks import build_task
from flower_desloc.flower.arrays import to_record
from flower_desloc.flower.observer import Observer, WindowRecord
from flower_desloc.flower.policy import Policy

CLIENTS = 2

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Write the measurements to the file ``output``."""
    run = context.run_config
    windows, steps = int(run["windows"]), int(run["blocks"]) * int(run["windows"])
    config = load("quickstart", f"{run['overrides']} run.steps={steps}")
    params = to_record(dict(build_task(config).build_model().named_parameters()))
    turns = Turns(Watched(grid), {"settings": dump(config)}, params, windows)
    turns.desloc(steps, "warm")
    Path(str(run["output"])).write_text(json.dumps({"windows": turns.found}))


class Turns(Observer):
    """DesLoc's observer: runs a block of the other variants after every block of warm windows."""

    def __init__(self, grid: "Watched", settings: dict[str, Any], params: Any, block: int) -> None:
        self.found: list[dict[str, Any]] = []
        self._grid: Any = grid  # a Grid by its __getattr__
        self._settings, self._params, self._block = settings, params, block
        self._who = ""

    def desloc(self, steps: int, who: str) -> None:
        before, self._who = self._who, who
        strategy = DesLoc(
            SyncSchedule({"params": 1, "exp_avg": 3, "exp_avg_sq": 6}),
            steps,
            policy=Policy(min_clients=CLIENTS),
            evaluate_clients=False,
        )
        settings = ConfigRecord({**self._settings, "cold": who == "cold"})
        strategy.start(self._grid, self._params, settings, observer=self)
        self._who = before

    def window(self, record: WindowRecord) -> None:
        exchanges = self._grid.take()
        if record.round == 0:
            return
        self._note(self._who, record.round, record.seconds["total"], exchanges)
        if record.round % self._block == 0 and self._who == "warm":
            self.desloc(self._block, "cold")
            self._grid.take()
            self._fedavg()

    def _fedavg(self) -> None:
        fedavg = Timed(fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        config = ConfigRecord(self._settings)
        fedavg.start(self._grid, self._params, self._block, train_config=config)
        exchanges = self._grid.take()
        for number, total in enumerate(fedavg.seconds, start=1):
            mine, exchanges = exchanges[:CLIENTS], exchanges[CLIENTS:]
            self._note("fedavg", number, total, mine)

    def _note(self, who: str, number: int, total: float, exchanges: list[Any]) -> None:
        # The first of a block begins at another point of the polling interval than the others.
        first = (number - 1) % self._block == 0
        self.found.append({"who": who, "first": first, "seconds": total, "exchanges": exchanges})


class Timed(FedAvg):
    """FedAvg that measures its rounds."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seconds: list[float] = []
        self._began = 0.0

    def configure_train(self, *args: Any, **kwargs: Any) -> Iterable[Message]:
        self._began = time.perf_counter()
        return super().configure_train(*args, **kwargs)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        for reply in replies:
            if reply.has_error():
                raise RuntimeError(reply.error.reason)
        result = super().aggregate_train(server_round, replies)
        self.seconds.append(time.perf_counter() - self._began)
        return result


class Watched:
    """Flower's grid, which also records when messages were sent and replies received."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._sent: dict[str, float] = {}
        self._had: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def take(self) -> list[dict[str, Any]]:
        """Return the exchanges since the last call, one for each reply that has times."""
        had, self._had = self._had, []
        return had

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        began = time.time()
        ids = list(self._grid.push_messages(messages))
        self._sent |= dict.fromkeys(ids, began)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(self._grid.pull_messages(message_ids))
        self._note(replies)
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Flower's own, with its polling."""
        began = time.time()
        replies = list(self._grid.send_and_receive(messages, timeout=timeout))
        self._sent |= {reply.metadata.reply_to_message_id: began for reply in replies}
        self._note(replies)
        return replies

    def _note(self, replies: Iterable[Message]) -> None:
        for reply in replies:
            if not reply.has_error() and "times" in reply.content:
                asked = reply.metadata.reply_to_message_id
                own = reply.content.metric_records["metrics"]["seconds"]
                times = reply.content.config_records["times"]
                extra = {"id": asked, "own": own, "sent": self._sent[asked], "had": time.time()}
                self._had.append({**times, **extra})
