"""A short text that changes when a client's data does."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64

from flower_desloc.app.tasks.protocol import ClientData, HasDigest


def data_version(data: ClientData) -> str:
    """Return the size of a client's data and a digest of it.

    The digest is what ``data.data_digest`` returns; without such a method it is that of the
    description and the first batch.
    """
    if isinstance(data, HasDigest):
        found = data.data_digest()
    else:
        found = digest([sorted(data.description.items()), data.train_batch(0)])
    return f"{data.num_examples} examples, digest {found}"


def digest(values: Iterable[Any]) -> str:
    """Return a digest of arrays, tensors, texts, numbers, and containers of them.

    Of other objects it is that of their type only.
    """
    state = xxh3_64()
    for value in values:
        for part in _parts(value):
            state.update(part)
    return state.hexdigest()


def _parts(value: Any) -> Iterator[bytes | memoryview]:
    """Yield bytes that differ if values differ."""
    yield f"{type(value).__name__};".encode()
    match value:
        case Tensor():
            yield f"{value.dtype} {tuple(value.shape)};".encode()
            # As bytes: NumPy has no bfloat16.
            yield value.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().data
        case np.ndarray() if value.dtype.hasobject:
            yield from _parts(value.tolist())
        case np.ndarray():
            yield f"{value.dtype} {value.shape};".encode()
            yield np.ascontiguousarray(value).data.cast("B")
        case bytes():
            yield value
        case str() | int() | float() | None:
            yield f"{value!r};".encode()
        case Mapping():
            for item in value.items():
                yield from _parts(item)
        case Sequence():
            for item in value:
                yield from _parts(item)
        case _ if is_dataclass(value):
            for field in fields(value):
                yield from _parts(getattr(value, field.name))
