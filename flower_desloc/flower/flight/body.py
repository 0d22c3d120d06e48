"""The bytes beside a message: which arrays they are, in which order, and their digest."""

import json
import mmap
import os
import secrets
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from flwr.app import Array, ArrayRecord

from flower_desloc.core.compression import coded_bytes
from flower_desloc.core.formats import Format
from flower_desloc.core.kinds import Kinds, kind_of
from flower_desloc.core.types import Streams
from flower_desloc.flower.arrays import data_of, num_bytes, stated
from flower_desloc.flower.internals import log

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.poly1305 import Poly1305

BY_MESSAGE: Final = "by-message"
"""In that record of a reply: why the arrays must travel in messages; empty: they need not."""

Row = tuple[str, str, str, tuple[int, ...], str, int]
"""Stream, name, type, shape, format and bytes of an array."""

_HASHED = 16 << 20  # bytes, between which other threads run
_ALIGNMENT = 64  # bytes
_KEY = 32  # bytes


def rows_of(records: Mapping[str, ArrayRecord]) -> list[Row]:
    """Return what each array is."""
    return [
        (stream, name, a.dtype, tuple(a.shape), a.stype, num_bytes(a))
        for stream, record in records.items()
        for name, a in record.items()
    ]


def expected_rows(
    due: Iterable[str], templates: Streams, compression: Mapping[str, Format], kinds: Kinds
) -> list[Row] | None:
    """Return what a reply with the streams ``due`` has; None where that is not known yet."""
    rows: list[Row] = []
    for stream in sorted(due):
        if stream not in templates:
            return None
        signed = kind_of(stream, kinds).is_signed
        for name, tensor in templates[stream].items():
            row = stated(tensor.dtype, tuple(tensor.shape))
            if stream in compression:
                size = coded_bytes(compression[stream], tensor, signed=signed)
                row = stated(torch.uint8, (size,))
            if row is None:
                return None
            rows.append((stream, name, *row))
    return rows


def rows_to_json(rows: Iterable[Row]) -> bytes:
    """Return rows as bytes for a ConfigRecord."""
    return json.dumps(list(rows), separators=(",", ":")).encode()


def rows_from_json(text: bytes) -> list[Row]:
    """Return the rows of a request: the server, which chooses what runs here, is trusted."""
    return [(s, n, d, tuple(shape), f, size) for s, n, d, shape, f, size in json.loads(text)]


def views(rows: Iterable[Row], records: Mapping[str, ArrayRecord]) -> list[memoryview] | None:
    """Return the bytes of the arrays in the order of ``rows``; None if they are other arrays."""
    found = {row[:2]: row for row in rows_of(records)}
    rows = list(rows)
    if len(found) != len(rows) or any(found.get(row[:2]) != row for row in rows):
        return None
    return [
        memoryview(piece) for stream, name, *_ in rows for piece in data_of(records[stream][name])
    ]


def memory(rows: Iterable[Row]) -> list[memoryview]:
    """Return new memory for the data of each array."""
    rows = list(rows)
    return _cut(rows, _anonymous(_length(rows)))


def mapped(rows: Iterable[Row], folder: Path) -> list[memoryview]:
    """Return memory for the data of each array that is a file without a name in ``folder``.

    The kernel can write it to the disk when memory is short. On a full disk, and where the
    system cannot reserve space, it is ordinary memory.
    """
    rows = list(rows)
    length = _length(rows)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, length)  # or a full disk would be a SIGBUS
            whole = mmap.mmap(file.fileno(), length)
    except (OSError, AttributeError) as error:  # macOS has no posix_fallocate
        log(WARNING, "tensors are held in memory, not in %s: %s", folder, error)
        whole = _anonymous(length)
    return _cut(rows, whole)


def _anonymous(length: int) -> mmap.mmap:
    """Return new memory, where possible in huge pages: others take five times as long to get."""
    whole = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            whole.madvise(mmap.MADV_HUGEPAGE)
    return whole


def _length(rows: Iterable[Row]) -> int:
    return max(1, sum(row[-1] + -row[-1] % _ALIGNMENT for row in rows))


def _cut(rows: Iterable[Row], whole: mmap.mmap) -> list[memoryview]:
    """Return the part of each array."""
    view, begin, parts = memoryview(whole), 0, []
    for *_, size in rows:
        parts.append(view[begin : begin + size])
        begin += size + -size % _ALIGNMENT
    return parts


def records(rows: Iterable[Row], data: Iterable[memoryview]) -> dict[str, ArrayRecord]:
    """Return the arrays of ``rows`` over their data, without a copy."""
    found: dict[str, ArrayRecord] = {}
    for (stream, name, dtype, shape, stype, _), view in zip(rows, data, strict=True):
        array = Array(dtype, shape, stype, b"")
        array.data = view.toreadonly()  # type: ignore[assignment]  # Flower's constructor copies
        found.setdefault(stream, ArrayRecord())[name] = array
    return found


def new_key() -> bytes:
    """Return a key for the digest of one body."""
    return secrets.token_bytes(_KEY)


def tag_of(key: bytes) -> "Poly1305":
    """Return what computes the digest of a body: its Poly1305 tag.

    The key is random, used for one body, and known to the two ends of a message only. Of what
    proves as much it costs least: 0.2 seconds for a gigabyte, BLAKE3 0.4 and SHA-256 0.7.
    """
    from cryptography.hazmat.primitives.poly1305 import Poly1305

    return Poly1305(key)


def digest(key: bytes, parts: Iterable[Any]) -> bytes:
    """Return the digest of the bytes in ``parts``."""
    tag = tag_of(key)
    for part in parts:
        for begin in range(0, len(part), _HASHED):
            tag.update(part[begin : begin + _HASHED])
    return tag.finalize()
