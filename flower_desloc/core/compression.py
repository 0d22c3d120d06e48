"""Lossy formats of streams in messages: bf16, and blockwise int8, int4, int2 with error feedback.

A tensor is cut into blocks, each quantised with a scale of its own (Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", 2022). Parameters are sent as their difference to the last
common parameters. The sender of a signed stream keeps the quantisation residual and adds it to what
it sends next (error feedback: Seide et al., 2014; Karimireddy et al., 2019), so that errors do not
accumulate. Second moments are quantised by their logarithm: they have no sign, span many orders of
magnitude within a block, and are divisors, so a small entry must never become zero. In ``int2`` a
signed value keeps its sign and one of two magnitudes of its block, which are the best in the mean
square (Lloyd, 1982): the larger is what few values of a block have.

Only messages are compressed; both ends hold streams in the model's own type.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flower_desloc.core.formats import EXACT, Format
from flower_desloc.core.kinds import Kind
from flower_desloc.core.types import Stream

_BITS = {"int8": 8, "int4": 4, "int2": 2}
_BLOCK = {"int8": 256, "int4": 64, "int2": 64}
"""Values that share a scale of two bytes or, quantised by logarithm or in int2, two of them."""
_LLOYD = 4
"""Rounds in which the two magnitudes of a block are sought."""
_AT_ONCE = 1 << 16
"""Values per thread that stay in a processor's cache while they are quantised."""
_LEAST = torch.finfo(torch.float32).tiny
"""The smallest normal number; some devices have no smaller ones."""


@dataclass(frozen=True)
class EncodedStream:
    """A compressed stream, as its sender sees it."""

    coded: dict[str, Tensor]
    """Bytes to send, for each tensor of the stream."""
    received: dict[str, Tensor]
    """The stream as the receiver decodes it."""
    residual: dict[str, Tensor]
    """Quantisation error to pass to the next ``encode_stream``; empty if not signed."""


def encode_stream(
    kind: Kind,
    stream: Stream,
    format_: Format,
    *,
    reference: Stream | None = None,
    residual: Stream | None = None,
) -> EncodedStream:
    """Compress a stream.

    Args:
        kind: What the stream holds, which decides whether it is signed.
        stream: Its tensors.
        format_: How they are quantised.
        reference: Only for parameters: what the receiver already has, bit for bit; the difference
            to it is sent.
        residual: Quantisation error of the last time this sender sent this stream.

    """
    coded, received, rest = {}, {}, {}
    signed = kind.is_signed
    for key, tensor in stream.items():
        flat = tensor.detach().cpu().reshape(-1)
        base = None if reference is None else reference[key].reshape(-1)
        error = residual[key].reshape(-1) if residual else None
        wide = _wide(tensor.dtype)
        arrives, lost = torch.empty_like(flat), torch.empty_like(flat, dtype=wide)
        codes, scales = [], []
        for part in _parts(len(flat)):
            value = flat[part].to(wide)
            if base is not None:
                value = value - base[part]
            if error is not None:
                value = value + error[part]
            own = _quantise(value, format_, signed=signed)
            decoded = _dequantise(*own, len(value), format_, signed=signed).to(wide)
            torch.sub(value, decoded, out=lost[part])
            arrives[part] = decoded if base is None else decoded.add_(base[part])
            codes.append(own[0])
            scales.append(own[1])
        coded[key] = torch.cat([*codes, _bytes(torch.cat(scales, dim=1))])
        received[key] = arrives.view(tensor.shape)
        if signed:
            rest[key] = lost.view(tensor.shape)
    return EncodedStream(coded, received, rest)


def decode_stream(
    name: str,
    coded: Stream,
    format_: Format,
    like: Stream,
    *,
    kind: Kind,
    reference: Stream | None = None,
) -> dict[str, Tensor]:
    """Return the stream that ``encode_stream`` compressed; ``like`` has its shapes and types.

    Raises ``ValueError`` when the number of bytes does not fit the shape, or a name is unknown.
    """
    stream = {}
    for key, data in coded.items():
        if key not in like:
            raise ValueError(f"stream {name!r} has {key!r}, which the model does not have")
        base = None if reference is None else reference[key]
        try:
            stream[key] = _decode(data, format_, like[key], base, signed=kind.is_signed)
        except ValueError as error:
            raise ValueError(f"{key!r} of stream {name!r}: {error}") from error
    return stream


def coded_bytes(format_: Format, tensor: Tensor, *, signed: bool = True) -> int:
    """Return the bytes of a tensor in a message."""
    if format_ == EXACT:
        return tensor.nbytes
    if format_ == "bf16":
        return 2 * tensor.numel()
    blocks = math.ceil(tensor.numel() / _BLOCK[format_])
    return _bytes_of_codes(format_, tensor.numel()) + 2 * blocks * _scales(format_, signed=signed)


def _decode(
    data: Tensor, format_: Format, like: Tensor, base: Tensor | None, *, signed: bool
) -> Tensor:
    """Return a tensor in ``like``'s shape and type, on the CPU.

    Raises ``ValueError`` when the number of bytes in ``data`` does not fit the shape.
    """
    expected = coded_bytes(format_, like, signed=signed)
    if data.dtype != torch.uint8 or data.dim() != 1 or len(data) != expected:
        raise ValueError(
            f"expected {expected} bytes of {format_}, "
            f"got {tuple(data.shape)} values of {data.dtype}"
        )
    count, wide = like.numel(), _wide(like.dtype)
    flat = torch.empty(count, dtype=like.dtype)
    if count == 0:
        return flat.view(like.shape)
    base = None if base is None else base.reshape(-1)
    ends = data[_bytes_of_codes(format_, count) :].clone().view(torch.bfloat16)
    scales = ends.view(max(_scales(format_, signed=signed), 1), -1)
    for part in _parts(count):
        first, end = (_bytes_of_codes(format_, at) for at in (part.start, part.stop))
        own = scales
        if format_ != "bf16":
            block = _BLOCK[format_]
            own = scales[:, part.start // block : math.ceil(part.stop / block)]
        number = part.stop - part.start
        decoded = _dequantise(data[first:end], own, number, format_, signed=signed).to(wide)
        flat[part] = decoded if base is None else decoded.add_(base[part])
    return flat.view(like.shape)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type for differences and residuals of half-precision tensors, or ``dtype``."""
    return torch.promote_types(dtype, torch.float32)


def _parts(count: int) -> list[slice]:
    """Return slices of whole blocks, small enough for the processor's cache."""
    size = _AT_ONCE * torch.get_num_threads()
    return [slice(at, min(at + size, count)) for at in range(0, max(count, 1), size)]


def _bytes_of_codes(format_: Format, count: int) -> int:
    return 2 * count if format_ == "bf16" else math.ceil(count * _BITS[format_] / 8)


def _scales(format_: Format, *, signed: bool) -> int:
    """Return the number of scales of a block."""
    if format_ == "bf16":
        return 0
    return 1 if signed and format_ != "int2" else 2


def _quantise(value: Tensor, format_: Format, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return a finite vector's packed codes, 1-D uint8, and its blocks' scales in bfloat16."""
    flat = value.float()
    if format_ == "bf16":
        return _bytes(flat.bfloat16()), flat.new_empty(1, 0).bfloat16()
    blocks, bits = _blocks(flat, _BLOCK[format_]), _BITS[format_]
    if not signed:
        codes, scales = _quantise_log(blocks, bits)
    elif format_ == "int2":
        codes, scales = _quantise_by_sign(blocks, len(flat))
    else:
        codes, scales = _quantise_evenly(blocks, bits)
    return _pack(codes.reshape(-1)[: len(flat)], bits), scales


def _dequantise(
    packed: Tensor, scales: Tensor, count: int, format_: Format, *, signed: bool
) -> Tensor:
    """Return the ``count`` values that ``_quantise`` packed."""
    if format_ == "bf16":
        return packed.clone().view(torch.bfloat16).float()
    bits = _BITS[format_]
    codes, scales = _blocks(_unpack(packed, bits, count), _BLOCK[format_]), scales.float()
    if not signed:
        values = _dequantise_log(codes, scales, bits)
    elif format_ == "int2":
        values = _dequantise_by_sign(codes, scales)
    else:
        values = _dequantise_evenly(codes, scales, bits)
    return values.reshape(-1)[:count]


def _quantise_evenly(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    most = (1 << (bits - 1)) - 1
    scales = (blocks.abs().amax(dim=1) / most).bfloat16()
    # The scale is rounded first; where it was rounded down, the clamp's error is in the residual.
    steps = scales.float().clamp_min(_LEAST).unsqueeze(1)
    codes = (blocks / steps).round_().clamp_(-most, most).add_(most + 1).to(torch.uint8)
    return codes, scales.unsqueeze(0)


def _dequantise_evenly(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    middle = 1 << (bits - 1)
    return codes.float().sub_(middle).mul_(scales.view(-1, 1))


def _quantise_by_sign(blocks: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Quantise to the magnitude (bit 0: the larger) and the sign (bit 1: negative).

    The magnitudes are those of the first ``count`` values: the rest only fills the last block.
    """
    counts = blocks.new_full(blocks.shape[:1], blocks.shape[1])
    counts[-1:] -= blocks.numel() - count
    sizes = blocks.abs()
    scales = _two_magnitudes(sizes, counts).bfloat16()
    is_larger = _greater(sizes, scales.float().mean(dim=0).unsqueeze(1))
    is_negative = _greater(-blocks, 0)
    return is_negative.mul_(2).add_(is_larger).to(torch.uint8), scales


def _dequantise_by_sign(codes: Tensor, scales: Tensor) -> Tensor:
    small, large = scales.unsqueeze(2).unbind()
    is_large = (codes & 1).float()
    values = large * is_large
    values.add_(is_large.neg_().add_(1).mul_(small))
    return values.mul_((codes & 2).float().neg_().add_(1))


def _two_magnitudes(sizes: Tensor, count: Tensor) -> Tensor:
    """Return the two means, smaller first, between which the border of the sizes is half-way."""
    total = sizes.sum(dim=1)
    small = large = total / count
    for _ in range(_LLOYD):
        is_large = _greater(sizes, ((small + large) / 2).unsqueeze(1))
        number = is_large.sum(dim=1)
        sum_large = is_large.mul_(sizes).sum(dim=1)
        small = ((total - sum_large) / (count - number).clamp_min(1)).clamp_min(0)
        large = torch.where(number > 0, sum_large / number.clamp_min(1), small)
    return torch.stack([small, large])


def _quantise_log(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantise zero to 0, the rest to 1 .. 2^bits - 1, evenly spaced by logarithm in the block."""
    blocks = blocks.clamp_min(0)
    greatest = blocks.amax(dim=1).clamp_min(_LEAST)
    positive = _greater(blocks, 0)
    zeros_as_greatest = (1 - positive).mul_(greatest.unsqueeze(1)).add_(blocks)
    least = zeros_as_greatest.amin(dim=1).clamp_min(_LEAST)
    ends = torch.stack([_rounded_down(least), _rounded_up(greatest)])
    low, span = _ends(ends)
    part = blocks.clamp_min_(_LEAST).log_().sub_(low).div_(span.clamp_min(1e-6))
    codes = part.mul_(2**bits - 2).round_().clamp_(0, 2**bits - 2).add_(1)
    return codes.mul_(positive).to(torch.uint8), ends


def _dequantise_log(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    low, span = _ends(scales)
    codes = codes.float()
    positive = codes.clamp_max(1)
    return codes.sub_(1).div_(2**bits - 2).mul_(span).add_(low).exp_().mul_(positive)


def _greater(values: Tensor, border: Tensor | float) -> Tensor:
    """Return 1.0 where a value is above the border and 0.0 elsewhere.

    Arithmetic with these is several times as fast as ``torch.where`` and masks of bool.
    """
    is_greater = torch.empty_like(values)
    torch.gt(values, border, out=is_greater)
    return is_greater


def _ends(ends: Tensor) -> tuple[Tensor, Tensor]:
    low, high = ends.float().clamp_min(_LEAST).log()
    return low.unsqueeze(1), (high - low).clamp_min(0).unsqueeze(1)


def _rounded_down(positive: Tensor) -> Tensor:
    # The upper half of a float's bits is a bfloat16 towards zero.
    return (positive.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def _rounded_up(positive: Tensor) -> Tensor:
    bits = positive.view(torch.int32)
    return ((bits + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)


def _blocks(flat: Tensor, size: int) -> Tensor:
    if rest := -flat.numel() % size:
        flat = torch.nn.functional.pad(flat, (0, rest))
    return flat.view(-1, size)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes with the first of a byte in its lowest bits."""
    if bits == 8:
        return codes
    columns = _blocks(codes, 8 // bits)
    packed = columns[:, 0]
    for i in range(1, 8 // bits):
        packed = packed | columns[:, i] << i * bits
    return packed


def _unpack(data: Tensor, bits: int, count: int) -> Tensor:
    if bits == 8:
        return data
    columns = [data >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return torch.stack(columns, dim=1).view(-1)[:count]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
