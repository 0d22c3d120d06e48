"""Streams in one safetensors file, replaced whole, and never read as other than was written."""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flower_desloc.averaging import Stream

_ABOUT = "desloc"
_CHECKSUMS = "crc32"
_SEPARATOR = "/"  # joins stream and tensor; no stream name contains it


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


def write(path: Path, told: Mapping[str, Any], streams: Mapping[str, Stream]) -> None:
    """Write ``streams``, and ``told``, which JSON can hold, to ``path``, which is on disk then.

    Raises ``OSError`` when it cannot be written; there is no file then.
    """
    tensors = {
        f"{name}{_SEPARATOR}{key}": tensor.contiguous()
        for name, stream in streams.items()
        for key, tensor in stream.items()
    }
    text = json.dumps(told)
    checksums = {name: _checksum(stream) for name, stream in streams.items()}
    checksums[_ABOUT] = zlib.crc32(text.encode())
    metadata = {_ABOUT: text, _CHECKSUMS: json.dumps(checksums)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata=metadata)
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, SafetensorError):  # such as a full disk
            raise OSError(str(error)) from error
        raise


def _checksum(stream: Stream) -> int:
    # Against a disk's mistakes, not a forger's; a SHA-256 would be most of a window's file.
    checksum = 0
    for key in sorted(stream):
        tensor = stream[key].detach().cpu().contiguous()
        about = f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode()
        checksum = zlib.crc32(
            tensor.view(-1).view(torch.uint8).numpy().data, zlib.crc32(about, checksum)
        )
    return checksum
