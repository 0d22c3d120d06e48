"""Large pages for new memory.

To fill memory that is new costs more than to copy what fills it: the kernel hands it out page by
page, 4 KB each. Where it is asked to, Linux hands out 2 MB at once, as it does for NumPy's arrays;
Python's bytes and PyTorch's tensors do not ask.
"""

import ctypes
import mmap
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes, as of PyTorch's own tensors
_LEAST = 3 << 20  # bytes; of fewer, most would not be in large pages all the same

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes = [ctypes.c_char_p, ctypes.c_ssize_t]
_new_bytes.restype = ctypes.py_object


def joined(header: bytes, values: memoryview) -> bytes:
    """Return ``header`` and then ``values``, contiguous, as one bytes object."""
    size = len(header) + values.nbytes
    if size < _LEAST:
        return b"".join((header, values))
    data: bytes = _new_bytes(None, size)  # nobody else has it until it is filled
    address = id(data) + bytes.__basicsize__ - 1  # less the NUL that ends them
    _ask(address, size)
    room = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
    room[: len(header)] = header
    room[len(header) :] = values.cast("B")
    return data


def side_by_side(
    kinds: Sequence[tuple[torch.dtype, torch.Size]],
    header: Callable[[torch.dtype, torch.Size], bytes] = lambda *_: b"",
) -> list[Tensor]:
    """Return new tensors of those types and shapes in one piece of memory, each after its header.

    It lives as long as any of them. Headers are as long as a multiple of 64 bytes.
    """
    headers = [header(*kind) for kind in kinds]
    begins, ends, size = [], [], 0
    for (dtype, shape), before in zip(kinds, headers, strict=True):
        begins.append(size + len(before))
        ends.append(begins[-1] + shape.numel() * dtype.itemsize)
        size = -(-ends[-1] // _ALIGNMENT) * _ALIGNMENT
    whole = torch.empty(size, dtype=torch.uint8, device="cpu")
    if size >= _LEAST:
        _ask(whole.data_ptr(), size)
    tensors = []
    for (dtype, shape), before, begin, end in zip(kinds, headers, begins, ends, strict=True):
        if before:
            whole[begin - len(before) : begin] = torch.frombuffer(before, dtype=torch.uint8)
        tensors.append(whole[begin:end].view(dtype).view(shape))
    return tensors


def _ask(address: int, size: int) -> None:
    """Have that memory in large pages, if the system can; it may refuse."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if (libc := _libc()) is not None:
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)


@cache
def _libc() -> Any:
    # Elsewhere than on Linux there is no such advice.
    return ctypes.CDLL(None) if hasattr(mmap, "MADV_HUGEPAGE") else None
