"""Streams in one safetensors file, replaced whole, and never read as other than was written."""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flower_desloc.core.averaging import Stream

_ABOUT = "desloc"
_CHECKSUMS = "checksums"
_SEPARATOR = "/"  # joins stream and tensor; no stream name contains it
_ROW = 1 << 12  # words of eight bytes that are added before the sum is looked at
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The format's names."""


class DamagedFileError(ValueError):
    """A file holds other values than were written."""


def about(path: Path) -> dict[str, Any] | None:
    """Return what :func:`write` was told beside the streams, or None where there is no whole file.

    A torn file is noticed here, as its length is not what its header says; a flipped bit in a
    tensor is noticed by :func:`read`.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            if zlib.crc32(metadata[_ABOUT].encode()) != json.loads(metadata[_CHECKSUMS])[_ABOUT]:
                return None
            told = json.loads(metadata[_ABOUT])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
    return told if isinstance(told, dict) else None


def read(path: Path, streams: Iterable[str] | None = None) -> dict[str, dict[str, Tensor]]:
    """Return the named streams, or all; raises :class:`DamagedFileError`, naming the file."""
    wanted = None if streams is None else set(streams)
    try:
        with safe_open(path, framework="pt") as file:
            checksums = json.loads(file.metadata()[_CHECKSUMS])
            names = checksums.keys() - {_ABOUT} if wanted is None else wanted
            result: dict[str, dict[str, Tensor]] = {name: {} for name in names}
            for full in file.keys():  # noqa: SIM118 - not a mapping
                name, _, key = full.partition(_SEPARATOR)
                if name in result:
                    result[name][key] = file.get_tensor(full)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(f"{path} cannot be read: {error}") from error
    for name, stream in result.items():
        # Lengths are checked by the format; a flipped bit is not.
        if _checksum(stream) != checksums.get(name):
            raise DamagedFileError(f"{name} in {path} is not what was written")
    return result


def write(
    path: Path, told: Mapping[str, Any], streams: Mapping[str, Stream], *, sync: bool = True
) -> None:
    """Write ``streams``, and ``told``, which JSON can hold, to ``path``.

    It is on disk then, unless ``sync`` is false: it outlives the process, and it takes the
    machine's end in the seconds that follow to tear it, which :func:`about` and :func:`read`
    notice. A file that was there is written over, which is faster than finding new memory for one.

    Raises ``OSError`` when it cannot be written; there is no file then.
    """
    values = {
        f"{name}{_SEPARATOR}{key}": tensor.detach().cpu().contiguous()
        for name, stream in streams.items()
        for key, tensor in stream.items()
    }
    text = json.dumps(told)
    checksums = {name: _checksum(stream) for name, stream in streams.items()}
    checksums[_ABOUT] = zlib.crc32(text.encode())
    # The widest first, so that every tensor begins where its type may.
    order = sorted(values, key=lambda full: (-values[full].itemsize, full))
    header = _header({_ABOUT: text, _CHECKSUMS: json.dumps(checksums)}, values, order)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _opened(path) as file:
            file.write(header)
            for full in order:
                file.write(_bytes(values[full]).data)
            file.truncate()
            file.flush()
            if sync:
                os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _opened(path: Path) -> BinaryIO:
    return path.open("r+b" if path.exists() else "wb")


def _header(metadata: Mapping[str, str], values: Mapping[str, Tensor], order: list[str]) -> bytes:
    """Return what a safetensors file begins with.

    Written here, as the library's own writing takes a copy of all there is.
    """
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for full in order:
        tensor = values[full]
        begin, end = end, end + tensor.nbytes
        entries[full] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Return a contiguous tensor's bytes, not a copy of them."""
    result: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return result


def _checksum(stream: Stream) -> int:
    """Return a number that one changed bit or one lost page changes.

    Against a disk's mistakes, not a forger's: the CRC-32 of the sums of rows of words, at the speed
    of memory. A CRC-32 of the values would be most of a window's file, a SHA-256 more than that.
    """
    checksum = 0
    for key in sorted(stream):
        tensor = stream[key].detach().cpu().contiguous()
        about = f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode()
        values = _bytes(tensor)
        whole = len(values) // (8 * _ROW) * (8 * _ROW)
        # Sums of 64-bit words, modulo 2^64.
        sums = values[:whole].view(np.int64).reshape(-1, _ROW).sum(1)
        for part in (about, sums.data, values[whole:].data):
            checksum = zlib.crc32(part, checksum)
    return checksum
