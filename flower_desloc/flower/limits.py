"""Limits of what a reply may hold, which are checked before any of it is decoded.

The streams and their sizes follow from the request. A client without faults comes near none of the
others.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from flwr.app import Array, ArrayRecord, RecordDict

from flower_desloc.core.schedule import PARAMS
from flower_desloc.core.types import Stream
from flower_desloc.flower import bundles
from flower_desloc.flower.messages import TENSOR_NAMES

RECORDS = 8
"""Records besides the due streams."""
VALUES = 4096
"""Numbers and texts in all records; a list counts as many as it has."""
VALUES_PER_STEP = 8
"""More of them for each step of the window."""
KEY = 256
"""Characters of the name of a record, metric or text."""
TEXT = 4096
"""Characters or bytes of one text."""
TEXTS = 1 << 20
"""Of all texts and names together."""
ARRAY_KEY = 1024
"""Characters of a tensor's name."""
NAMES = 1 << 15
"""Names of tensors in each list of them, in the reply to the greeting."""
DIMENSIONS = 64
"""Of an array, and characters of its types."""
PER_ARRAY = 4096
"""Bytes that an array may have besides its values: its header, or its place in a bundle."""
UNKNOWN = 16
"""How many times the bytes of the parameters a stream of unknown shapes may have."""
OBJECTS = 1000
"""Objects that Flower cuts a reply into, besides two for each array and MiB of its streams."""


@dataclass(frozen=True)
class Limits:
    """What the reply to one request may hold."""

    steps: int
    """Local steps of the window."""
    streams: Mapping[str, tuple[int, int]]
    """By due stream: the number of arrays, and of bytes."""

    @classmethod
    def of(cls, due: Iterable[str], steps: int, like: Mapping[str, Stream]) -> Self:
        """Return the limits of a reply with the streams ``due``, whose tensors are ``like``."""
        return cls(steps, {name: _size(name, like) for name in due})

    def check(self, content: RecordDict) -> None:
        """Raise ``ValueError`` for what is beyond the limits."""
        _require("records", len(content), RECORDS + len(self.streams))
        values = texts = 0
        for name, record in content.items():
            texts += _checked_key(name, KEY)
            if isinstance(record, ArrayRecord):
                self._check_stream(name, record)
                continue
            for key, value in record.items():
                each = value if isinstance(value, list) else [value]
                if key in TENSOR_NAMES:
                    _require(f"names in {key!r}", len(each), NAMES)
                    for tensor in each:
                        _checked_key(str(tensor), ARRAY_KEY)
                    continue
                values += len(each)
                _require("values", values, VALUES + VALUES_PER_STEP * self.steps)
                texts += _checked_key(key, KEY)
                texts += sum(_checked_text(key, it) for it in each if isinstance(it, str | bytes))
                _require("characters of text", texts, TEXTS)

    def _check_stream(self, name: str, record: ArrayRecord) -> None:
        if name not in self.streams:
            expected = sorted(self.streams) or "none"
            raise ValueError(f"its reply has the stream {name!r}, expected {expected}")
        arrays, size = self.streams[name]
        _require(f"arrays in stream {name!r}", len(record), arrays)
        for key, array in record.items():
            _checked_key(key, ARRAY_KEY)
            _check_types(key, array)
        _require(f"bytes in stream {name!r}", sum(len(a.data) for a in record.values()), size)
        count = 0
        for key, array in record.items():
            count += bundles.length(key, array) if array.stype == bundles.STYPE else 1
            _require(f"arrays in stream {name!r}", count, arrays)


def most_objects(like: Mapping[str, Stream]) -> int:
    """Return into how many objects Flower may cut a reply with all streams."""
    sizes = [_size(name, like) for name in like]
    return OBJECTS + sum(2 * arrays + (size >> 20) for arrays, size in sizes)


def _size(name: str, like: Mapping[str, Stream]) -> tuple[int, int]:
    # Twice the values: a lossy format may be longer than a very small tensor.
    known = name in like
    tensors = (like[name] if known else like[PARAMS]).values()
    values = (2 if known else UNKNOWN) * sum(tensor.nbytes for tensor in tensors)
    return len(tensors), values + PER_ARRAY * (1 + len(tensors))


def _require(what: str, number: int, most: int) -> None:
    if number > most:
        raise ValueError(f"it has more than {most} {what}")


def _checked_key(key: str, most: int) -> int:
    if len(key) > most:
        raise ValueError(f"the name {key[:40]!r}... has more than {most} characters")
    return len(key)


def _checked_text(key: str, text: str | bytes) -> int:
    if len(text) > TEXT:
        raise ValueError(f"the text {key!r} has more than {TEXT} characters")
    return len(text)


def _check_types(key: str, array: Array) -> None:
    if max(len(array.dtype), len(array.shape), len(array.stype)) > DIMENSIONS:
        raise ValueError(f"{key!r} has a type or a shape of more than {DIMENSIONS} characters")
