"""Tensors as Flower records, in NumPy's .npy format: one copy to write, none to read.

NumPy has no bfloat16: its values are written as void of two bytes, which nothing takes for numbers
of another type.
"""

import io
import math
import warnings
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.lib import format as npy
from torch import Tensor

from flower_desloc.core.types import Stream
from flower_desloc.flower.bundles import STYPE, unbundled

R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord)
Bytes = bytes | memoryview

_NUMPY = "numpy.ndarray"  # Flower's name of the format
_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 1024  # bytes; NumPy's own are shorter, and parsed headers are cached
_ALIGNMENT = 16  # bytes; NumPy aligns the values to 64
_BFLOAT16 = np.dtype("V2")
_DTYPES = {  # in this machine's byte order
    np.dtype(name): getattr(torch, name)
    for name in ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8")
} | {_BFLOAT16: torch.bfloat16}

with warnings.catch_warnings():
    # PyTorch warns once about read-only memory, which from_array() gives it.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


class TensorArray(Array):
    """An Array over a tensor's own memory, whose ``data`` is joined of its ``parts`` when used.

    It is for a tensor that does not change before the array is sent.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor = tensor.detach().cpu().contiguous()
        self.dtype, self.shape, self.stype, self.parts = _parts_of(tensor)

    @cached_property
    def data(self) -> bytes:  # type: ignore[override]
        """The bytes in one piece."""
        return b"".join(self.parts)


def to_record(stream: Stream, *, copy: bool = True) -> ArrayRecord:
    """Return a stream as an ArrayRecord, by default as a copy; otherwise of ``TensorArray``s.

    Raises ``TypeError`` for a tensor that no message can hold, such as one of float8 codes.
    """
    record = ArrayRecord()  # its constructor would make Arrays of TensorArrays
    for key, tensor in stream.items():
        try:
            record[key] = to_array(tensor) if copy else TensorArray(tensor)
        except TypeError as error:
            raise TypeError(
                f"{key!r} is of type {tensor.dtype}, which no message can hold; send what is "
                "trained: to_record({name: p for name, p in model.named_parameters() "
                "if p.requires_grad})"
            ) from error
    return record


def from_record(record: ArrayRecord) -> dict[str, Tensor]:
    """Return the tensors of an ArrayRecord as read-only views; clone what is to be changed.

    Raises ``ValueError`` when they cannot be read.
    """
    arrays = arrays_of(record)
    stream = {key: from_array(array) for key, array in arrays.items()}
    for key, tensor in stream.items():
        if isinstance(arrays[key], TensorArray):
            continue
        # NumPy ignores trailing bytes; they were sent all the same.
        if (size := values_bytes(arrays[key])) != tensor.nbytes:
            raise ValueError(f"{key!r} came with {size} bytes for {tensor.nbytes} bytes of values")
    return stream


def streams_of(content: RecordDict) -> dict[str, Stream]:
    """Return the streams in a message; raises ``ValueError`` when they cannot be read."""
    return {name: from_record(each) for name, each in records_of(ArrayRecord, content).items()}


def arrays_of(record: ArrayRecord, most: int | None = None) -> Mapping[str, Array]:
    """Return the arrays of a record, those in bundles included.

    Raises ``ValueError`` for a bundle that cannot be read, or that has more than ``most`` arrays.
    """
    has_bundles = any(array.stype == STYPE for array in record.values())
    return unbundled(record, most) if has_bundles else record


def to_array(tensor: Tensor) -> Array:
    """Return a copy of ``tensor`` as a Flower Array.

    Raises ``TypeError`` for a type that NumPy does not have, other than bfloat16.
    """
    dtype, shape, stype, parts = _parts_of(tensor.detach().cpu().contiguous())
    return Array(dtype, shape, stype, b"".join(parts))


def plain(record: ArrayRecord) -> ArrayRecord:
    """Return a record in which every ``TensorArray`` is a copy of it, as Flower sends it."""
    return ArrayRecord(
        {
            key: to_array(array.tensor) if isinstance(array, TensorArray) else array
            for key, array in record.items()
        }
    )


def data_of(array: Array) -> tuple[Bytes, ...]:
    """Return the bytes of an array, in pieces."""
    return array.parts if isinstance(array, TensorArray) else (array.data,)


def num_bytes(array: Array) -> int:
    """Return the number of bytes of an array."""
    return sum(map(len, data_of(array)))


def _parts_of(tensor: Tensor) -> tuple[str, tuple[int, ...], str, tuple[Bytes, Bytes]]:
    """Return type, shape, format and bytes of a tensor's Array."""
    if tensor.dtype == torch.bfloat16:
        values, dtype = tensor.view(torch.int16).numpy().view(_BFLOAT16), "bfloat16"
    else:
        values = tensor.numpy()
        dtype = str(values.dtype)
    header = _header(values.dtype.str, values.shape)
    return dtype, values.shape, _NUMPY, (header, values.reshape(-1).view(np.uint8).data)


def from_array(array: Array) -> Tensor:
    """Return the values of ``array``: a read-only view of its bytes where NumPy wrote them.

    Clone the tensor before changing it. PyTorch has no read-only tensors; this is an inference
    tensor, so that an in-place operation raises, but only after it has written.

    Raises ``ValueError`` when the values cannot be read.
    """
    if isinstance(array, TensorArray):
        return array.tensor
    try:
        tensor = _view(array)
        return _from_numpy(array.numpy()) if tensor is None else tensor
    except Exception as error:  # NumPy lets many kinds through
        raise ValueError(f"an array cannot be read: {error}") from error


def stated(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> tuple[str, tuple[int, ...], str, int] | None:
    """Return type, shape, format and bytes of the Array of such a tensor; None if there is none."""
    kind = next((theirs for theirs, ours in _DTYPES.items() if ours == dtype), None)
    if kind is None:
        return None
    name = "bfloat16" if kind == _BFLOAT16 else str(kind)
    size = len(_header(kind.str, shape)) + math.prod(shape) * kind.itemsize
    return name, shape, _NUMPY, size


def values_bytes(array: Array) -> int:
    """Return the number of bytes of values, counted from the data and not from the stated shape."""
    begin = _values_begin(array.data)
    is_numpy = array.data[: len(_MAGIC)] == _MAGIC and begin <= len(array.data)
    return len(array.data) - begin if is_numpy else len(array.data)


@lru_cache(maxsize=4096)
def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    npy.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue()


def _values_begin(data: bytes) -> int:
    width = 2 if data[6:7] == b"\x01" else 4  # of the header's length, by version of the format
    return 8 + width + int.from_bytes(data[8 : 8 + width], "little")


def _view(array: Array) -> Tensor | None:
    """Return a view of the values; None for a layout that PyTorch cannot view."""
    begin = _values_begin(array.data)
    if array.stype != _NUMPY or begin > _LONGEST_HEADER or begin % _ALIGNMENT:
        return None
    shape, dtype = _parsed(bytes(array.data[:begin]))
    count = math.prod(shape)
    if dtype is None or count <= 0 or len(array.data) != begin + count * dtype.itemsize:
        return None
    with torch.inference_mode():
        return torch.frombuffer(array.data, dtype=dtype, count=count, offset=begin).view(shape)


def _from_numpy(values: npt.NDArray[Any]) -> Tensor:
    if values.dtype == _BFLOAT16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


@lru_cache(maxsize=4096)
def _parsed(header: bytes) -> tuple[tuple[int, ...], torch.dtype | None]:
    file = io.BytesIO(header)
    if npy.read_magic(file) != (1, 0):
        return (), None
    shape, fortran_order, dtype = npy.read_array_header_1_0(file)
    return shape, None if fortran_order else _DTYPES.get(dtype)


def plain_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics with Python's numbers for those of NumPy and PyTorch; lists are kept.

    Raises ``TypeError``, naming the metric, for a value that is not one number or a list.
    """
    plain: dict[str, Any] = {}
    for name, value in values.items():
        if type(value) in (int, float, list):
            plain[name] = value
            continue
        try:
            if isinstance(value, str):
                raise TypeError
            plain[name] = value.item() if hasattr(value, "item") else float(value)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"the metric {name!r} is {value!r} ({type(value).__name__}); it must be one number"
            ) from None
    return plain


def records_of(kind: type[R], content: RecordDict) -> dict[str, R]:
    """Return the records of one kind, under their names.

    What Flower's own ``content.array_records`` and its like return refers to itself and to the
    whole content: gigabytes that are freed only when Python next looks for such cycles.
    """
    return {name: record for name, record in content.items() if isinstance(record, kind)}
