"""Flower messages on a connection between two processes of one node: each array by itself.

Not one pickle or protobuf for the whole message: that would copy every array once more on either
side. The sender can also release each array once it is sent.
"""

import copy
from collections.abc import Iterator
from io import BufferedReader, FileIO
from multiprocessing.connection import Connection
from typing import Any

from flwr.app import Array, ArrayRecord, Message, RecordDict

from flower_desloc.flower.content import records_of


def send(
    connection: Connection, message: Message | None, *more: Any, release: bool = False
) -> None:
    """Send a message, with its content or its error, and other objects.

    With ``release`` its content is removed and each array is freed once it is sent.
    """
    arrays = [record[key] for record, key in _arrays(message)]
    connection.send((_without_data(message), [len(array.data) for array in arrays], more))
    if release and message is not None and message.has_content():
        message.content.clear()
    with open(connection.fileno(), "wb", closefd=False) as stream:
        while arrays:
            stream.write(arrays.pop(0).data)


def receive(connection: Connection) -> tuple[Any, ...]:
    """Receive what ``send`` has sent; raises ``EOFError`` or ``OSError`` if the sender ends."""
    message, sizes, more = connection.recv()
    # With a buffer of one byte nothing is read ahead. Connection.recv_bytes copies once more.
    with BufferedReader(FileIO(connection.fileno(), closefd=False), 1) as stream:
        for (record, key), size in zip(_arrays(message), sizes, strict=True):
            data = stream.read(size)
            if len(data) < size:
                raise EOFError(f"the connection ended after {len(data)} of {size} bytes")
            record[key] = _with_data(record[key], data)
    return message, *more


def _without_data(message: Message | None) -> Message | None:
    """Return the message with empty arrays."""
    bare = copy.copy(message)
    if bare is not None and bare.has_content():
        bare.content = RecordDict({**bare.content})
        for name, record in records_of(ArrayRecord, bare.content).items():
            bare.content[name] = ArrayRecord({k: _with_data(a, b"") for k, a in record.items()})
    return bare


def _arrays(message: Message | None) -> Iterator[tuple[ArrayRecord, str]]:
    if message is not None and message.has_content():
        for record in records_of(ArrayRecord, message.content).values():
            for key in list(record):
                yield record, key


def _with_data(array: Array, data: bytes) -> Array:
    return Array(array.dtype, array.shape, array.stype, data)
