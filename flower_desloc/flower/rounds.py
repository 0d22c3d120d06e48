"""The loop over windows: greet clients, ask them, collect replies, repeat below the quorum.

One round is one window. A strategy says what to send and how to average; the loop knows the
clients and keeps the record of the round. Messages pass through its ``exchange``.
"""

import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from logging import INFO, WARNING

from flwr.app import Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flower_desloc.core.averaging import Drift
from flower_desloc.core.schedule import Window
from flower_desloc.core.types import Streams
from flower_desloc.flower.checkpoint import Checkpoint
from flower_desloc.flower.exchange import Exchange, event_kind
from flower_desloc.flower.failures import (
    ClientError,
    DivergedError,
    FederationError,
    WindowError,
    failure_of,
    reason_of,
)
from flower_desloc.flower.fingerprint import PACKAGE, fingerprint
from flower_desloc.flower.flight.at_server import Carrier
from flower_desloc.flower.internals import log
from flower_desloc.flower.members import Member, Members, in_order
from flower_desloc.flower.messages import GOODBYE, HELLO, Settings, WindowRequest
from flower_desloc.flower.metrics import evaluation_record
from flower_desloc.flower.observer import (
    ClientRecord,
    Event,
    EventKind,
    Observer,
    RunInfo,
    WindowRecord,
)
from flower_desloc.flower.policy import Policy
from flower_desloc.flower.replies import Contribution, number
from flower_desloc.flower.system import return_memory

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
    """Client name -> why its reply was not averaged."""
    diverged: set[str] = field(default_factory=set)
    """Those of ``left_out`` whose training has diverged."""
    asked: list[Member] = field(default_factory=list)
    """The clients that are asked for local steps."""
    failures: Counter[str] = field(default_factory=Counter)
    """How often each client was left out, in all repeats of the window."""
    drift: dict[str, Drift] = field(default_factory=dict)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    began: float = field(default_factory=time.perf_counter)

    @property
    def evaluation(self) -> str:
        """The evaluation at its end, in words."""
        stop = self.window.stop
        return f"the evaluation after step {stop}" if stop else "the evaluation before training"

    def __str__(self) -> str:
        if self.window.stop == 0:
            return self.evaluation
        return f"the window of steps {self.window.start + 1} to {self.window.stop}"


class RoundHook:
    """Something that changes a run between its windows, or ends it by an exception.

    Hooks are called after the observer of the run, which only looks.
    """

    @property
    def finished(self) -> bool:
        """Whether the run is to end before its next window, as if it had no more steps."""
        return False

    def started(self, run: RunInfo) -> None:
        """Called once, before the first evaluation."""

    def refusal(self, client: str | None, node_id: int) -> str:  # noqa: ARG002
        """Return why a client may not take part in the next window; empty: it may.

        ``client`` is its name; None before it was asked, and empty if it did not say.
        """
        return ""

    def joined(self, client: str, node_id: int) -> None:
        """Called when a client that is admitted has joined, or has come back at another node."""

    def window(self, record: WindowRecord) -> None:
        """Called after every window, and once with round 0."""

    def gave_up(self, failures: Mapping[str, int]) -> None:
        """Called before the run ends because a window stayed below the quorum.

        ``failures`` counts how often each client was left out of it.
        """


class RoundLoop:
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
    templates : Mapping
        Names, shapes and types of each stream, as far as known; may grow.
    seed : int
        Draws the clients of a window.
    resume : Checkpoint or None
        The checkpoint from which the run resumes.
    code : Mapping
        Digests of the app's own code (``flower_desloc.flower.fingerprint.code_of``).
    carrier : Carrier, optional
        Carries arrays beside the messages; by default they are in them.

    """

    def __init__(
        self,
        grid: Grid,
        policy: Policy,
        run_key: str,
        settings: Settings,
        templates: Streams,
        *,
        seed: int,
        resume: Checkpoint | None,
        code: Mapping[str, str],
        carrier: Carrier | None = None,
    ) -> None:
        self.run_key = run_key
        self.round = Round()
        self.attempt = secrets.token_hex(4)
        """Identifies this start of the server in the clients' own files."""
        self.checkpoint = resume.step if resume else -1
        """Step of the server's last checkpoint; -1: none."""
        self.attempts = {**(resume.attempts if resume else {}), self.attempt: self.checkpoint}
        """The starts of the server (``WindowRequest.attempts``)."""
        self.code = {PACKAGE: fingerprint(), **code}
        """The code that every client must run."""
        self.exchange = Exchange(
            grid,
            policy.timeout,
            templates,
            quorum=policy.min_clients,
            grace=policy.grace,
            carrier=carrier,
        )
        data = resume.data if resume else {}
        self.members = Members(
            *(grid, self.exchange, policy, seed, self.note),
            data=data,
            refusal=self._refusal,
            joined=self._joined,
        )
        self.observer = Observer()
        self.hooks: list[RoundHook] = []
        """Called after the observer, in this order."""
        self.policy = policy
        self._settings, self._resume = settings, resume
        self._events: list[Event] = []
        self._late_hellos: list[Message] = []

    # Clients

    def _refusal(self, client: str | None, node_id: int) -> str:
        """Return why a client may not take part in the next window; empty: it may."""
        answers = (hook.refusal(client, node_id) for hook in self.hooks)
        return next(filter(None, answers), "")

    def _joined(self, client: str, node_id: int) -> None:
        for hook in self.hooks:
            hook.joined(client, node_id)

    def open(self, step: int) -> list[Member]:
        """Wait for the quorum and greet the clients, which are to begin after ``step`` steps."""
        self.members.wait_for_quorum(self._listen)
        clients = in_order(self._greet(step))
        known = {member.name for member in clients}
        if unknown := sorted(self.policy.step_seconds.keys() - known):
            log(
                WARNING,
                "federation.step_seconds names %s, but no client that is online has that name",
                " and ".join(unknown),
            )
        return clients

    def farewell(self) -> None:
        """Tell the clients that the run is over, so that they delete their files of it."""
        goodbye = WindowRequest(run_key=self.run_key)
        self._listen()
        online = self.members.online()
        requests = [self.exchange.request(m.node_id, GOODBYE, goodbye) for m in online]
        # The run is over: a silent client must not delay its result for long.
        for reply in self.exchange.replies(requests, at_most=_GOODBYE_TIMEOUT):
            if reply.has_error():
                log(WARNING, "a client keeps its files of this run: %s", reply.error.reason)

    # One round

    @property
    def is_over(self) -> bool:
        """Whether a hook ends the run before its next window."""
        return any(hook.finished for hook in self.hooks)

    def started(self, run: RunInfo) -> None:
        """Call the observer and the hooks before the first evaluation."""
        self.observer.started(run)
        for hook in self.hooks:
            hook.started(run)

    def begin(self, number: int, window: Window) -> None:
        """Begin a round; greet the clients that are new."""
        self.round = Round(number, window)
        self.members.failed_nodes.clear()
        if self._resume is not None and number == self._resume.round + 1:
            self.round.failures.update(self._resume.failures)
        if number > 0:
            self._welcome()

    def until_quorum(self, attempt: Callable[[], MetricRecord | None]) -> MetricRecord:
        """Return what ``attempt`` returns, repeating the window while that is None.

        Raises ``WindowError`` when the policy's repeats are used up, and ``DivergedError`` if the
        training of a client that is left out has diverged.
        """
        for repeat in range(1 + self.policy.repeats):
            # An absent client may be back, at another node; a silent one may answer.
            if repeat > 0 or (self.exchange.silent and self.members.too_few()):
                try:
                    self.members.wait_for_quorum(self._listen)
                except FederationError:
                    self._give_up()
                    raise
                self._welcome()
            if (metrics := attempt()) is not None:
                return metrics
            least, left_out = self.policy.min_clients, self.round.left_out or "none left out"
            text = "%s has fewer usable replies than federation.min_clients=%d: %s%s"
            log(WARNING, text, self.round, least, left_out, self.members.silent)
            self.note("repeated", "", f"{len(self.round.clients)} usable replies")
            self.round.clients.clear()
        self._give_up()
        nodes = self.members.failed_nodes
        silent = self.members.silent
        wait = f"; federation.timeout={self.policy.timeout:g} is the longest wait in seconds"
        kind = DivergedError if self.round.diverged else WindowError
        raise kind(
            f"{self.round} stayed below federation.min_clients={self.policy.min_clients} "
            f"through federation.repeats={self.policy.repeats} repeats; "
            f"left out: {nodes | self.round.left_out or 'none'}{silent}{wait if silent else ''}"
        )

    def _give_up(self) -> None:
        for hook in self.hooks:
            hook.gave_up(self.round.failures)

    def without_state(self, node_id: int) -> Member:
        """Return the client of a node, which has replied that it has lost its state."""
        member = self.members.at(node_id)
        log(INFO, "%s has lost its state and is sent everything", member.name)
        self.note("state lost", member.name, "it is sent everything")
        member.versions.clear()
        return member

    def add(self, member: Member, reply: Contribution, streams: Collection[str]) -> None:
        """Record that a client's reply was averaged; ``streams`` are those of the optimizer.

        A client that has not all of them was evaluated at most, and had nothing to lose.
        """
        self.round.clients[member.name] = reply.record
        self.round.left_out.pop(member.name, None)  # of an earlier repeat
        self.round.diverged.discard(member.name)
        if reply.is_new and member.versions.keys() >= {*streams}:
            self.note("state lost", member.name, "it started from the last averages")

    @contextmanager
    def leaving_out(self, reply: Message, *, evaluation: bool = False) -> Iterator[Member]:
        """Leave the client that replied out if the block raises ``ValueError``.

        It is left out of the averages, or of the ``evaluation``.
        """
        member, kind = self.members.at(reply.metadata.src_node_id), event_kind(reply)
        try:
            yield member
        except ValueError as error:
            # As text: an exception keeps the reply alive through its traceback.
            reason, failure = reason_of(error), failure_of(error)
        else:
            return
        self.leave_out(member, reason, kind, failure, evaluation=evaluation)

    def leave_out(
        self,
        member: Member,
        reason: str,
        kind: EventKind,
        failure: type[FederationError] = ClientError,
        *,
        evaluation: bool = False,
    ) -> None:
        """Record why a client is left out; raises ``failure`` if that ends the run."""
        if not evaluation:
            self.round.left_out[member.name] = reason
            self.round.failures[member.name] += 1
            if failure is DivergedError:
                self.round.diverged.add(member.name)
        self.note(kind, member.name, reason, evaluation=evaluation)
        what = self.round.evaluation if evaluation else self.round
        self.policy.fail(f"{member.name} is left out of {what}", reason, failure)

    def note(self, kind: EventKind, client: str, what: str, *, evaluation: bool = False) -> None:
        """Add an event to the record of the window."""
        self._events.append(Event(kind=kind, client=client, what=what, evaluation=evaluation))

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the time that the block takes to ``round.seconds[what]``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.round.seconds[what] += time.perf_counter() - began

    def end(self, streams: list[str], result: Result) -> None:
        """Record the round, after which ``streams`` were averaged, for the observers."""
        self._note_arrays_in_messages()
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
            traffic=self.exchange.meter.read(),
            drift=now.drift,
            seconds={
                "total": time.perf_counter() - now.began,
                "clients": max((c.seconds for c in now.clients.values()), default=0.0),
                "averaging": now.seconds["averaging"],
                "evaluation": now.seconds["evaluation"],
            },
            central=evaluation_record(result.evaluate_metrics_serverapp.get(now.number)),
            federated=evaluation_record(result.evaluate_metrics_clientapp.get(now.number)),
            events=events,
        )
        self.observer.window(record)
        for hook in self.hooks:
            hook.window(record)
        if self.exchange.is_deployment:  # otherwise clients of this machine need it in a moment
            return_memory()

    def _note_arrays_in_messages(self) -> None:
        """Record for which clients arrays travel in messages, from now on."""
        carrier = self.exchange.carrier
        for node_id, why in carrier.news() if carrier else ():
            with suppress(StopIteration):  # a node that cannot take part
                name = self.members.at(node_id).name
                log(WARNING, "%s: tensors travel in Flower's messages: %s", name, why)
                self.note("by message", name, why)

    def _listen(self) -> None:
        """Look whether silent nodes have answered.

        The reply to a greeting is as good as in time. One to a window is not used: the averages it
        was for are in use. Its client keeps its local steps on the streams that were not due, like
        one that was away.
        """
        for late in self.exchange.late_replies():
            if late.message_type == HELLO:
                self._late_hellos.append(late.reply)
            else:
                self.members.answered(late)

    def _welcome(self) -> None:
        """Greet the clients that are new, and call the observers for each."""
        for member in self._greet(self.round.window.start):
            self.observer.joined(member.name, member.info)

    def _greet(self, step: int) -> Iterator[Member]:
        """Greet the unknown nodes and yield their clients, for the window after ``step`` steps."""
        hello = WindowRequest(
            run_key=self.run_key,
            attempt=self.attempt,
            attempts=self.attempts,
            checkpoint=self.checkpoint,
            start=step,
            code=self.code,
            config=self._settings,
        )
        self._listen()
        late, self._late_hellos = self._late_hellos, []
        greeted = {reply.metadata.src_node_id for reply in late}
        nodes = [node_id for node_id in self.members.new_nodes() if node_id not in greeted]
        asked = (self.exchange.request(node_id, HELLO, hello) for node_id in nodes)
        return self.members.add(chain(late, self.exchange.replies(asked)))
