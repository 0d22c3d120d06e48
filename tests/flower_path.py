"""The whole federated path in one process, over a problem of federation.py."""

import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import reference
from federation import OPTIMIZERS, Objective, OptimizerCase, Problem, Quadratic, due_table, initial
from flwr.app import Context, Message, RecordDict
from reference import State, Tree

from flower_desloc import DesLoc, SyncSchedule, prime, stream_names, take
from flower_desloc.core.client_info import ClientInfo
from flower_desloc.core.lr_schedule import LRSchedule, constant
from flower_desloc.core.outer import OuterOptimizer
from flower_desloc.core.schedule import GRADIENTS, PARAMS, Period
from flower_desloc.core.worker import Clipping, Worker
from flower_desloc.flower.arrays import from_record, to_record
from flower_desloc.flower.baselines.data_parallel import DataParallel
from flower_desloc.flower.client import client_app
from flower_desloc.flower.client_state import StateFiles
from flower_desloc.flower.inprocess import InProcessGrid
from flower_desloc.flower.observer import Observer, RunInfo, WindowRecord

RUN = "run"


def free_address() -> str:
    """Return the address of a port of this machine that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Grid(InProcessGrid):
    """An in-process grid whose clients come and go, and whose replies a test may change."""

    def __init__(self, app: Any, num_clients: int, folder: Path) -> None:
        nodes = [
            {"partition-id": m, "num-partitions": num_clients, "state-dir": str(folder)}
            for m in range(num_clients)
        ]
        super().__init__(app, nodes)
        self.away: set[int] = set()
        self.meddle: Callable[[Message, Message], Message | None] = lambda asked, reply: reply
        self.instead: Callable[[Message], Message | None] = lambda asked: None
        """The reply of a client that is not asked at all."""
        self.sent: list[Message] = []

    def on_training(self, change: Callable[[Message], object], node: int | None = None) -> None:
        """Call ``change`` with every reply to training, or with those of one node."""

        def meddle(asked: Message, reply: Message) -> Message:
            here = node is None or asked.metadata.dst_node_id == node
            if here and asked.metadata.message_type == "train":
                change(reply)
            return reply

        self.meddle = meddle

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self.contexts if node - 1 not in self.away]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.sent += messages
        return super().push_messages(messages)

    def _answer(self, message: Message) -> Any:  # None: the reply is lost
        return self.meddle(message, self.instead(message) or super()._answer(message))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [reply for reply in super().pull_messages(message_ids) if reply is not None]


class Watch(Observer):
    """Keeps the records, and calls every function in ``after`` with each."""

    def __init__(self, *after: Callable[[WindowRecord], None]) -> None:
        self.records: list[WindowRecord] = []
        self.run: RunInfo | None = None
        self.joiners: list[str] = []
        self.after = [*after]

    def started(self, run: RunInfo) -> None:
        self.run = run

    def joined(self, client: str, info: ClientInfo) -> None:
        self.joiners.append(client)

    def window(self, record: WindowRecord) -> None:
        self.records.append(record)
        for call in self.after:
            call(record)


class Run:
    """One run of the whole path over a problem of federation.py.

    ``optimizer`` is one of ``OPTIMIZERS``, by name, or another; ``schedule`` may be the periods of
    params and of each state in turn.
    """

    def __init__(
        self,
        optimizer: str | OptimizerCase,
        schedule: SyncSchedule | Sequence[Period],
        folder: Path,
        *,
        problem: Objective | None = None,
        num_clients: int = 3,
        num_steps: int = 12,
        lr_schedule: LRSchedule | None = None,
        clipping: Clipping | None = None,
        present: Callable[[int, int], bool] = lambda m, t: True,
        outer: OuterOptimizer | None = None,
        strategy: type[DesLoc] = DesLoc,
        **options: Any,
    ) -> None:
        case = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
        if not isinstance(schedule, SyncSchedule):
            schedule = SyncSchedule(case.periods(*schedule))
        problem = problem or Quadratic()
        self.problem, self.case, self.schedule = problem, case, schedule
        self.folder, self.num_clients, self.num_steps = folder, num_clients, num_steps
        self.present = present
        self.keep_workers = False
        self.data_versions: dict[int, str] = {}
        """By client; those that are not in it have one that stays the same."""
        workers: dict[int, Worker] = {}

        def build(config: Any, context: Context) -> Worker:
            m = int(context.node_config["partition-id"])
            if self.keep_workers and m in workers:
                return workers[m]
            module = problem.module()
            workers[m] = Worker(
                module=module,
                optimizer=case.make(module.parameters()),
                loss_at=lambda t: problem.loss(module, m, t),
                num_examples=m + 1,
                lr_schedule=lr_schedule or constant(),
                clipping=clipping or Clipping(),
                data_version=lambda: self.data_versions.get(m, "the same"),
            )
            return workers[m]

        self.app = client_app(build)
        self.grid = Grid(self.app, num_clients, folder)
        self.watch = Watch(self._after)
        module = problem.module()
        local = case.make(module.parameters())
        prime(local)
        streams = take(module, local, stream_names(module, local))
        self.initial = to_record(streams.pop(PARAMS))
        self.zeros = streams
        options = {"templates": streams, "evaluate_clients": False, "run_key": RUN, **options}
        self.strategy: DesLoc
        if GRADIENTS in schedule.periods:
            assert outer is not None
            self.strategy = DataParallel(num_steps, outer, **options)
        else:
            options = {"sync_bound": False, **options}
            self.strategy = strategy(schedule, num_steps, outer=outer, **options)
        self.states: list[State] = []

    def start(self) -> list[State]:
        """Run to the end; return what every client then holds, including the averages."""
        self.leave(0)
        self.result = self.strategy.start(self.grid, self.initial, observer=self.watch)
        return self.states

    def final(self) -> Tree:
        """Run to the end; return the parameters."""
        self.start()
        return from_record(self.result.arrays)

    def renumber(self, order: Iterable[int]) -> None:
        """Give the clients other nodes, in this order; in Flower the ids of nodes are random."""
        configs = [context.node_config for context in self.grid.contexts.values()]
        self.grid.contexts = {
            100 - i: Context(1, 100 - i, configs[m], RecordDict(), {}) for i, m in enumerate(order)
        }

    def files(self, m: int) -> StateFiles:
        return StateFiles(self.folder, RUN, f"client-{m}")

    def _after(self, record: WindowRecord) -> None:
        self.leave(record.step)
        # With reset states or gradients the parameters are all there is to compare.
        kept = GRADIENTS not in self.schedule.periods and not self.schedule.resets
        if record.step == self.num_steps and kept:
            self.states = [self._state(m) for m in range(self.num_clients)]

    def leave(self, step: int) -> None:
        self.grid.away = {m for m in range(self.num_clients) if not self.present(m, step)}

    def _state(self, m: int) -> State:
        common = self.strategy.state
        kept = self.files(m).last()
        assert kept is not None
        state = {stream: dict(tensors) for stream, tensors in kept.streams.items()}
        for stream, version in common.versions.items():
            if version != kept.versions[stream]:
                state[stream] = dict(common.average(stream))
        return state


def oracle(run: Run, **changed: Any) -> list[State]:
    """Return the outcome of the same run in reference.py, with a constant learning rate."""
    return reference.run(
        run.case.oracle,
        initial(run.problem),
        cast(Problem, run.problem).grad,
        num_workers=run.num_clients,
        num_steps=run.num_steps,
        delay=run.strategy.sync_delay,
        due=due_table(run.schedule, run.num_steps),
        lr=lambda t: run.case.lr,
        **changed,
    )
