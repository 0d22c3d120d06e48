"""Bytes of messages: the payload of each stream, and whole messages as Flower sends them."""

import copy
from collections.abc import Mapping

from flwr.app import Array, ArrayRecord, Message, RecordDict

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
    payload = 0
    bare = RecordDict()
    for name, record in message.content.items():
        if not isinstance(record, ArrayRecord):
            bare[name] = record
            continue
        bare[name] = stripped = ArrayRecord()
        for index, (key, array) in enumerate(record.items()):
            # Distinct data: Flower sends equal objects once.
            data = f"{name}/{index}".encode()
            stripped[key] = Array(array.dtype, array.shape, array.stype, data)
            payload += len(array.data) - len(data)
    skeleton = copy.copy(message)
    skeleton.content = bare
    framing = len(skeleton.deflate()) + len(bare.deflate())
    for record in bare.values():
        framing += len(record.deflate())
        if isinstance(record, ArrayRecord):
            for array in record.values():
                framing += len(array.deflate())
                framing += sum(len(chunk.deflate()) for _, chunk in array.slice_array())
    return framing + payload
