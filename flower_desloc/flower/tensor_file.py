"""Streams in a safetensors file, with a checksum for every tensor."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from xxhash import xxh3_64

from flower_desloc.core.types import Streams

_METADATA, _CHECKSUMS = "desloc", "xxh3"  # keys of the file's metadata
_SEPARATOR = "/"  # joins stream and tensor; no stream name contains it
_DAMAGED = (SafetensorError, KeyError, TypeError, ValueError)


class DamagedFileError(ValueError):
    """A file holds other values than were written."""


def metadata(path: Path) -> dict[str, Any] | None:
    """Return the metadata that ``write`` was given; None for a missing or damaged file.

    A torn file is found here, as it is shorter than its header says; damaged tensors are found by
    ``read``. Raises ``OSError`` when an intact file may be there but cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata()
        text, checksums = header[_METADATA], json.loads(header[_CHECKSUMS])
        return dict(json.loads(text)) if checksums[_METADATA] == _text_checksum(text) else None
    except (FileNotFoundError, *_DAMAGED):
        return None


def read(path: Path, streams: Iterable[str] | None = None) -> dict[str, dict[str, Tensor]]:
    """Return the named streams, by default all.

    Raises ``DamagedFileError`` when they are not what was written, and ``OSError`` when they
    cannot be read.
    """
    wanted = None if streams is None else set(streams)
    result: dict[str, dict[str, Tensor]] = {name: {} for name in wanted or ()}
    try:
        with safe_open(path, framework="pt") as file:
            checksums = json.loads(file.metadata()[_CHECKSUMS])
            if {_METADATA, *file.keys()} != checksums.keys():
                raise DamagedFileError(f"{path} does not hold the tensors that were written")
            for full in file.keys():  # noqa: SIM118 - not a mapping
                name, _, key = full.partition(_SEPARATOR)
                if wanted is None or name in wanted:
                    tensor = file.get_tensor(full)
                    if checksums[full] != _checksum(full, tensor):
                        raise DamagedFileError(f"{full} in {path} is not what was written")
                    result.setdefault(name, {})[key] = tensor
    except DamagedFileError:
        raise
    except _DAMAGED as error:
        raise DamagedFileError(f"{path} cannot be read: {error}") from error
    return result


def write(path: Path, metadata: Mapping[str, Any], streams: Streams) -> None:
    """Write ``streams`` and ``metadata``, which JSON can hold, to ``path``.

    Raises ``OSError`` when the file cannot be written.
    """
    tensors = {
        f"{name}{_SEPARATOR}{key}": tensor.detach().cpu().contiguous()
        for name, stream in streams.items()
        for key, tensor in stream.items()
    }
    text = json.dumps(metadata)
    checksums = {full: _checksum(full, tensor) for full, tensor in tensors.items()}
    checksums[_METADATA] = _text_checksum(text)
    try:
        save_file(tensors, path, {_METADATA: text, _CHECKSUMS: json.dumps(checksums)})
    except SafetensorError as error:
        text = str(error)
        code = int(found[1]) if (found := re.search(r"\(os error (\d+)\)", text)) else 0
        raise OSError(code, os.strerror(code) if code else text) from error


def _text_checksum(text: str) -> str:
    return xxh3_64(text.encode()).hexdigest()


def _checksum(full: str, tensor: Tensor) -> str:
    digest = xxh3_64(f"{full} {tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
