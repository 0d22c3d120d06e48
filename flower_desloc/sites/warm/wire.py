"""Flower's messages on a stream: its own serialised records, each array's bytes on their own.

Not one protobuf for all: that would be a copy more on either side, and end at 2 GiB. Array after
array: whoever writes them can let them go one by one, so that a message is not there twice.
"""

import copy
import json
from collections.abc import Iterator
from typing import Any, Protocol

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
)
from flwr.proto.message_pb2 import Context as ProtoContext
from flwr.proto.message_pb2 import Message as ProtoMessage

from flower_desloc.flower.content import records_of

_LENGTH = 8  # bytes before every part, big-endian


class Stream(Protocol):
    """A binary stream both ways, such as ``socket.makefile("rwb")`` gives."""

    def read(self, size: int, /) -> bytes:
        """Return so many bytes; fewer only at the end."""

    def write(self, data: bytes, /) -> int:
        """Write all of ``data``."""

    def flush(self) -> None:
        """Send what was written."""


def write_head(stream: Stream, head: dict[str, Any]) -> None:
    """Write what JSON can say."""
    _write(stream, json.dumps(head).encode())


def read_head(stream: Stream) -> dict[str, Any]:
    """Read what :func:`write_head` wrote; raises ``EOFError`` where the stream ends before."""
    head: dict[str, Any] = json.loads(_read(stream))
    return head


def write_message(stream: Stream, message: Message, *, release: bool = False) -> None:
    """Write a message, with its content or its error.

    It is not changed, unless it is to be released: then it is empty, and each array is let go once
    it is written.
    """
    _write(stream, message_to_proto(_skeleton(message)).SerializeToString())
    arrays = [record[key] for record, key in _arrays(message)]
    if release and message.has_content():
        message.content.clear()
    while arrays:
        _write(stream, arrays.pop(0).data)


def read_message(stream: Stream) -> Message:
    """Read what :func:`write_message` wrote; raises ``EOFError`` where the stream ends before."""
    message = message_from_proto(ProtoMessage.FromString(_read(stream)))
    for record, key in _arrays(message):
        record[key] = _with(record[key], _read(stream))
    return message


def write_context(stream: Stream, context: Context) -> None:
    """Write a context, its state included."""
    _write(stream, context_to_proto(context).SerializeToString())


def read_context(stream: Stream) -> Context:
    """Read what :func:`write_context` wrote; raises ``EOFError`` where the stream ends before."""
    return context_from_proto(ProtoContext.FromString(_read(stream)))


def _skeleton(message: Message) -> Message:
    """Return the message with arrays that have no bytes."""
    skeleton = copy.copy(message)
    if message.has_content():
        skeleton.content = RecordDict({**message.content})
        for name, record in records_of(ArrayRecord, message.content).items():
            skeleton.content[name] = ArrayRecord({k: _with(a, b"") for k, a in record.items()})
    return skeleton


def _arrays(message: Message) -> Iterator[tuple[ArrayRecord, str]]:
    if message.has_content():
        for record in records_of(ArrayRecord, message.content).values():
            for key in list(record):
                yield record, key


def _with(array: Array, data: bytes) -> Array:
    return Array(array.dtype, array.shape, array.stype, data)


def _write(stream: Stream, data: bytes) -> None:
    stream.write(len(data).to_bytes(_LENGTH, "big"))
    stream.write(data)


def _read(stream: Stream) -> bytes:
    return _exactly(stream, int.from_bytes(_exactly(stream, _LENGTH), "big"))


def _exactly(stream: Stream, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError(f"{len(data)} of {count} bytes came")
    return data
