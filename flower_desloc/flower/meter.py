"""Bytes of messages: the payload of each stream, and whole messages as Flower sends them."""

import copy
from collections.abc import Mapping
from functools import lru_cache

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from flower_desloc.flower.arrays import records_of, values_bytes
from flower_desloc.flower.observer import Traffic


class TrafficMeter:
    """Counts the bytes of messages."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    def sent(self, message: Message, payload: Mapping[str, int], beside: int = 0) -> None:
        """Count a message to a client, and the bytes of its arrays that travel ``beside`` it.

        ``payload`` is that of its streams before they were bundled.
        """
        self.traffic += Traffic(down=payload, framed_down=framed_bytes(message) + beside)

    def received(self, framed: int, payload: Mapping[str, int]) -> None:
        """Count a reply."""
        self.traffic += Traffic(up=payload, framed_up=framed)

    def read(self) -> Traffic:
        """Return the bytes counted so far, and start again from zero."""
        traffic, self.traffic = self.traffic, Traffic()
        return traffic


def payload_bytes(message: Message) -> dict[str, int]:
    """Return the bytes of tensor values a message without bundles carries, by stream."""
    records = records_of(ArrayRecord, message.content) if message.has_content() else {}
    return {name: sum(map(values_bytes, record.values())) for name, record in records.items()}


def framed_bytes(message: Message) -> int:
    """Return the size of a message as Flower stores and sends it, with names, shapes and headers.

    Flower cuts a message into objects named by their hashes. The payload is not hashed here; the
    names of a large array's further 5 MB chunks, 64 bytes each, are not counted.
    """
    if not message.has_content():
        return len(message.deflate())
    skeleton = copy.copy(message)
    # Of the records only the names count here, and that they differ.
    skeleton.content = RecordDict()
    for index, name in enumerate(message.content):
        skeleton.content[name] = ConfigRecord({"": index})
    total = len(skeleton.deflate()) + len(skeleton.content.deflate())
    for record in message.content.values():
        if isinstance(record, ArrayRecord):
            arrays = [(key, a.dtype, tuple(a.shape), a.stype) for key, a in record.items()]
            total += _framing(tuple(arrays)) + sum(len(a.data) for a in record.values())
        else:
            total += len(record.deflate())
    return total


@lru_cache(maxsize=64)
def _framing(arrays: tuple[tuple[str, str, tuple[int, ...], str], ...]) -> int:
    """Return the bytes of a record of such arrays, without their data; the same in every window."""
    record, data = ArrayRecord(), 0
    for index, (key, dtype, shape, stype) in enumerate(arrays):
        # Distinct data: Flower sends equal objects once.
        record[key] = Array(dtype, shape, stype, str(index).encode())
        data += len(record[key].data)
    chunks = [chunk for array in record.values() for _, chunk in array.slice_array()]
    parts = [record, *record.values(), *chunks]
    return sum(len(part.deflate()) for part in parts) - data
