"""Sending requests and taking the replies, in an order that does not depend on who is first."""

import re
import time
from collections.abc import Iterable, Iterator

from flwr.app import DEFAULT_TTL, Error, Message
from flwr.serverapp import Grid

from flower_desloc.flower.members import printable
from flower_desloc.record import EventKind

_SHORTEST, _LONGEST = 0.002, 0.25  # seconds between two looks
_ROLL_CALL = 0.25  # seconds between two looks at who is online
_WRAPPED = re.compile(r"<class '[^']*'>:<'(.*)'>")
# Error codes of our own; Flower's end below.
_NO_REPLY, _NOT_SENT, _OTHER_NODE, _WENT_AWAY = 100, 101, 102, 103


def exchange(grid: Grid, requests: Iterable[Message], *, patience: float) -> Iterator[Message]:
    """Send ``requests`` and yield one reply to each, in their order.

    A reply is pulled when its turn has come, and only then: the link holds the early ones, as it
    does anyway, so the server app holds no more replies than it wants however many clients there
    are, and their sum has one order. A client whose reply is not there ``patience`` seconds after
    the last one was taken is given an error for a reply. So is one whose node has been offline
    since it was asked: Flower says so only while it is, and what it was asked is gone with its
    process.

    Every reply says truly which node was asked: Flower's own errors may come from node 1.
    """
    asked = [(request, _push(grid, request)) for request in requests]
    roll = _RollCall(grid, (request.metadata.dst_node_id for request, _ in asked))
    heard = time.monotonic()
    while asked:
        request, message_id = asked.pop(0)
        node = request.metadata.dst_node_id
        reply = _wait(grid, message_id, node, roll, until=heard + patience) if message_id else None
        if reply is None:
            if message_id is None:
                error = Error(_NOT_SENT, "the request was not taken by the link")
            elif node in roll.missed:
                error = Error(_WENT_AWAY, "its node went offline after it was asked")
            else:
                error = Error(_NO_REPLY, f"the request was not answered in {patience:g} s")
            reply = Message(error, reply_to=request)
        else:
            heard = time.monotonic()
            if reply.has_error():
                error = Error(reply.error.code, _sentence(reply.error.reason))
                reply = Message(error, reply_to=request)
            elif reply.metadata.src_node_id != node:
                what = f"node {reply.metadata.src_node_id} answered in its place"
                reply = Message(Error(_OTHER_NODE, what), reply_to=request)
        yield reply
        del reply, request  # or they would live on beside the next


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


def _push(grid: Grid, message: Message) -> str | None:
    # One by one: of a batch, those that cannot be sent are left out without saying which.
    return next(iter(grid.push_messages([message])), None)


class _RollCall:
    """Which of some nodes have been offline since it began, as far as was looked."""

    def __init__(self, grid: Grid, nodes: Iterable[int]) -> None:
        self.missed: set[int] = set()
        self._grid, self._nodes = grid, frozenset(nodes)
        self._next = time.monotonic() + _ROLL_CALL

    def look(self) -> None:
        """Look who is online, four times a second at most."""
        if time.monotonic() >= self._next:
            self.missed |= self._nodes.difference(self._grid.get_node_ids())
            self._next = time.monotonic() + _ROLL_CALL


def _wait(
    grid: Grid, message_id: str, node: int, roll: _RollCall, *, until: float
) -> Message | None:
    began = time.monotonic()
    while True:
        # In this order: what was replied before the node went is taken.
        lost = node in roll.missed
        for reply in grid.pull_messages([message_id]):
            return reply
        now = time.monotonic()
        if now >= until or lost:
            return None
        roll.look()
        # A look costs a request: one every twentieth of the wait so far adds 5 % at most.
        pause = min(max((now - began) / 20, _SHORTEST), _LONGEST)
        time.sleep(min(pause, until - now))
