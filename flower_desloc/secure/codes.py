"""Values as integers, whose sums are exact: fixed point, modulo a power of two.

A stream's code is its value times 2^scale, rounded. The scale is one for all sites and all of a
stream's values, stated before the window, so that the sum of codes is the code of the sum. Masks
are added modulo 2^64. Of the result a site sends the lowest ``width`` bytes, which have no carry
from above: the sum is then modulo 2^(8 width).

Second moments are added as they are: the mean of their roots, squared, is not their mean, and that
of their logarithms is their geometric mean. They have the full width, and are rounded up. A small
one is thus never zero, and no step of Adam, which divides by its root, is longer than it would be.

For up to 16 sites the error is at most 2^-32 of the largest value of the stream's last average, and
for each doubling of the sites twice that. Of parameters it is at most 2^-23, where float32's own is
2^-24 of each value: they change least between averages, so a value may be 8 times the last
average's largest, and not 1024 times, and they need no more bytes than float32. For up to 32 sites
the error of the root of a second moment is at most 2^-23 of the root of the largest.

Before the first average nothing is known of the largest value: the error is up to 2^-30 itself, and
the root of a second moment may be up to 2^-22 too large, so that where gradients are no larger than
that, Adam's steps after it are too short.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_desloc.core.kinds import Kind
from flower_desloc.core.streams import finite_ends
from flower_desloc.core.types import Stream
from flower_desloc.secure.agreement import LARGEST_SCALE, NARROW, SHORT, WIDE, bits_of, largest_in

Codes = NDArray[np.int64]

_HEADROOM = {WIDE: 10, NARROW: 10, SHORT: 3}
"""By width the binary digits that a value may have more than the largest of the last average."""
_UNKNOWN = {WIDE: 13, NARROW: 13, SHORT: 3}
"""The same before the first average, compared with 1."""
_BLOCK = 1 << 18
_INT64 = np.dtype("<i8")  # the lowest byte first, on any machine


def width_of(kind: Kind) -> int:
    """Return the bytes of each code of a stream."""
    if kind is Kind.PARAMS:
        return SHORT
    return NARROW if kind.is_signed else WIDE


def scale_for(largest: float | None, number: int, width: int) -> int:
    """Return the scale of a stream for a sum of ``number`` sites.

    ``largest`` is the magnitude of the greatest value of its last average; None or zero: it is not
    known.
    """
    room = _room(number, width)
    if not largest:
        return room - _UNKNOWN[width]
    return min(room - _HEADROOM[width] - math.frexp(largest)[1], LARGEST_SCALE)


def largest_of(stream: Stream) -> float:
    """Return the magnitude of a stream's greatest value; raises ``ValueError`` if not finite."""
    ends = finite_ends("", stream).values()
    return max((max(abs(low), abs(high)) for low, high in ends), default=0.0)


def scale_after(average: str | None, number: int, width: int) -> int:
    """Return the scale of a stream after its last average, as ``stated``; None: there is none."""
    return scale_for(largest_in(average) if average else None, number, width)


def encode(tensor: Tensor, scale: int, number: int, width: int, *, up: bool = False) -> Codes:
    """Return the codes of a tensor's values, in one dimension.

    Args:
        tensor: Of type float32 or float64.
        scale: Binary digits after the point.
        number: The sites whose sum is to have room.
        width: In so many bytes.
        up: Whether to round up, and not to the nearest.

    Raises ``ValueError`` for a value that is too large or not finite.

    """
    values = tensor.detach().cpu().reshape(-1).numpy()
    codes: Codes = np.empty(values.size, np.int64)
    most = 2.0 ** _room(number, width)
    for start in range(0, values.size, _BLOCK):
        part = values[start : start + _BLOCK].astype(np.float64)
        part *= 2.0**scale
        (np.ceil if up else np.rint)(part, out=part)
        if not np.abs(part).max() <= most:
            raise ValueError(  # one text for all: the server reads it
                "a value is not finite, or too large for the codes of secure sums: parameters may "
                f"be {2 ** _HEADROOM[SHORT]} times the largest of the last average, others "
                f"{2 ** _HEADROOM[WIDE]} times; lower optimizer.lr, or clip gradients"
            )
        codes[start : start + _BLOCK] = part
    return codes


def packed(codes: Codes, width: int) -> NDArray[np.uint8]:
    """Return the lowest ``width`` bytes of each code: the first four of all, then what is left.

    Numbers, and not single bytes, are gathered, which is faster.
    """
    whole = codes.astype(_INT64, copy=False)
    if width == WIDE:
        return whole.view(np.uint8)
    low = whole.view(np.uint32)[::2].copy().view(np.uint8)
    if width == SHORT:
        return low
    return np.concatenate([low, whole.view(np.uint16)[2::4].copy().view(np.uint8)])


def unpacked(data: NDArray[np.uint8], width: int) -> Codes:
    """Return codes from ``packed``, modulo 2^(8 width)."""
    if width == WIDE:
        return data.view(_INT64).astype(np.int64, copy=False)
    number = len(data) // width
    whole = np.zeros(number, _INT64)
    whole.view(np.uint32)[::2] = data[: 4 * number].view(np.uint32)
    if width == NARROW:
        whole.view(np.uint16)[2::4] = data[4 * number :].view(np.uint16)
    return whole.astype(np.int64, copy=False)


def signed(codes: Codes, width: int) -> Codes:
    """Return codes modulo 2^(8 width) as numbers around zero, in place."""
    codes <<= 64 - 8 * width
    codes >>= 64 - 8 * width  # which keeps the sign
    return codes


def mean_of(codes: Codes, scale: int, count: int, like: Tensor) -> Tensor:
    """Return the mean of ``count`` sites from the sum of their codes, in the form of ``like``."""
    values = codes * (2.0**-scale / count)
    return torch.from_numpy(values).to(like.dtype).view(like.shape)


def _room(number: int, width: int) -> int:
    """Return the binary digits of a code's magnitude; a sum has one for the sign, one spare."""
    return 8 * width - 2 - bits_of(number)
