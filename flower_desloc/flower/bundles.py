"""Small arrays of a message as one, as Flower sends every array by requests of its own.

In a deployment they take longer than the bytes: 20 ms an array in each direction on one machine,
and more over a link. So arrays of less than a chunk of Flower's are written side by side, with an
index before them, and read as views.
"""

import json
from collections.abc import Iterable, Iterator

from flwr.app import Array, ArrayRecord

from flower_desloc.flower.arrays import made_of

STYPE = "flower-desloc.bundle"
"""In place of ``numpy.ndarray``, the format of any other array."""

_SMALL = 4 << 20  # bytes; Flower cuts what is larger than 5 MiB
_FULL = 64 << 20  # bytes; who receives an array has it twice for a moment
_ALIGNMENT = 64  # bytes


def bundled(record: ArrayRecord) -> ArrayRecord:
    """Return a record with small arrays side by side, each bundle under its first one's name."""
    result = ArrayRecord()
    for names in _groups(record):
        first, *others = names
        result[first] = _bundle({name: record[name] for name in names}) if others else record[first]
    return result


def unbundled(record: ArrayRecord) -> dict[str, Array]:
    """Return the arrays of a record, of which some may be in bundles; they are views of these.

    Raises ``ValueError`` where a bundle is not one that :func:`bundled` makes.
    """
    arrays: dict[str, Array] = {}
    for key, array in record.items():
        each = [(key, array)] if array.stype != STYPE else _parts(key, array)
        for name, part in each:
            if name in arrays:
                raise ValueError(f"there are two arrays {name!r}")
            arrays[name] = part
    return arrays


def _groups(record: ArrayRecord) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for name, array in record.items():
        if len(array.data) > _SMALL:
            yield [name]
            continue
        if size + len(array.data) > _FULL:
            yield group
            group, size = [], 0
        group.append(name)
        size += len(array.data)
    if group:
        yield group


def _bundle(arrays: dict[str, Array]) -> Array:
    index = [[name, a.dtype, a.shape, a.stype, len(a.data)] for name, a in arrays.items()]
    text = json.dumps(index, separators=(",", ":")).encode()
    head = len(text).to_bytes(8, "little") + text
    data = b"".join(_padded([head, *(array.data for array in arrays.values())]))
    return Array("uint8", (len(data),), STYPE, data)


def _padded(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    for piece in pieces:
        yield piece
        yield bytes(-len(piece) % _ALIGNMENT)


def _parts(key: str, bundle: Array) -> Iterator[tuple[str, Array]]:
    data = memoryview(bundle.data)
    try:
        end = 8 + int.from_bytes(data[:8], "little")
        index = json.loads(bytes(data[8:end]))
        for name, dtype, shape, stype, size in index:
            begin = end + -end % _ALIGNMENT
            end = begin + size
            if not (isinstance(name, str) and isinstance(size, int) and 0 <= size <= len(data)):
                raise ValueError(f"no array {name!r} has {size!r} bytes")
            yield name, made_of(str(dtype), tuple(map(int, shape)), str(stype), data[begin:end])
        if end + -end % _ALIGNMENT != len(data):
            raise ValueError(f"it has {len(data)} bytes, its arrays {end}")
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"the bundle {key!r} cannot be read: {error}") from error
