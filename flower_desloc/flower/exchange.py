"""Send requests and receive the replies in an order that does not depend on who is first."""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

from flwr.app import DEFAULT_TTL, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from flower_desloc.flower.bundles import bundled
from flower_desloc.flower.internals import HttpGrid, InMemoryGrid, http_grid, pull_objects
from flower_desloc.flower.messages import ARE_YOU_THERE, STATE_LOST, WindowRequest
from flower_desloc.flower.meter import TrafficMeter
from flower_desloc.flower.observer import EventKind
from flower_desloc.flower.records import records_of

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.25  # seconds between two polls
_LONGEST_IN_MEMORY = 0.02  # where a poll is no request but a look into this process's memory
_WRAPPED = re.compile(r"<class '[^']*'>:<'(.*)'>")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # in the text of an exception from Ray
# Error codes of our own; Flower's end below.
_NO_REPLY, _NOT_SENT, _OTHER_NODE, _FORGOTTEN = 100, 101, 102, 103


class Exchange:
    """The messages between the server and the nodes of a grid, whose bytes it counts.

    Parameters
    ----------
    grid : Grid
        Flower's connection to the nodes.
    timeout : float
        Seconds without any reply after which a node that has not replied is given up.

    """

    def __init__(self, grid: Grid, timeout: float) -> None:
        self.meter = TrafficMeter()
        self._grid, self._timeout = grid, timeout
        self._is_deployment = isinstance(grid, HttpGrid)
        self._probe: Probe | None = None
        if self._is_deployment:
            poll_for_objects_often()
            # A SuperNode serves one message after the other; a simulation several, and loses none.
            self._probe = Probe(lambda node_id: self._message(RecordDict(), node_id, ARE_YOU_THERE))
        if isinstance(grid, InMemoryGrid):
            # Imported here: it needs Ray.
            from flower_desloc.flower.worker_pool import replace_dead_workers

            replace_dead_workers()
        self._bundles: dict[int, tuple[ArrayRecord, ArrayRecord]] = {}  # by the first one's id

    def request(
        self,
        node_id: int,
        message_type: str,
        request: WindowRequest,
        averages: Mapping[str, ArrayRecord] | None = None,
        *,
        server_round: int = 0,
        bundles: bool = False,
    ) -> Message:
        """Return the message of a request, which carries ``averages``.

        The records are shared between messages: never change them. ``bundles`` says whether the
        node can read bundles of small arrays.
        """
        bundles = bundles and self._is_deployment
        content = replace(request, bundles=bundles).to_content(server_round)
        for name, record in (averages or {}).items():
            content[name] = self._bundled(record) if bundles else record
        return self._message(content, node_id, message_type, str(server_round))

    def ask(
        self, requests: Iterable[Message], again: Callable[[int], Message]
    ) -> Iterator[Message]:
        """Send ``requests`` and yield one reply to each, in their order.

        A node whose client replies that it has lost its state is asked once more, with what
        ``again`` returns for the node: at once and not at the end, because the order of summation
        is fixed.
        """
        for reply in self.replies(requests):
            if _has_lost_state(reply):
                yield from self.replies([again(reply.metadata.src_node_id)])
            else:
                yield reply
            del reply  # free its memory before the next one is received

    def replies(
        self, requests: Iterable[Message], *, patience: float | None = None
    ) -> Iterator[Message]:
        """Send ``requests`` and yield one reply to each, in their order (see ``exchange``)."""
        counted, patience = self._counted(requests), patience or self._timeout
        for reply in exchange(self._grid, counted, patience=patience, probe=self._probe):
            self.meter.received(reply)
            yield reply
            del reply  # free its memory before the next one is received

    def _counted(self, requests: Iterable[Message]) -> Iterator[Message]:
        for message in requests:
            self.meter.sent(message)
            yield message
        self._bundles.clear()

    def _message(
        self, content: RecordDict, node_id: int, message_type: str, group: str = "0"
    ) -> Message:
        # Flower keeps a message for so many seconds.
        ttl = max(DEFAULT_TTL, 2 * self._timeout)
        return Message(content, node_id, message_type, group_id=group, ttl=ttl)

    def _bundled(self, record: ArrayRecord) -> ArrayRecord:
        """Return a record in bundles; one for all the requests that carry it."""
        if id(record) not in self._bundles:
            self._bundles[id(record)] = record, bundled(record)
        return self._bundles[id(record)][1]


@dataclass
class Probe:
    """A query that finds out whether a silent node has lost its request.

    Flower delivers a message once, and reports a node as offline only while it is offline: a node
    that was killed and is back would never reply. A node answers its messages in order, so once it
    answers a probe that was sent after the request, the reply is there or will never come. A probe
    costs the node the start of a process, so it waits for longer than replies are known to take.
    """

    to: Callable[[int], Message]
    """Returns the query to a node."""
    after: float = 120.0
    """Seconds of silence before the first probe; grows to 1.5 times the longest reply."""


def exchange(
    grid: Grid, requests: Iterable[Message], *, patience: float, probe: Probe | None = None
) -> Iterator[Message]:
    """Send ``requests`` and yield one reply to each, in their order.

    A reply is pulled only when its turn comes. Flower holds the early ones, so the server app holds
    one at a time whatever the number of clients, and sums have one order. A client gets an error
    for a reply when it has not answered ``patience`` seconds after the last reply was received, or
    when the ``probe`` finds that its node has lost the request.

    Every reply names the node that was asked: Flower's own errors may come from node 1.
    """
    asked = [_push_request(grid, request) for request in requests]
    last_reply = time.monotonic()
    while asked:
        turn = asked.pop(0)
        reply = _wait(grid, turn, probe, last_reply, patience)
        if isinstance(reply, Message):
            last_reply = time.monotonic()
            reply = _wrong(reply, turn.node) or reply
        yield Message(reply, reply_to=turn.request) if isinstance(reply, Error) else reply
        del reply, turn  # free their memory before the next one is received


@dataclass(frozen=True)
class _Asked:
    request: Message  # without its content, which has been sent
    message_id: str | None  # None: Flower did not accept it
    at: float

    @property
    def node(self) -> int:
        return self.request.metadata.dst_node_id


def poll_for_objects_often() -> None:
    """Let Flower's grid of a deployment ask twice a second for what is still being uploaded.

    A reply is announced when its upload begins. Flower 1.41 then waits for its objects 1, 2, 4, 8
    and 10 seconds, so that it reads a reply up to half its upload time late. Flower's limit of 500
    attempts would be four minutes now; its limit of two hours stays.
    """
    often = partial(pull_objects, initial_backoff=0.1, backoff_cap=0.5, max_tries_per_object=None)
    http_grid.pull_objects = often  # type: ignore[attr-defined]


def event_kind(reply: Message) -> EventKind:
    """Return as what kind of event to record that this reply cannot be used."""
    if not reply.has_error() or reply.error.code == _OTHER_NODE:
        return "refused"
    return "late" if reply.error.code == _NO_REPLY else "failed"


def printable(text: str) -> str:
    """Replace control characters, so that a client's text cannot act on a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _has_lost_state(reply: Message) -> bool:
    return reply.has_content() and any(
        STATE_LOST in record for record in records_of(MetricRecord, reply.content).values()
    )


def _push_request(grid: Grid, request: Message) -> _Asked:
    message_id = _push(grid, request)
    bare = copy(request)
    bare.content = RecordDict()
    return _Asked(bare, message_id, time.monotonic())


def _push(grid: Grid, message: Message) -> str | None:
    # One by one: of a batch, Flower drops those it cannot send without saying which.
    return next(iter(grid.push_messages([message])), None) or None


def _wait(
    grid: Grid, asked: _Asked, probe: Probe | None, last_reply: float, patience: float
) -> Message | Error:
    """Return the reply, or why there is none."""
    if asked.message_id is None:
        return Error(_NOT_SENT, "Flower did not accept the request")
    began = now = time.monotonic()
    silent_since = max(asked.at, last_reply)
    probe_id = None
    while True:
        # The answer to the probe first: a node that answers it has replied before, or never will.
        answers = _pull(grid, probe_id)
        for reply in _pull(grid, asked.message_id):
            if probe is not None and now > began and not reply.has_error():
                probe.after = max(probe.after, 1.5 * (now - asked.at))
            return reply
        now = time.monotonic()
        for answer in answers:
            if not answer.has_error():
                return Error(_FORGOTTEN, "its node answers, but has lost the request")
            # An error of Flower's own, not of the node: the probe is gone.
            probe_id, silent_since = None, now
        if now >= last_reply + patience:
            return Error(_NO_REPLY, f"the request was not answered in {patience:g} s")
        if probe is not None and not probe_id and now - silent_since > probe.after:
            probe_id, silent_since = _push(grid, probe.to(asked.node)), now
        # A poll costs a request: one every twentieth of the wait so far adds 5 % at most.
        longest = _LONGEST_PAUSE if isinstance(grid, HttpGrid) else _LONGEST_IN_MEMORY
        pause = min(max((now - began) / 20, _SHORTEST_PAUSE), longest)
        time.sleep(min(pause, last_reply + patience - now))


def _pull(grid: Grid, message_id: str | None) -> Iterable[Message]:
    return () if message_id is None else list(grid.pull_messages([message_id]))


def _wrong(reply: Message, node: int) -> Error | None:
    """Return what is wrong with a reply from that node, if anything is."""
    if reply.has_error():
        return Error(reply.error.code, _unwrapped(reply.error.reason))
    if reply.metadata.src_node_id != node:
        return Error(_OTHER_NODE, f"node {reply.metadata.src_node_id} answered in its place")
    return None


def _unwrapped(reason: str | None) -> str:
    """Return a client's own message, without the exceptions that Flower has wrapped it in."""
    text = " ".join(_COLOUR.sub("", reason or "").split())
    if wrapped := _WRAPPED.fullmatch(text):
        text = wrapped[1]
    return printable(text.rpartition("occurred. Message: ")[2]) or "no reason given"
