"""Flower messages on a byte stream: Flower's serialised records, and each array in its own frame.

Not one protobuf for the whole message: that would copy every array once more on either side and be
limited to 2 GiB. The sender can also release each array once it is written.
"""

import copy
import json
from collections.abc import Iterator
from io import BufferedIOBase
from typing import Any

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

_LENGTH_BYTES = 8  # before every frame, big-endian

# Every read raises EOFError where the stream ends early.


def write_head(stream: BufferedIOBase, head: dict[str, Any]) -> None:
    """Write a dictionary as JSON."""
    _write(stream, json.dumps(head).encode())


def read_head(stream: BufferedIOBase) -> dict[str, Any]:
    """Read a dictionary written by :func:`write_head`."""
    head: dict[str, Any] = json.loads(_read(stream))
    return head


def write_message(stream: BufferedIOBase, message: Message, *, release: bool = False) -> None:
    """Write a message, with its content or its error.

    With ``release`` its content is removed and each array is freed once it is written.
    """
    _write(stream, message_to_proto(_without_data(message)).SerializeToString())
    arrays = [record[key] for record, key in _arrays(message)]
    if release and message.has_content():
        message.content.clear()
    while arrays:
        _write(stream, arrays.pop(0).data)


def read_message(stream: BufferedIOBase) -> Message:
    """Read a message written by :func:`write_message`."""
    message = message_from_proto(ProtoMessage.FromString(_read(stream)))
    for record, key in _arrays(message):
        record[key] = _with_data(record[key], _read(stream))
    return message


def write_context(stream: BufferedIOBase, context: Context) -> None:
    """Write a context, including its state."""
    _write(stream, context_to_proto(context).SerializeToString())


def read_context(stream: BufferedIOBase) -> Context:
    """Read a context written by :func:`write_context`."""
    return context_from_proto(ProtoContext.FromString(_read(stream)))


def _without_data(message: Message) -> Message:
    """Return the message with empty arrays."""
    bare = copy.copy(message)
    if message.has_content():
        bare.content = RecordDict({**message.content})
        for name, record in records_of(ArrayRecord, message.content).items():
            bare.content[name] = ArrayRecord({k: _with_data(a, b"") for k, a in record.items()})
    return bare


def _arrays(message: Message) -> Iterator[tuple[ArrayRecord, str]]:
    if message.has_content():
        for record in records_of(ArrayRecord, message.content).values():
            for key in list(record):
                yield record, key


def _with_data(array: Array, data: bytes) -> Array:
    return Array(array.dtype, array.shape, array.stype, data)


def _write(stream: BufferedIOBase, data: bytes) -> None:
    stream.write(len(data).to_bytes(_LENGTH_BYTES, "big"))
    stream.write(data)


def _read(stream: BufferedIOBase) -> bytes:
    return _exactly(stream, int.from_bytes(_exactly(stream, _LENGTH_BYTES), "big"))


def _exactly(stream: BufferedIOBase, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError(f"the stream ended after {len(data)} of {count} bytes")
    return data
