"""Flower messages on a connection between two processes of one node: each array by itself.

The rest of a message and its context are Flower's own protobuf; nothing is pickled. Not one
protobuf for the whole message: that would copy every array once more on either side. The sender can
also release each array once it is sent.
"""

import copy
import json
from collections.abc import Iterator
from io import BufferedReader, FileIO
from multiprocessing.connection import Connection
from typing import Any

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict

from flower_desloc.flower.internals import message_pb2, serde


def send(
    connection: Connection,
    message: Message | None,
    context: Context,
    metadata: Any = None,
    *,
    release: bool = False,
) -> None:
    """Send a message, with its content or its error, its context, and ``metadata``, which is JSON.

    With ``release`` its content is removed and each array is freed once it is sent.
    """
    arrays = [record[key] for record, key in _arrays(message)]
    bare = _without_data(message)
    for part in (
        json.dumps([metadata, [len(array.data) for array in arrays]]).encode(),
        serde.message_to_proto(bare).SerializeToString() if bare is not None else b"",
        serde.context_to_proto(context).SerializeToString(),
    ):
        connection.send_bytes(part)
    if release and message is not None and message.has_content():
        message.content.clear()
    with open(connection.fileno(), "wb", closefd=False) as stream:
        while arrays:
            stream.write(arrays.pop(0).data)


def receive(connection: Connection) -> tuple[Message | None, Context, Any]:
    """Receive what ``send`` has sent; raises ``EOFError`` or ``OSError`` if the sender ends."""
    metadata, sizes = json.loads(connection.recv_bytes())
    bare = connection.recv_bytes()
    message = serde.message_from_proto(message_pb2.Message.FromString(bare)) if bare else None
    context = serde.context_from_proto(message_pb2.Context.FromString(connection.recv_bytes()))
    # With a buffer of one byte nothing is read ahead. Connection.recv_bytes copies once more.
    with BufferedReader(FileIO(connection.fileno(), closefd=False), 1) as stream:
        for (record, key), size in zip(_arrays(message), sizes, strict=True):
            data = stream.read(size)
            if len(data) < size:
                raise EOFError(f"the connection ended after {len(data)} of {size} bytes")
            record[key] = _with_data(record[key], data)
    return message, context, metadata


def _without_data(message: Message | None) -> Message | None:
    """Return the message with empty arrays."""
    bare = copy.copy(message)
    if bare is not None and bare.has_content():
        bare.content = RecordDict({**bare.content})
        for name, record in bare.content.items():
            if isinstance(record, ArrayRecord):
                bare.content[name] = ArrayRecord({k: _with_data(a, b"") for k, a in record.items()})
    return bare


def _arrays(message: Message | None) -> Iterator[tuple[ArrayRecord, str]]:
    if message is not None and message.has_content():
        for record in message.content.values():
            if isinstance(record, ArrayRecord):
                yield from ((record, key) for key in list(record))


def _with_data(array: Array, data: bytes) -> Array:
    return Array(array.dtype, array.shape, array.stype, data)
