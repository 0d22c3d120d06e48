"""Tensors as Flower's Arrays: the bytes of NumPy's .npy, as Flower itself has them.

Written with one copy of the values and read with none.
"""

import copyreg
import io
import math
import re
import warnings
from collections.abc import Sequence
from functools import lru_cache
from pickle import PickleBuffer
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from flwr.app import Array
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from flower_desloc.native.pages import joined, side_by_side

_NUMPY = "numpy.ndarray"  # Flower's name of the format
_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 1024  # of those that are remembered; NumPy's own are shorter
_ALIGNMENT = 16  # of the values in the bytes; NumPy's own is 64
# What NumPy writes before values that lie in C order; anything else is left to NumPy.
_HEADER = re.compile(
    rb"\{'descr': '([<>|][a-z]\d)', 'fortran_order': False, "
    rb"'shape': \((|\d{1,18},|\d{1,18}(?:, \d{1,18}){1,31})\), \} *\n"
)
_DTYPES = {
    np.dtype(name).str.encode(): getattr(torch, name)  # in this machine's byte order
    for name in ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8")
}

DESCRIPTIONS = {dtype: description.decode() for description, dtype in _DTYPES.items()}
"""NumPy's names of the types that both have."""

# The bytes of Arrays that were handed over and are still there, by their values' address.
_handed_over: WeakValueDictionary[int, NDArray[np.uint8]] = WeakValueDictionary()

with warnings.catch_warnings():
    # PyTorch warns, once, of memory that must not be written, as from_array does.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def to_array(tensor: Tensor) -> Array:
    """Return a tensor as an Array of its own bytes: later changes do not reach it.

    Raises ``TypeError`` for a type that NumPy does not have, such as bfloat16.
    """
    values = tensor.detach().cpu().contiguous().numpy()
    header = _header(values.dtype.str, values.shape)
    data = joined(header, values.reshape(-1).view(np.uint8).data)
    return Array(str(values.dtype), values.shape, _NUMPY, data)


def room(kinds: Sequence[tuple[torch.dtype, torch.Size]]) -> list[Tensor]:
    """Return new tensors of those types and shapes, each after what NumPy writes before it."""
    return side_by_side(kinds, _header_of)


def hand_over(tensor: Tensor) -> Array:
    """Return a tensor as an Array, without a copy if it lies where :func:`room` had it.

    Nobody may write to it as long as there is the Array (:func:`is_handed_over`). With a copy, as
    :func:`to_array` does, if it does not lie there.
    """
    written = _written(tensor)
    if written is None:
        return to_array(tensor)
    # One for all Arrays of that memory: it is there as long as any of them.
    written = _handed_over.setdefault(tensor.data_ptr(), written)
    dtype = str(np.dtype(DESCRIPTIONS[tensor.dtype]))
    return _restored(dtype, tuple(tensor.shape), _NUMPY, _Bytes(written.data.toreadonly()))


def is_handed_over(tensor: Tensor) -> bool:
    """Return whether an Array that :func:`hand_over` made of this memory is still there."""
    return tensor.data_ptr() in _handed_over


def is_in_room(tensor: Tensor) -> bool:
    """Return whether a tensor lies after what NumPy writes before it."""
    return _written(tensor) is not None


def _written(tensor: Tensor) -> NDArray[np.uint8] | None:
    """Return the memory of a tensor and of what NumPy writes before it, if that lies there."""
    header = _header_of(tensor.dtype, tensor.shape)
    if not (header and tensor.is_cpu and tensor.is_contiguous() and tensor.nbytes > 0):
        return None
    end = tensor.storage_offset() * tensor.itemsize + tensor.nbytes
    begin = end - tensor.nbytes - len(header)
    if begin < 0:
        return None
    whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.detach().untyped_storage())
    written: NDArray[np.uint8] = whole[begin:end].numpy()
    return written if written[: len(header)].tobytes() == header else None


def from_array(array: Array) -> Tensor:
    """Return the values of an Array; raises ``ValueError`` when they cannot be read.

    They are a view of its bytes wherever these are what NumPy writes, and not to be written: clone
    what is to be changed. PyTorch has no read-only tensors; this is an inference tensor, so that a
    write raises, but only once it is done.
    """
    tensor = _view(array)
    if tensor is None:
        try:
            tensor = torch.from_numpy(array.numpy())
        except Exception as error:  # whatever NumPy lets through of what other formats raise
            raise ValueError(f"an array cannot be read: {error}") from error
    return tensor


def values_bytes(array: Array) -> int:
    """Return how many bytes of values came: those of the .npy, less its header.

    Counted from what is there, not from the shape that is claimed.
    """
    data, begin = array.data, _begin(array.data)
    if data[: len(_MAGIC)] != _MAGIC or len(data) < begin:  # nothing that NumPy wrote
        return len(data)
    return len(data) - begin


def _header_of(dtype: torch.dtype, shape: torch.Size) -> bytes:
    """Return what NumPy writes before such values; nothing, if it does not have their type."""
    description = DESCRIPTIONS.get(dtype)
    return _header(description, tuple(shape)) if description else b""


@lru_cache(maxsize=4096)
def _header(description: str, shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    about = {"descr": description, "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(file, about)
    return file.getvalue()


def _begin(data: bytes | memoryview) -> int:
    """Return where the values begin: a header says its length, by version of the format."""
    width = 2 if data[6:7] == b"\x01" else 4
    return 8 + width + int.from_bytes(data[8 : 8 + width], "little")


def _view(array: Array) -> Tensor | None:
    data = array.data
    if array.stype != _NUMPY or data[: len(_MAGIC) + 2] != _MAGIC + b"\x01\x00":
        return None
    begin = _begin(data)
    said = _said(bytes(data[10:begin])) if begin <= _LONGEST_HEADER else None
    if said is None or begin % _ALIGNMENT:
        return None
    dtype, shape, count = said
    if count == 0 or len(data) != begin + count * dtype.itemsize:
        return None
    with torch.inference_mode():
        return torch.frombuffer(data, dtype=dtype, count=count, offset=begin).view(shape)


@lru_cache(maxsize=4096)
def _said(header: bytes) -> tuple[torch.dtype, tuple[int, ...], int] | None:
    """Return the type, the shape and the number of values, if NumPy writes such a header."""
    said = _HEADER.fullmatch(header)
    if said is None or said[1] not in _DTYPES:
        return None
    shape = tuple(map(int, re.findall(rb"\d+", said[2])))
    return _DTYPES[said[1]], shape, math.prod(shape)


class _Bytes:
    """An array's bytes on their way into a pickle, and out of it.

    Ray copies bytes into the pickle, the pickle into its store in shared memory, and the bytes out
    of it in the other process. A buffer it writes into the store, and hands out as a view of it.
    """

    def __init__(self, data: Any) -> None:
        self.data = data if isinstance(data, bytes) else memoryview(data)

    def __reduce_ex__(self, protocol: Any) -> tuple[object, ...]:
        return _Bytes, (PickleBuffer(self.data) if protocol >= 5 else bytes(self.data),)

    def __deepcopy__(self, memo: object) -> "_Bytes":
        return self  # nobody changes them


def made_of(dtype: str, shape: tuple[int, ...], stype: str, data: memoryview) -> Array:
    """Return an Array of these bytes, which Flower would want copied first."""
    return _restored(dtype, shape, stype, _Bytes(data))


def _reduce(array: Array) -> tuple[object, ...]:
    return _restored, (array.dtype, array.shape, array.stype, _Bytes(array.data))


def _restored(dtype: str, shape: tuple[int, ...], stype: str, data: _Bytes) -> Array:
    array = Array(dtype, shape, stype, b"")
    array.data = data.data  # type: ignore[assignment]  # a view will do, wherever it is used
    return array


copyreg.pickle(Array, _reduce)  # type: ignore[arg-type]
