"""Send requests and receive the replies in an order that does not depend on who is first."""

import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from flwr.app import (
    DEFAULT_TTL,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid

from flower_desloc.core.types import Streams
from flower_desloc.flower import internals
from flower_desloc.flower.arrays import records_of
from flower_desloc.flower.bundles import bundled
from flower_desloc.flower.failures import printable, reason_of, shortened
from flower_desloc.flower.flight.at_server import Carrier, has_missed_arrays
from flower_desloc.flower.messages import ARE_YOU_THERE, CONFIG, HELLO, STATE_LOST, WindowRequest
from flower_desloc.flower.meter import TrafficMeter, framed_bytes, payload_bytes
from flower_desloc.flower.observer import EventKind
from flower_desloc.flower.replies import Limits, most_objects

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.25  # seconds between two polls
_SHORTEST_WAIT, _LONGEST_WAIT = 0.05, 1.0  # the same, before the arrays of a reply have come
_LONGEST_IN_MEMORY = 0.02  # where a poll is no request but a look into this process's memory
_TIMES_THE_SLOWEST, _LEAST_PATIENCE = 5, 60.0  # the latter in seconds
_KEPT = 0.9  # of its time to live: an expired request cannot be asked for in a simulation
_WRAPPED = re.compile(r"<class '[^']*'>:<'(.*)'>")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # in the text of an exception from Ray
# Error codes of our own; Flower's end below.
_NO_REPLY, _NOT_SENT, _OTHER_NODE, _FORGOTTEN, _UNUSABLE, _UNREADABLE = range(100, 106)
# What Flower raises for objects that are no message; an error of the connection is none of these.
_DECODING = (ValueError, TypeError, LookupError, AttributeError, RecursionError)  # and DecodeError
_LONGEST_REASON = 1 << 16  # characters of an error that are read; Flower wraps the client's own


class Exchange:
    """The messages between the server and the nodes of a grid, whose bytes it counts.

    A node that does not answer in time is *silent*. It is sent nothing more, and nobody waits for
    it, until its reply to that request is found by ``late_replies``: it answers in order, so until
    then it would not answer another request either.

    The wait for a node that has answered such a request before is at most five times as long as
    the slowest node took last, and at least a minute, within ``timeout``.

    Parameters
    ----------
    grid : Grid
        Flower's connection to the nodes.
    timeout : float
        Seconds without any reply after which a node that has not replied is given up.
    templates : Mapping
        Names, shapes and types of each stream, as far as known, for the limits of replies; may
        grow.
    quorum, grace : int, float or None
        Once ``quorum`` nodes have replied, ``ask`` waits at most ``grace`` seconds for the others.
    carrier : Carrier, optional
        Carries arrays beside the messages; by default they are in them.

    """

    def __init__(
        self,
        grid: Grid,
        timeout: float,
        templates: Streams,
        *,
        quorum: int = 1,
        grace: float | None = None,
        carrier: Carrier | None = None,
    ) -> None:
        self.meter = TrafficMeter()
        self.carrier = carrier
        self._templates = templates
        self._grid, self._timeout = grid, timeout
        self._quorum, self._grace = quorum, grace
        self.is_deployment = internals.is_grid(grid, "HttpGrid")
        self.probe: Probe | None = None
        """How to find out whether a silent node has lost its request; None: it cannot."""
        if self.is_deployment:
            poll_for_objects_often(lambda: most_objects(self._templates))
            # A SuperNode serves one message after the other; a simulation several, and loses none.
            self.probe = Probe(lambda node_id: self._message(RecordDict(), node_id, ARE_YOU_THERE))
        if internals.is_grid(grid, "InMemoryGrid"):
            # Imported here: it needs Ray.
            from flower_desloc.flower.worker_pool import replace_dead_workers

            replace_dead_workers()
        self._bundles: dict[int, tuple[ArrayRecord, ArrayRecord]] = {}  # by the first one's id
        self._silent: dict[int, _Asked] = {}
        self._took: dict[tuple[str, int], tuple[float, int]] = {}
        """By type of message and node: seconds until its last reply, and the window's steps."""

    @property
    def silent(self) -> Collection[int]:
        """The nodes that have not answered a request in time, and not since."""
        return self._silent.keys()

    def late_replies(self) -> "Iterator[Late]":
        """Look for the replies of silent nodes; a node that has one is silent no longer."""
        for node, asked in list(self._silent.items()):
            now = time.monotonic()
            reply = self._look(asked, now)
            if reply is None:
                self._probe_if_silent(asked, now)
                continue
            del self._silent[node]
            seconds = now - asked.at
            yield Late(asked.message_type, self._received(reply, asked, seconds), seconds)
            del reply

    def forget(self, node_id: int) -> None:
        """Forget how long a node takes: it was offline, and may begin anew."""
        for key in [key for key in self._took if key[1] == node_id]:
            del self._took[key]

    def request(
        self,
        node_id: int,
        message_type: str,
        request: WindowRequest,
        averages: Mapping[str, ArrayRecord] | None = None,
        *,
        server_round: int = 0,
    ) -> Message:
        """Return the message of a request, which carries ``averages``.

        The records are shared between messages: never change them.
        """
        request = replace(request, bundles=self.is_deployment)
        content = request.to_content(server_round)
        for name, record in (averages or {}).items():
            content[name] = record
        return self._message(content, node_id, message_type, str(server_round))

    def ask(
        self, requests: Iterable[Message], again: Callable[[int, bool], Message]
    ) -> Iterator[Message]:
        """Send ``requests`` and yield one reply to each, in their order.

        A node whose client replies that it has lost its state, or that it could not be reached by
        the ``carrier``, is asked once more, with what ``again`` returns for the node and whether it
        has lost its state: at once and not at the end, because the order of summation is fixed.
        """
        for reply in self.replies(requests, grace=self._grace):
            if has_missed_arrays(reply):
                (reply,) = self.replies([again(reply.metadata.src_node_id, False)])
            if _has_lost_state(reply):
                yield from self.replies([again(reply.metadata.src_node_id, True)])
            else:
                yield reply
            del reply  # free its memory before the next one is received

    def replies(
        self,
        requests: Iterable[Message],
        *,
        at_most: float = math.inf,
        grace: float | None = None,
    ) -> Iterator[Message]:
        """Send ``requests`` and yield one reply to each, in their order.

        A reply is pulled only when its turn comes. Flower holds the early ones, so the server app
        holds one at a time whatever the number of clients, and sums have one order. With ``grace``
        it must know how many have replied: while it waits, it pulls and holds the early ones.

        A node has an error for a reply when it has not answered in time after the last reply was
        received, by its patience and ``at_most``; or when the ``probe`` finds that it has lost the
        request. Every reply names the node that was asked: Flower's own errors may come from node
        1.
        """
        asked = [self._send(message, at_most) for message in self._counted(requests)]
        waiting = _Waiting(asked, last_reply=time.monotonic())
        del asked
        if grace is not None:
            waiting.quorum, waiting.grace = self._quorum, grace
        while waiting.asked:
            turn = waiting.asked.pop(0)
            reply = self._wait(turn, waiting)
            if isinstance(reply, Error) and reply.code == _NO_REPLY:
                self._silent[turn.node] = turn
                waiting.has_given_up = True
            # After a wait that was in vain, it is unknown when the replies found now have arrived.
            took = None if waiting.has_given_up else time.monotonic() - turn.at
            yield self._received(reply, turn, took)
            del reply, turn  # free their memory before the next one is received

    def _counted(self, requests: Iterable[Message]) -> Iterator[Message]:
        for message in requests:
            payload = payload_bytes(message)
            beside = self.carrier.attach(message) if self.carrier else 0
            self._bundle(message)
            self.meter.sent(message, payload, beside)
            yield message
        self._bundles.clear()
        if self.carrier:
            self.carrier.sent()

    def _bundle(self, message: Message) -> None:
        """Pack the small arrays of a request in a deployment."""
        config = records_of(ConfigRecord, message.content).get(CONFIG)
        if config is not None and config.get("bundles") is True:
            for name, record in records_of(ArrayRecord, message.content).items():
                if id(record) not in self._bundles:  # one for all the requests that carry it
                    self._bundles[id(record)] = record, bundled(record)
                message.content[name] = self._bundles[id(record)][1]

    def _open(self, reply: Message, asked: Message) -> int:
        """Check the sizes of a reply, open its bundles and add the arrays that came beside it.

        Return its bytes as they were sent.

        Before anything else reads it: a hostile reply may take minutes to be decoded. Raises
        ``ValueError`` for one that holds more than was asked for.
        """
        if not (reply.has_content() and CONFIG in asked.content):
            return framed_bytes(reply)
        request = WindowRequest.from_content(asked.content)
        node = asked.metadata.dst_node_id
        limits = Limits.of(request.due, request.stop - request.start, self._templates)
        limits.check(reply.content)
        framed = 0
        with suppress(ValueError):  # a record that Flower's wire format does not have
            framed = framed_bytes(reply)
        limits.open(reply.content)
        return framed + (self.carrier.collect(reply, node) if self.carrier else 0)

    def _message(
        self, content: RecordDict, node_id: int, message_type: str, group: str = "0"
    ) -> Message:
        # Flower keeps a message for so many seconds.
        ttl = max(DEFAULT_TTL, 2 * self._timeout)
        return Message(content, node_id, message_type, group_id=group, ttl=ttl)

    def _send(self, request: Message, at_most: float) -> "_Asked":
        message_id = self._push(request)
        bare = copy(request)
        # Without its streams, which have been sent.
        config = records_of(ConfigRecord, request.content)
        bare.content = RecordDict({name: config[name] for name in config if name == CONFIG})
        asked = _Asked(bare, message_id, _steps(request), at=time.monotonic())
        asked.patience = min(self._patience(asked), Patience(at_most), key=lambda p: p.seconds)
        return asked

    def _patience(self, asked: "_Asked") -> "Patience":
        """Return how long to wait for the reply."""
        # A window's time is a constant and a part that grows with its steps: never more than this.
        slowest = max(
            (
                seconds * max(1.0, asked.steps / steps)
                for (message_type, _), (seconds, steps) in self._took.items()
                if message_type == asked.message_type
            ),
            default=math.inf,
        )
        # A first window may compile, and load data. A greeting is a node's first by its nature:
        # that of the nodes that are there at the start has no limit but the timeout.
        is_first = asked.message_type != HELLO and asked.key not in self._took
        bound = max(_TIMES_THE_SLOWEST * slowest, _LEAST_PATIENCE)
        if is_first or bound >= self._timeout:
            return Patience(self._timeout, "federation.timeout")
        return Patience(
            bound,
            f"{_TIMES_THE_SLOWEST} times the longest that a client took last, and at least "
            f"{_LEAST_PATIENCE:g} s",
        )

    def _wait(self, turn: "_Asked", waiting: "_Waiting") -> Message | Error:
        """Return the reply, or why there is none."""
        if turn.message_id in waiting.early:
            return waiting.early.pop(turn.message_id)
        if turn.message_id is None:
            return Error(_NOT_SENT, "Flower did not accept the request")
        began = since = now = time.monotonic()
        turn.silent_since = max(turn.at, waiting.last_reply)
        while True:
            reply = self._look(turn, now)
            if reply is not None:
                has_waited = isinstance(reply, Message) and now > began and not reply.has_error()
                if self.probe is not None and has_waited:
                    self.probe.after = max(self.probe.after, 1.5 * (now - turn.at))
                if isinstance(reply, Message):
                    waiting.count(reply)
                return reply
            if waiting.grace is not None:
                self._pull_early(waiting)
            deadline = waiting.last_reply + turn.patience.seconds
            if now >= waiting.ends:
                why = f"after {waiting.quorum} others had replied (federation.grace)"
                return Error(_NO_REPLY, f"the request was not answered {waiting.grace:g} s {why}")
            if now >= deadline:
                return Error(_NO_REPLY, f"the request was not answered in {turn.patience}")
            self._probe_if_silent(turn, now)
            since = self._pause(turn, since, now, min(deadline, waiting.ends))
            now = time.monotonic()

    def _pause(self, turn: "_Asked", since: float, now: float, until: float) -> float:
        """Wait before the next look for a reply, which costs a request; return since when to count.

        That is from the arrival of its arrays on: the reply follows them.
        """
        arrival = self.carrier.arrival(turn.node) if self.carrier else None
        if arrival is not None and not arrival.is_set():
            # Nothing comes before them but an error, which a fifth of the wait later is no loss.
            pause = min(max((now - since) / 5, _SHORTEST_WAIT), _LONGEST_WAIT, until - now)
            return time.monotonic() if arrival.wait(pause) else since
        # One every twentieth of the wait so far adds 5 % at most.
        longest = _LONGEST_PAUSE if self.is_deployment else _LONGEST_IN_MEMORY
        time.sleep(min(max((now - since) / 20, _SHORTEST_PAUSE), longest, until - now))
        return since

    def _look(self, asked: "_Asked", now: float) -> Message | Error | None:
        """Look once for a node's reply, or for why there will be none."""
        # The answer to the probe first: a node that answers it has replied before, or never will.
        answer = self._pull(asked.probe_id)
        if (reply := self._pull(asked.message_id)) is not None:
            return reply
        if answer is not None:
            if isinstance(answer, Error) or not answer.has_error():
                return Error(_FORGOTTEN, "its node answers, but has lost the request")
            # An error of Flower's own, not of the node: the probe is gone.
            asked.probe_id, asked.silent_since = None, now
        if now - asked.at > _KEPT * asked.request.metadata.ttl:
            return Error(_FORGOTTEN, "Flower no longer keeps the request, which is too old")
        return None

    def _probe_if_silent(self, asked: "_Asked", now: float) -> None:
        if self.probe and not asked.probe_id and now - asked.silent_since > self.probe.after:
            asked.probe_id, asked.silent_since = self._push(self.probe.to(asked.node)), now

    def _pull_early(self, waiting: "_Waiting") -> None:
        """Pull the replies that have arrived before their turn."""
        missing = [asked.message_id for asked in waiting.asked]
        for message_id in [i for i in missing if i is not None and i not in waiting.early]:
            if (reply := self._pull(message_id)) is not None:
                waiting.early[message_id] = reply
                if isinstance(reply, Message):
                    waiting.count(reply)

    def _push(self, message: Message) -> str | None:
        # One by one: of a batch, Flower drops those it cannot send without saying which.
        return next(iter(self._grid.push_messages([message])), None) or None

    def _pull(self, message_id: str | None) -> Message | Error | None:
        """Return the reply to a message, if there is one by now, or why it cannot be read."""
        if message_id is None:
            return None
        try:
            return next(iter(list(self._grid.pull_messages([message_id]))), None)
        except (*_DECODING, internals.DecodeError) as error:  # imported when it is needed
            # Flower decodes the objects of a reply when it is pulled.
            return Error(_UNREADABLE, f"Flower cannot decode its reply: {reason_of(error)}")

    def _received(self, reply: Message | Error, asked: "_Asked", took: float | None) -> Message:
        """Return a reply, or an error in its place, that names the node that was asked."""
        framed = None
        if isinstance(reply, Message):
            try:
                reply = _wrong(reply, asked.node) or reply
                if isinstance(reply, Message):
                    framed = self._open(reply, asked.request)
            except ValueError as error:
                reply = Error(_UNUSABLE, reason_of(error))
        if self.carrier:
            self.carrier.release(asked.node)
        message = Message(reply, reply_to=asked.request) if isinstance(reply, Error) else reply
        framed = framed_bytes(message) if framed is None else framed
        self.meter.received(framed, payload_bytes(message))
        if not _is_usable(message) and not _is_late(message):
            # It may begin anew, and need as long as for its first window.
            self._took.pop(asked.key, None)
        elif took is not None:
            self._took[asked.key] = (took, asked.steps)
        return message


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


@dataclass(frozen=True)
class Late:
    """A reply that was found after its node had been given up."""

    message_type: str
    reply: Message
    seconds: float
    """Between the request and the moment when it was found."""


@dataclass(frozen=True)
class Patience:
    """How long to wait for a reply, and the reason of that limit."""

    seconds: float
    because: str = ""

    def __str__(self) -> str:
        return f"{self.seconds:g} s" + (f" ({self.because})" if self.because else "")


@dataclass
class _Asked:
    request: Message  # without its streams, which have been sent
    message_id: str | None  # None: Flower did not accept it
    steps: int  # of the window that it is about
    at: float
    patience: Patience = Patience(math.inf)
    silent_since: float = 0.0
    probe_id: str | None = None

    @property
    def node(self) -> int:
        return self.request.metadata.dst_node_id

    @property
    def message_type(self) -> str:
        return self.request.metadata.message_type

    @property
    def key(self) -> tuple[str, int]:
        return self.message_type, self.node


@dataclass
class _Waiting:
    """The state of one exchange: the requests whose turn has not come, and what has arrived."""

    asked: list[_Asked]
    last_reply: float
    early: dict[str, Message | Error] = field(default_factory=dict)
    has_given_up: bool = False
    quorum: int = 0
    grace: float | None = None
    replied: int = 0
    ends: float = math.inf

    def count(self, reply: Message) -> None:
        """Note that a reply has arrived."""
        self.last_reply = time.monotonic()
        self.replied += _is_usable(reply)
        if self.grace is not None and self.replied == self.quorum:
            self.ends = min(self.ends, self.last_reply + self.grace)


def poll_for_objects_often(most: Callable[[], int]) -> None:
    """Let Flower's grid of a deployment ask twice a second for what is still being uploaded.

    A reply of more than ``most()`` objects raises ``ValueError``, before they are downloaded.

    A reply is announced when its upload begins. Flower 1.41 then waits for its objects 1, 2, 4, 8
    and 10 seconds, so that it reads a reply up to half its upload time late. Flower's limit of 500
    attempts would be four minutes now; its limit of two hours stays.
    """
    pull_objects = internals.pull_objects
    often = partial(pull_objects, initial_backoff=0.1, backoff_cap=0.5, max_tries_per_object=None)

    def bounded(object_ids: list[str], **options: Any) -> dict[str, bytes]:
        if len(object_ids) > (limit := most()):
            raise ValueError(f"it has {len(object_ids)} objects, expected at most {limit}")
        return often(object_ids, **options)

    internals.set_pull_objects(bounded)


def event_kind(reply: Message) -> EventKind:
    """Return as what kind of event to record that this reply cannot be used."""
    if not reply.has_error() or reply.error.code in (_OTHER_NODE, _UNUSABLE, _UNREADABLE):
        return "refused"
    return "late" if _is_late(reply) else "failed"


def _is_late(reply: Message) -> bool:
    return reply.has_error() and reply.error.code == _NO_REPLY


def _is_usable(reply: Message) -> bool:
    has_answered = not (reply.has_error() or has_missed_arrays(reply))
    return has_answered and not _has_lost_state(reply)


def _has_lost_state(reply: Message) -> bool:
    return reply.has_content() and any(
        STATE_LOST in record for record in records_of(MetricRecord, reply.content).values()
    )


def _steps(request: Message) -> int:
    """Return the number of steps of the window that a request is about, at least 1."""
    config = records_of(ConfigRecord, request.content).get(CONFIG, ConfigRecord())
    start, stop = config.get("start-step"), config.get("stop-step")
    return max(1, stop - start) if isinstance(start, int) and isinstance(stop, int) else 1


def _wrong(reply: Message, node: int) -> Error | None:
    """Return what is wrong with a reply from that node, if anything is."""
    if reply.has_error():
        return Error(reply.error.code, _unwrapped(reply.error.reason))
    if reply.metadata.src_node_id != node:
        return Error(_OTHER_NODE, f"node {reply.metadata.src_node_id} answered in its place")
    return None


def _unwrapped(reason: str | None) -> str:
    """Return a client's own message, without the exceptions that Flower has wrapped it in."""
    text = reason or ""
    if len(text) > _LONGEST_REASON:  # the end has the client's own message
        text = f"{text[: _LONGEST_REASON // 2]} ... {text[-_LONGEST_REASON // 2 :]}"
    text = " ".join(_COLOUR.sub("", text).split())
    if wrapped := _WRAPPED.fullmatch(text):
        text = wrapped[1]
    return shortened(printable(text.rpartition("occurred. Message: ")[2])) or "no reason given"
