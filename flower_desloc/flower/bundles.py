"""Small arrays of a record packed into one array.

Flower sends every array by requests of its own: 20 ms for each array and direction in a
deployment on one machine, more over a network. A bundle holds arrays of up to 4 MB side by side,
behind an index.
"""

import json
from collections.abc import Iterator
from typing import Any

from flwr.app import Array, ArrayRecord

STYPE = "flower-desloc.bundle"
"""Format name of a bundle, in place of ``numpy.ndarray``."""

_SMALL = 4 << 20  # bytes; Flower cuts what is larger than 5 MiB
_FULL = 64 << 20  # bytes; the receiver of an array holds it twice for a moment
_MANY = 4096  # arrays
_LONG = 256  # characters of a name
_INDEX = 8 << 20  # bytes: more than so many of such names need
_ALIGNMENT = 64  # bytes

_Row = tuple[int, str, Array]
"""Position in the record, name, and array."""


def bundled(record: ArrayRecord) -> ArrayRecord:
    """Return a record with small arrays in bundles, each bundle under its first array's name."""
    result = ArrayRecord()
    for rows in sorted(_groups(record), key=lambda rows: rows[0][0]):  # keeps the record's order
        (_, name, array), *others = rows
        result[name] = _bundle(rows) if others else array
    return result


def unbundled(record: ArrayRecord, most: int | None = None) -> dict[str, Array]:
    """Return the arrays of a record in their order, those in bundles included.

    Raises ``ValueError`` for a bundle that ``bundled`` does not make, and for more than ``most``
    arrays, before any is read.
    """
    alone = [(key, array) for key, array in record.items() if array.stype != STYPE]
    indices = {k: _index(k, a.data) for k, a in record.items() if a.stype == STYPE}
    if most is not None and len(alone) + sum(len(rows) for rows, _ in indices.values()) > most:
        raise ValueError(f"it has more than {most} arrays")
    rows = [row for k, (index, end) in indices.items() for row in _rows(k, record[k], index, end)]
    placed = {position: (name, array) for position, name, array in rows}
    names = {name for name, _ in (*alone, *placed.values())}
    total = len(alone) + len(rows)
    # With all positions distinct and none beyond the end, the others fill the gaps.
    if len(names) != total or max(placed, default=-1) >= total:
        raise ValueError("two of its arrays have one name or place")
    rest = iter(alone)
    return dict(placed[i] if i in placed else next(rest) for i in range(total))


def _groups(record: ArrayRecord) -> Iterator[list[_Row]]:
    group: list[_Row] = []
    size = 0
    for position, (name, array) in enumerate(record.items()):
        row = position, name, array
        if not 0 < len(array.data) <= _SMALL or len(name) > _LONG:
            yield [row]
            continue
        if size + len(array.data) > _FULL or len(group) == _MANY:
            yield group
            group, size = [], 0
        group.append(row)
        size += len(array.data)
    if group:
        yield group


def _bundle(rows: list[_Row]) -> Array:
    index = [[i, name, a.dtype, a.shape, a.stype, len(a.data)] for i, name, a in rows]
    text = json.dumps(index, separators=(",", ":")).encode()
    pieces = [len(text).to_bytes(8, "little") + text, *(array.data for _, _, array in rows)]
    data = b"".join(part for piece in pieces for part in (piece, bytes(_padding(len(piece)))))
    return Array("uint8", (len(data),), STYPE, data)


def _padding(size: int) -> int:
    return -size % _ALIGNMENT


def _index(key: str, data: bytes) -> tuple[list[Any], int]:
    """Return the rows of a bundle's index, and where the index ends."""
    length = int.from_bytes(data[:8], "little")
    try:
        if length > _INDEX:
            raise ValueError(f"its index of {length} bytes is too long")
        rows = json.loads(data[8 : 8 + length])
        if not isinstance(rows, list) or len(rows) > _MANY:
            raise ValueError(f"its index is no list of at most {_MANY} arrays")
    except (ValueError, RecursionError) as error:
        raise _unreadable(key, error) from error
    return rows, 8 + length


def _rows(key: str, bundle: Array, index: list[Any], end: int) -> list[_Row]:
    data = bundle.data
    rows = []
    try:
        for position, name, dtype, shape, stype, size in index:
            begin = end + _padding(end)
            end = begin + _whole(size, 1, len(data))
            array = Array(str(dtype), tuple(map(_whole, shape)), str(stype), data[begin:end])
            rows.append((_whole(position), str(name), array))
        if end + _padding(end) != len(data):
            raise ValueError(f"it has {len(data)} bytes, its arrays {end}")
    except (ValueError, TypeError, RecursionError) as error:
        raise _unreadable(key, error) from error
    return rows


def _unreadable(key: str, error: Exception) -> ValueError:
    return ValueError(f"the bundle {key!r} cannot be read: {error}")


def _whole(value: object, least: int = 0, most: int = 2**63) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{str(value)[:40]} is no number from {least} to {most}")
    return value
