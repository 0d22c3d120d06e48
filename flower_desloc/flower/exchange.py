"""Sending requests and taking the replies, in an order that does not depend on who is first."""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass

from flwr.app import DEFAULT_TTL, Error, Message, RecordDict
from flwr.serverapp import Grid

from flower_desloc.flower.members import printable
from flower_desloc.flower.observer import EventKind

_SHORTEST, _LONGEST = 0.002, 0.25  # seconds between two looks
_PATIENT = 120.0  # seconds of silence until a node is asked whether it is there, at least
_LONGER = 1.5  # times as long as any reply has taken so far
_WRAPPED = re.compile(r"<class '[^']*'>:<'(.*)'>")
# Error codes of our own; Flower's end below.
_NO_REPLY, _NOT_SENT, _OTHER_NODE, _FORGOTTEN = 100, 101, 102, 103


@dataclass
class Question:
    """What to ask a silent node, and after how long, where nodes answer one message after another.

    Flower hands out a message once, and says that a node is offline only while it is: of one that
    was killed and is back nobody would hear any more. A question that is sent after the request is
    answered when the reply is there, or will never be. It costs a node the start of a process, so
    it waits for longer than replies are known to take.
    """

    to: Callable[[int], Message]
    """Makes the question to a node."""
    after: float = _PATIENT
    """Seconds; more by and by, as replies take longer."""


def exchange(
    grid: Grid, requests: Iterable[Message], *, patience: float, question: Question | None = None
) -> Iterator[Message]:
    """Send ``requests`` and yield one reply to each, in their order.

    A reply is pulled when its turn has come, and only then: the link holds the early ones, as it
    does anyway, so the server app holds no more replies than it wants however many clients there
    are, and their sum has one order. A client whose reply is not there ``patience`` seconds after
    the last one was taken is given an error for a reply; so is one whose node answers the
    ``question`` and has lost what it was asked.

    Every reply says truly which node was asked: Flower's own errors may come from node 1.
    """
    asked = [_asked(grid, request) for request in requests]
    heard = time.monotonic()
    while asked:
        turn = asked.pop(0)
        reply = _wait(grid, turn, question, heard, patience)
        if isinstance(reply, Message):
            heard = time.monotonic()
            reply = _wrong(reply, turn.node) or reply
        yield Message(reply, reply_to=turn.request) if isinstance(reply, Error) else reply
        del reply, turn  # or they would live on beside the next


@dataclass(frozen=True)
class _Asked:
    request: Message  # without its content, which is on its way
    message_id: str | None  # None: the link did not take it
    at: float

    @property
    def node(self) -> int:
        return self.request.metadata.dst_node_id


def kind(reply: Message) -> EventKind:
    """Return what kind of event it is that this reply cannot be used."""
    if not reply.has_error() or reply.error.code == _OTHER_NODE:
        return "refused"
    return "late" if reply.error.code == _NO_REPLY else "failed"


def _sentence(reason: str | None) -> str:
    """Return what the client said, without the exceptions that Flower has wrapped it in."""
    text = " ".join((reason or "").split())
    if wrapped := _WRAPPED.fullmatch(text):
        text = wrapped[1]
    return printable(text.rpartition("occurred. Message: ")[2]) or "no reason given"


def time_to_live(patience: float) -> float:
    """Return for how long Flower should keep a message, in seconds."""
    return max(DEFAULT_TTL, 2 * patience)


def _asked(grid: Grid, request: Message) -> _Asked:
    message_id = _push(grid, request)
    bare = copy(request)
    bare.content = RecordDict()
    return _Asked(bare, message_id, time.monotonic())


def _push(grid: Grid, message: Message) -> str | None:
    # One by one: of a batch, those that cannot be sent are left out without saying which.
    return next(iter(grid.push_messages([message])), None) or None


def _wait(
    grid: Grid, asked: _Asked, question: Question | None, heard: float, patience: float
) -> Message | Error:
    """Return the reply, or why there is none."""
    if asked.message_id is None:
        return Error(_NOT_SENT, "the request was not taken by the link")
    began = now = time.monotonic()
    silent_since = max(asked.at, heard)
    question_id = None
    while True:
        # In this order: a node that answers the question has replied before, or never will.
        answers = _pulled(grid, question_id)
        for reply in _pulled(grid, asked.message_id):
            if question is not None and now > began and not reply.has_error():
                question.after = max(question.after, _LONGER * (now - asked.at))
            return reply
        now = time.monotonic()
        for answer in answers:
            if not answer.has_error():
                return Error(_FORGOTTEN, "its node answers, but has lost the request")
            # Flower's own, not the node's: the question is gone.
            question_id, silent_since = None, now
        if now >= heard + patience:
            return Error(_NO_REPLY, f"the request was not answered in {patience:g} s")
        if question is not None and not question_id and now - silent_since > question.after:
            question_id, silent_since = _push(grid, question.to(asked.node)), now
        # A look costs a request: one every twentieth of the wait so far adds 5 % at most.
        pause = min(max((now - began) / 20, _SHORTEST), _LONGEST)
        time.sleep(min(pause, heard + patience - now))


def _pulled(grid: Grid, message_id: str | None) -> Iterable[Message]:
    return () if message_id is None else list(grid.pull_messages([message_id]))


def _wrong(reply: Message, node: int) -> Error | None:
    """Return what is wrong with a reply from that node, if anything is."""
    if reply.has_error():
        return Error(reply.error.code, _sentence(reply.error.reason))
    if reply.metadata.src_node_id != node:
        return Error(_OTHER_NODE, f"node {reply.metadata.src_node_id} answered in its place")
    return None
