"""The grid that one of Flower's own strategies talks over: the clients of a round, and no more."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from flower_desloc.core.averaging import Drift, Mean
from flower_desloc.core.schedule import PARAMS, Window
from flower_desloc.flower.content import records_of
from flower_desloc.flower.exchange import kind, time_to_live
from flower_desloc.flower.federation import Federation, FederationError
from flower_desloc.flower.members import Member, drawn, in_order, present
from flower_desloc.flower.metrics import FromTotals, check_evaluation, client_record, number
from flower_desloc.flower.observer import ClientRecord, EventKind
from flower_desloc.flower.policy import Policy
from flower_desloc.flower.records import CONFIG, WindowReply, from_record
from flower_desloc.flower.stock_client import ACTION, START, STOP, WEIGHTED_BY

_TRAIN, _EVALUATE = f"train.{ACTION}", f"evaluate.{ACTION}"
_DUE = frozenset({PARAMS})
_BEFORE = Window(0, 0, frozenset())


@dataclass
class Round:
    """What is told of one round once it is over; round 0 is the state before training."""

    number: int = 0
    window: Window = _BEFORE
    clients: dict[str, ClientRecord] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    drift: dict[str, Drift] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)
    heard: float = field(default_factory=time.perf_counter)
    """When the last reply was in; then the strategy averages."""
    evaluation: float = 0.0


class Link(Grid):
    """Shows a strategy the clients of the round, and takes its messages to them and back.

    Of the replies it returns those that can be averaged, in the order of the clients' names: the
    strategy adds them up as they come, and floating-point sums depend on their order.

    Parameters
    ----------
    grid : Grid
        The link to all nodes.
    policy : Policy
        Who takes part, and what happens when somebody does not.
    run_key : str
        Names the run.
    settings : Mapping
        The app's own, for the greeting and evaluations; the strategy sends them to train.
    params : ArrayRecord
        What training begins with.

    """

    def __init__(
        self,
        grid: Grid,
        policy: Policy,
        run_key: str,
        settings: Mapping[str, str | int | float | bool],
        params: ArrayRecord,
        seed: int = 0,
    ) -> None:
        self.federation = Federation(grid, policy, run_key)
        self.round = Round()
        self.params = params
        """What the strategy made last, in the model's own types."""
        self.like = {key: tensor.to("meta") for key, tensor in from_record(params).items()}
        self._grid = grid
        self._policy = policy
        self._seed = seed
        self._settings = settings
        self._members: list[Member] = []

    def open(self) -> list[Member]:
        """Wait for the quorum and return the clients that are new."""
        self.federation.wait_for_quorum()
        return in_order(self.federation.welcome(self._settings, self.round.window.start))

    def begin(self, now: Round) -> list[Member]:
        """Begin a round and draw who trains in it; return the clients that are new."""
        self.round = now
        joined = list(self.federation.welcome(self._settings, now.window.start))
        self._draw()
        if len(self._members) < self._policy.min_clients:
            joined += self.open()
            self._draw()
        if not self._members:  # a strategy of Flower's would wait for ever
            raise FederationError(f"no client takes part in {self._where()}")
        return joined

    def evaluate(self, metrics: FromTotals | None) -> dict[str, WindowReply]:
        """Ask every client that takes part to evaluate the parameters; return the usable replies.

        Not by way of the strategy: Flower's take the mean of the clients' metrics, where DES-LOC
        adds up their totals.
        """
        now = self.round
        config = ConfigRecord({**self._settings, "server-round": now.number})
        members = present(self.federation.online(), self._policy, now.window.stop)
        requests = self._requests(members, _EVALUATE, config, now.window.stop)
        replies: dict[str, WindowReply] = {}
        for _, member, reply in self._usable(requests, frozenset()):
            try:
                check_evaluation(reply, metrics)
            except ValueError as error:
                self._leave_out(member, f"evaluation: {error}")
            else:
                replies[member.name] = reply
        return replies

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that train in this round."""
        return [member.node_id for member in self._members]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Take a strategy's messages to the clients; return the usable replies.

        How long to wait is the policy's. While fewer replies than its quorum are usable, the
        others are asked for again; raises :class:`FederationError` when that does not help.
        """
        del timeout
        messages = list(messages)
        if not messages:
            return []
        nodes = {message.metadata.dst_node_id for message in messages}
        asked = [member for member in self._members if member.node_id in nodes]
        config = records_of(ConfigRecord, messages[0].content)[CONFIG]  # everyone is sent the same
        now = self.round
        usable: dict[str, Message] = {}
        for _ in range(1 + self._policy.repeats):
            missing = [member for member in asked if member.name not in usable]
            requests = self._requests(missing, _TRAIN, config, now.window.start)
            for message, member, reply in self._usable(requests, _DUE):
                usable[member.name] = message
                now.clients[member.name] = client_record(reply)
                now.left_out.pop(member.name, None)
            if len(usable) >= self._policy.min_clients:
                break
            log(WARNING, "%s has too few usable replies: %s", self._where(), now.left_out)
            self.federation.note("repeated", "", f"{len(usable)} usable replies")
        else:
            raise FederationError(
                f"{self._where()} stayed below federation.min_clients={self._policy.min_clients} "
                f"through federation.repeats={self._policy.repeats} repeats; "
                f"left out: {now.left_out}"
            )
        names = [member.name for member in asked if member.name in usable]
        now.clients = {name: now.clients[name] for name in names}
        replies = [usable[name] for name in names]
        now.drift = self._drift(replies)
        now.heard = time.perf_counter()
        return replies

    def _draw(self) -> None:
        start = self.round.window.start
        online = present(self.federation.online(), self._policy, start)
        self._members = drawn(online, self._policy, start, self._seed)

    def _requests(
        self, members: Iterable[Member], message_type: str, config: ConfigRecord, start: int
    ) -> Iterator[Message]:
        stop, ttl = self.round.window.stop, time_to_live(self._policy.timeout)
        content = RecordDict(
            {PARAMS: self.params, CONFIG: ConfigRecord({**config, START: start, STOP: stop})}
        )
        for member in members:
            group = str(self.round.number)
            yield Message(content, member.node_id, message_type, group_id=group, ttl=ttl)

    def _usable(
        self, requests: Iterable[Message], due: frozenset[str]
    ) -> Iterator[tuple[Message, Member, WindowReply]]:
        """Yield the replies that can be used; leave the other clients out, saying why."""
        for message in self.federation.ask(requests):
            member = self.federation.member(message)
            try:
                if message.has_error():
                    raise ValueError(message.error.reason)
                reply = WindowReply.from_content(message.content)
                reply.check(self.round.window, due, {PARAMS: self.like})
                reply.check_values()
            except ValueError as error:
                reason = str(error) if due else f"evaluation: {error}"
                self._leave_out(member, reason, kind(message))
            else:
                yield message, member, reply

    def _leave_out(self, member: Member, reason: str, kind: EventKind = "refused") -> None:
        self.round.left_out[member.name] = reason
        self.federation.note(kind, member.name, reason)
        self.federation.fail(f"{member.name} is left out of {self._where()}: {reason}")

    def _drift(self, replies: Iterable[Message]) -> dict[str, Drift]:
        mean = Mean({PARAMS: from_record(self.params)})
        weighted_by = WEIGHTED_BY[self._policy.weighting]
        for message in replies:
            reply = WindowReply.from_content(message.content)
            mean.add(reply.streams, number(reply.metrics[weighted_by]))
        return mean.drift(mean.result())

    def _where(self) -> str:
        window = self.round.window
        return f"the round of steps {window.start + 1} to {window.stop}"

    # What is left of a grid, of which Flower's strategies need nothing.

    @property
    def run(self) -> Run:
        """Return what the grid underneath does."""
        return self._grid.run

    def set_run(self, run: Run) -> None:
        """Pass it on."""
        self._grid.set_run(run)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:  # noqa: ARG002
        """Refuse: Flower has deprecated this; construct a Message."""
        raise RuntimeError("construct a Message instead")

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:  # noqa: ARG002
        """Refuse: replies are returned in order, so all together."""
        raise RuntimeError("call send_and_receive instead")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:  # noqa: ARG002
        """Refuse: replies are returned in order, so all together."""
        raise RuntimeError("call send_and_receive instead")
