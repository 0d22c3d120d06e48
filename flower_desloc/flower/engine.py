"""The round engine: greet the clients, ask them, collect their replies, repeat below the quorum.

One round is one window. A strategy says what to send and how to average; the engine knows the
clients, takes their replies in one fixed order, and keeps the record of the round.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from logging import INFO, WARNING

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flower_desloc.core.averaging import Drift
from flower_desloc.core.schedule import Window
from flower_desloc.flower.bundles import bundled
from flower_desloc.flower.checkpoint import Checkpoint
from flower_desloc.flower.exchange import (
    Probe,
    event_kind,
    exchange,
    poll_for_objects_often,
    time_to_live,
)
from flower_desloc.flower.fingerprint import fingerprint
from flower_desloc.flower.internals import HttpGrid, log
from flower_desloc.flower.members import Member, Members, in_order
from flower_desloc.flower.messages import (
    ARE_YOU_THERE,
    GOODBYE,
    HELLO,
    STATE_LOST,
    STATE_NEW,
    WindowReply,
    WindowRequest,
)
from flower_desloc.flower.meter import TrafficMeter
from flower_desloc.flower.metrics import client_record, evaluation_record, number
from flower_desloc.flower.observer import ClientRecord, Event, EventKind, Observer, WindowRecord
from flower_desloc.flower.policy import FederationError, Policy
from flower_desloc.flower.records import records_of

Settings = Mapping[str, str | int | float | bool]
"""The app's own settings, sent with every request."""

BEFORE_TRAINING = Window(0, 0, frozenset())

_GOODBYE_TIMEOUT = 60.0


@dataclass
class Round:
    """One window while it runs, and what is recorded of it; number 0 is before training."""

    number: int = 0
    window: Window = BEFORE_TRAINING
    clients: dict[str, ClientRecord] = field(default_factory=dict)
    """The clients whose replies were averaged."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Client name -> reason."""
    drift: dict[str, Drift] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)

    def __str__(self) -> str:
        if self.window.stop == 0:
            return "the evaluation before training"
        return f"the window of steps {self.window.start + 1} to {self.window.stop}"


class RoundEngine:
    """The clients of one run over one grid, and the round in progress.

    Parameters
    ----------
    grid : Grid
        Flower's connection to the nodes.
    policy : Policy
        Who takes part, and what a failed client does to the run.
    run_key : str
        Names the run in the clients' own files.
    settings : Mapping
        The app's settings, for the greeting.
    seed : int
        Draws the clients of a window.
    resume : Checkpoint, optional
        The checkpoint from which the run resumes.

    """

    def __init__(
        self,
        grid: Grid,
        policy: Policy,
        run_key: str,
        settings: Settings,
        *,
        seed: int = 0,
        resume: Checkpoint | None = None,
    ) -> None:
        self.run_key = run_key
        self.round = Round()
        self.attempt = secrets.token_hex(4)
        """Identifies this start of the server in the clients' own files."""
        self.checkpoint = resume.step if resume else -1
        """Step of the server's last checkpoint; -1: none."""
        self.attempts = {**(resume.attempts if resume else {}), self.attempt: self.checkpoint}
        """The starts of the server (``WindowRequest.attempts``)."""
        self.meter = TrafficMeter()
        self.members = Members(grid, policy, seed, self.note)
        self.observers: list[Observer] = []
        """Called in this order."""
        self._grid, self._policy, self._settings = grid, policy, settings
        self._is_deployment = isinstance(grid, HttpGrid)
        if self._is_deployment:
            poll_for_objects_often()
        # A SuperNode serves one message after the other; a simulation several, and loses none.
        self._probe = (
            Probe(lambda node_id: self._message(RecordDict(), node_id, ARE_YOU_THERE))
            if self._is_deployment
            else None
        )
        self._bundles: dict[int, tuple[ArrayRecord, ArrayRecord]] = {}  # by the first one's id
        self._events: list[Event] = []

    # Clients

    def open(self, step: int) -> list[Member]:
        """Wait for the quorum and greet the clients, which are to begin after ``step`` steps."""
        self.members.wait_for_quorum()
        clients = in_order(self._greet(step))
        known = {member.name for member in clients}
        if unknown := sorted(self._policy.step_seconds.keys() - known):
            log(
                WARNING,
                "federation.step_seconds names %s, but no client that is online has that name",
                " and ".join(unknown),
            )
        return clients

    def farewell(self) -> None:
        """Tell the clients that the run is over, so that they delete their files of it."""
        content = WindowRequest(run_key=self.run_key).to_content(0)
        requests = [self._message(content, m.node_id, GOODBYE) for m in self.members.online()]
        # The run is over: a silent client must not delay its result for long.
        patience = min(self._policy.timeout, _GOODBYE_TIMEOUT)
        for reply in exchange(self._grid, requests, patience=patience):
            if reply.has_error():
                log(WARNING, "a client keeps its files of this run: %s", reply.error.reason)

    # One round

    def begin(self, number: int, window: Window) -> None:
        """Begin a round; greet the clients that are new."""
        self.round = Round(number, window)
        if number > 0:
            for member in self._greet(window.start):
                for observer in self.observers:
                    observer.joined(member.name, member.about)

    def until_quorum(self, attempt: Callable[[], MetricRecord | None]) -> MetricRecord:
        """Return what ``attempt`` returns, repeating the window while that is None.

        Raises ``FederationError`` when the policy's repeats are used up.
        """
        for repeat in range(1 + self._policy.repeats):
            if repeat > 0:  # an absent client may be back, at another node
                self.members.wait_for_quorum()
                list(self._greet(self.round.window.start))
            if (metrics := attempt()) is not None:
                return metrics
            log(WARNING, "%s has too few usable replies: %s", self.round, self.round.left_out)
            self.note("repeated", "", f"{len(self.round.clients)} usable replies")
            self.round.clients.clear()
        raise FederationError(
            f"{self.round} stayed below federation.min_clients={self._policy.min_clients} "
            f"through federation.repeats={self._policy.repeats} repeats; "
            f"left out: {self.round.left_out}"
        )

    def request(
        self,
        member: Member,
        message_type: str,
        request: WindowRequest,
        averages: Mapping[str, ArrayRecord],
    ) -> Message:
        """Return the message of a request, which carries ``averages``.

        The records are shared between messages: never change them.
        """
        bundles = self._is_deployment and member.reads_bundles
        content = replace(request, bundles=bundles).to_content(self.round.number)
        for name, record in averages.items():
            content[name] = self._bundled(record) if bundles else record
        return self._message(content, member.node_id, message_type)

    def ask(
        self, requests: Iterable[Message], again: Callable[[Member], Message]
    ) -> Iterator[Message]:
        """Send ``requests`` and yield one reply to each, in their order.

        A client that replies that it has lost its state is asked once more, with what ``again``
        returns for it: at once and not at the end, because the order of summation is fixed.
        """
        for reply in self._exchange(requests):
            if _has_lost_state(reply):
                member = self.members.at(reply.metadata.src_node_id)
                log(INFO, "%s has lost its state and is sent everything", member.name)
                self.note("state lost", member.name, "it is sent everything")
                member.held.clear()
                yield from self._exchange([again(member)])
            else:
                yield reply
            del reply  # free its memory before the next one is received

    def add(self, member: Member, reply: WindowReply) -> None:
        """Record that a reply was averaged."""
        self.round.clients[member.name] = client_record(reply)
        self.round.left_out.pop(member.name, None)  # of an earlier repeat
        if member.held and STATE_NEW in reply.metrics:
            self.note("state lost", member.name, "it started from the last averages")

    @contextmanager
    def leaving_out(self, message: Message, prefix: str = "") -> Iterator[Member]:
        """Leave the sender out of the round if the block raises ``ValueError``."""
        member = self.members.at(message.metadata.src_node_id)
        try:
            yield member
        except ValueError as error:
            # As text: an exception keeps the reply alive through its traceback.
            reason = f"{prefix}{error}"
        else:
            return
        self.leave_out(member, reason, event_kind(message))

    def leave_out(self, member: Member, reason: str, kind: EventKind) -> None:
        """Record why a client is left out; raises ``FederationError`` if that ends the run."""
        self.round.left_out[member.name] = reason
        self.note(kind, member.name, reason)
        self._policy.fail(f"{member.name} is left out of {self.round}: {reason}")

    def note(self, kind: EventKind, client: str, what: str) -> None:
        """Add an event to the record of the window."""
        self._events.append(Event(kind=kind, client=client, what=what))

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the time that the block takes to ``round.seconds[what]``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self.round.seconds[what] = self.round.seconds.get(what, 0.0) + seconds

    def end(self, streams: list[str], result: Result) -> None:
        """Record the round, after which ``streams`` were averaged, for the observers."""
        now, events = self.round, self._events
        self._events = []
        metrics = result.train_metrics_clientapp.get(now.number)
        record = WindowRecord(
            round=now.number,
            start=now.window.start,
            step=now.window.stop,
            streams=streams,
            train_loss=None if metrics is None else number(metrics["train-loss"]),
            clients=now.clients,
            left_out=now.left_out,
            traffic=self.meter.read(),
            drift=now.drift,
            seconds={
                "total": time.perf_counter() - now.began,
                "clients": max((c.seconds for c in now.clients.values()), default=0.0),
                "averaging": now.seconds.get("averaging", 0.0),
                "evaluation": now.seconds.get("evaluation", 0.0),
            },
            central=evaluation_record(result.evaluate_metrics_serverapp.get(now.number)),
            federated=evaluation_record(result.evaluate_metrics_clientapp.get(now.number)),
            events=events,
        )
        for observer in self.observers:
            observer.window(record)

    # Messages

    def _greet(self, step: int) -> Iterator[Member]:
        """Greet the unknown nodes and yield their clients, for the window after ``step`` steps."""
        hello = WindowRequest(
            run_key=self.run_key,
            attempt=self.attempt,
            attempts=self.attempts,
            checkpoint=self.checkpoint,
            start=step,
            config={**self._settings, "code": fingerprint()},
        )
        nodes = self.members.new_nodes()
        asked = (self._message(hello.to_content(0), node_id, HELLO) for node_id in nodes)
        return self.members.add(self._exchange(asked))

    def _exchange(self, requests: Iterable[Message]) -> Iterator[Message]:
        for reply in exchange(
            self._grid, self._counted(requests), patience=self._policy.timeout, probe=self._probe
        ):
            self.meter.received(reply)
            yield reply
            del reply  # free its memory before the next one is received

    def _counted(self, requests: Iterable[Message]) -> Iterator[Message]:
        for message in requests:
            self.meter.sent(message)
            yield message
        self._bundles.clear()

    def _message(self, content: RecordDict, node_id: int, message_type: str) -> Message:
        ttl = time_to_live(self._policy.timeout)
        group = str(self.round.number)
        return Message(content, node_id, message_type, group_id=group, ttl=ttl)

    def _bundled(self, record: ArrayRecord) -> ArrayRecord:
        """Return a record in bundles; one for all the requests that carry it."""
        if id(record) not in self._bundles:
            self._bundles[id(record)] = record, bundled(record)
        return self._bundles[id(record)][1]


def _has_lost_state(reply: Message) -> bool:
    return reply.has_content() and any(
        STATE_LOST in record for record in records_of(MetricRecord, reply.content).values()
    )
