"""Sending requests and taking the replies, in an order that does not depend on who is first."""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass

from flwr.app import DEFAULT_TTL, Error, Message, RecordDict
from flwr.serverapp import Grid

from flower_desloc.flower.members import printable
from flower_desloc.record import EventKind

_SHORTEST, _LONGEST = 0.002, 0.25  # seconds between two looks
_PATIENT = 120.0  # seconds until a node that has not replied is asked whether it is there
_WRAPPED = re.compile(r"<class '[^']*'>:<'(.*)'>")
# Error codes of our own; Flower's end below.
_NO_REPLY, _NOT_SENT, _OTHER_NODE, _FORGOTTEN = 100, 101, 102, 103


def exchange(
    grid: Grid,
    requests: Iterable[Message],
    *,
    patience: float,
    are_you_there: Callable[[int], Message] | None = None,
) -> Iterator[Message]:
    """Send ``requests`` and yield one reply to each, in their order.

    A reply is pulled when its turn has come, and only then: the link holds the early ones, as it
    does anyway, so the server app holds no more replies than it wants however many clients there
    are, and their sum has one order. A client whose reply is not there ``patience`` seconds after
    the last one was taken is given an error for a reply.

    So is one whose node has lost what it was asked. Flower hands out a message once, and says that
    a node is offline only while it is: of one that was killed and is back nobody would hear any
    more. Where nodes answer one message after the other, in the order they were asked,
    ``are_you_there`` makes a message to a node, to be sent after two minutes: once that is
    answered, the reply is there or will never be.

    Every reply says truly which node was asked: Flower's own errors may come from node 1.
    """
    asked = [_asked(grid, request) for request in requests]
    heard = time.monotonic()
    while asked:
        turn = asked.pop(0)
        reply = _wait(grid, turn, are_you_there, heard, patience)
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
    return next(iter(grid.push_messages([message])), None)


def _wait(
    grid: Grid,
    asked: _Asked,
    are_you_there: Callable[[int], Message] | None,
    heard: float,
    patience: float,
) -> Message | Error:
    """Return the reply, or why there is none."""
    if asked.message_id is None:
        return Error(_NOT_SENT, "the request was not taken by the link")
    began = time.monotonic()
    question = None
    while True:
        # In this order: a node that answers the question has replied before, or never will.
        is_there = question is not None and _is_answered(grid, question)
        for reply in grid.pull_messages([asked.message_id]):
            return reply
        if is_there:
            return Error(_FORGOTTEN, "its node answers, but has lost the request")
        now = time.monotonic()
        if now >= heard + patience:
            return Error(_NO_REPLY, f"the request was not answered in {patience:g} s")
        if question is None and are_you_there is not None and now - asked.at > _PATIENT:
            question = _push(grid, are_you_there(asked.node))
        # A look costs a request: one every twentieth of the wait so far adds 5 % at most.
        pause = min(max((now - began) / 20, _SHORTEST), _LONGEST)
        time.sleep(min(pause, heard + patience - now))


def _is_answered(grid: Grid, message_id: str) -> bool:
    # Not by an error: those of Flower do not come from the node.
    return any(not reply.has_error() for reply in grid.pull_messages([message_id]))


def _wrong(reply: Message, node: int) -> Error | None:
    """Return what is wrong with a reply from that node, if anything is."""
    if reply.has_error():
        return Error(reply.error.code, _sentence(reply.error.reason))
    if reply.metadata.src_node_id != node:
        return Error(_OTHER_NODE, f"node {reply.metadata.src_node_id} answered in its place")
    return None
