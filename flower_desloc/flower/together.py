"""Replies that are added to the mean together, in one pass over memory."""

from collections.abc import Sequence

from flower_desloc.core.averaging import Mean
from flower_desloc.core.robust import Gathered
from flower_desloc.core.traffic import stream_bytes
from flower_desloc.flower.records import WindowReply, limits

_MOST = 1 << 30  # bytes
_MANY = 8  # the mean itself is an eighth of the memory passed over then, and more tell for little


def enough(waiting: Sequence[WindowReply], mean: Mean | Gathered) -> bool:
    """Return whether another reply like the last would be too much to hold at once.

    The first of all waits for a second whatever its size, in place of the mean that is not there
    yet and as large.
    """
    if not waiting:
        return False
    last = sum(stream_bytes(waiting[-1].streams).values())
    return len(waiting) >= held_together(last, least=1 if mean.count else 2)


def held_together(size: int, *, least: int = 2) -> int:
    """Return how many replies of so many bytes are held at most, of any size the ``least``."""
    return min(_MANY, max(least, _MOST // max(size, 1)))


def add_all(
    mean: Mean | Gathered, replies: Sequence[WindowReply], weights: Sequence[float]
) -> list[str | None]:
    """Add ``replies``, which were checked but for their values; return why one was not added.

    Their values are checked on the way. Only if one cannot be added, each is by itself.
    """
    if len(replies) > 1 and isinstance(mean, Mean):
        streams = [reply.streams for reply in replies]
        if mean.take(list(zip(streams, weights, strict=True)), limits):
            return [None] * len(replies)
    return [_add(mean, *pair) for pair in zip(replies, weights, strict=True)]


def _add(mean: Mean | Gathered, reply: WindowReply, weight: float) -> str | None:
    try:
        reply.check_values()
        mean.add(reply.streams, weight)
    except ValueError as error:
        return str(error)  # the error itself would keep the reply and the mean
    return None
