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
_AT_ONCE = 2048
"""Blocks that fit into a processor's cache."""
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
        value = tensor.detach().to("cpu", _wide(tensor.dtype))
        if reference is not None:
            value = value - reference[key]
        if residual:
            value = value + residual[key]
        coded[key] = encode(value, format_, signed=signed)
        decoded = decode(coded[key], format_, value, signed=signed)
        if signed:
            rest[key] = value - decoded
        received[key] = _added(reference, key, decoded).to(tensor.dtype)
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
        try:
            wide = torch.empty_like(like[key], dtype=_wide(like[key].dtype), device="meta")
            decoded = decode(data, format_, wide, signed=kind.is_signed)
        except ValueError as error:
            raise ValueError(f"{key!r} of stream {name!r}: {error}") from error
        stream[key] = _added(reference, key, decoded).to(like[key].dtype)
    return stream


def coded_bytes(format_: Format, tensor: Tensor, *, signed: bool = True) -> int:
    """Return the bytes of a tensor in a message."""
    if format_ == EXACT:
        return tensor.nbytes
    if format_ == "bf16":
        return 2 * tensor.numel()
    blocks = math.ceil(tensor.numel() / _BLOCK[format_])
    has_one_scale = signed and format_ != "int2"
    return _bytes_of_codes(format_, tensor.numel()) + blocks * (2 if has_one_scale else 4)


def encode(tensor: Tensor, format_: Format, *, signed: bool) -> Tensor:
    """Quantise a finite tensor; return 1-D uint8: the codes, then the scales."""
    flat = tensor.detach().reshape(-1).to("cpu", torch.float32)
    if format_ == "bf16":
        return _bytes(flat.bfloat16())
    blocks = _blocks(flat, _BLOCK[format_])
    if signed and format_ == "int2":
        codes, scales = _quantise_by_sign(blocks, flat.numel())
    else:
        codes, scales = (_quantise if signed else _quantise_log)(blocks, _BITS[format_])
    return torch.cat([_pack(codes.reshape(-1)[: flat.numel()], format_), _bytes(scales)])


def decode(data: Tensor, format_: Format, like: Tensor, *, signed: bool) -> Tensor:
    """Return the tensor that ``encode`` quantised, in ``like``'s shape and type, on the CPU.

    Raises ``ValueError`` when the number of bytes in ``data`` does not fit the shape.
    """
    expected = coded_bytes(format_, like, signed=signed)
    if data.dtype != torch.uint8 or data.dim() != 1 or len(data) != expected:
        raise ValueError(
            f"expected {expected} bytes of {format_}, "
            f"got {tuple(data.shape)} values of {data.dtype}"
        )
    count = like.numel()
    if count == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    if format_ == "bf16":
        flat = data.clone().view(torch.bfloat16).float()
    else:
        block = _BLOCK[format_]
        split = _bytes_of_codes(format_, count)
        scales = data[split:].clone().view(torch.bfloat16).float()
        codes = _blocks(_unpack(data[:split], format_, count), block)
        if signed and format_ == "int2":
            values = _dequantise_by_sign(codes, scales)
        else:
            values = (_dequantise if signed else _dequantise_log)(codes, scales, _BITS[format_])
        flat = values.reshape(-1)[:count]
    return flat.reshape(like.shape).to(like.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type for differences and residuals of half-precision tensors, or ``dtype``."""
    return torch.promote_types(dtype, torch.float32)


def _added(reference: Stream | None, key: str, decoded: Tensor) -> Tensor:
    return decoded if reference is None else reference[key] + decoded


def _bytes_of_codes(format_: Format, count: int) -> int:
    return math.ceil(count * _BITS[format_] / 8)


def _quantise(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    most = (1 << (bits - 1)) - 1
    scales = (blocks.abs().amax(dim=1) / most).bfloat16()
    # The scale is rounded first; where it was rounded down, the clamp's error is in the residual.
    steps = scales.float().clamp_min(_LEAST).unsqueeze(1)
    return (blocks / steps).round_().clamp_(-most, most).add_(most + 1).to(torch.uint8), scales


def _dequantise(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    middle = 1 << (bits - 1)
    return (codes.float() - middle) * scales.unsqueeze(1)


def _quantise_by_sign(blocks: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Quantise to the magnitude (bit 0: the larger) and the sign (bit 1: negative).

    The magnitudes are those of the first ``count`` values: the rest only fills the last block.
    """
    counts = blocks.new_full(blocks.shape[:1], blocks.shape[1])
    counts[-1:] -= blocks.numel() - count
    codes, scales = [], []
    for part, number in zip(blocks.split(_AT_ONCE), counts.split(_AT_ONCE), strict=True):
        sizes = part.abs()
        own = _two_magnitudes(sizes, number).bfloat16()
        is_larger = sizes > own.float().mean(dim=0).unsqueeze(1)
        codes.append((part < 0).to(torch.uint8).mul_(2).add_(is_larger))
        scales.append(own)
    return torch.cat(codes), torch.cat(scales, dim=1)


def _dequantise_by_sign(codes: Tensor, scales: Tensor) -> Tensor:
    small, large = scales.view(2, -1).unsqueeze(2)
    return torch.where(codes & 1 > 0, large, small) * (1 - (codes & 2).float())


def _two_magnitudes(sizes: Tensor, count: Tensor) -> Tensor:
    """Return the two means, smaller first, between which the border of the sizes is half-way."""
    total = sizes.sum(dim=1)
    small = large = total / count
    for _ in range(_LLOYD):
        is_large = (sizes > ((small + large) / 2).unsqueeze(1)).float()
        number = is_large.sum(dim=1)
        sum_large = is_large.mul_(sizes).sum(dim=1)
        small = ((total - sum_large) / (count - number).clamp_min(1)).clamp_min(0)
        large = torch.where(number > 0, sum_large / number.clamp_min(1), small)
    return torch.stack([small, large])


def _quantise_log(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantise zero to 0, the rest to 1 .. 2^bits - 1, evenly spaced by logarithm in the block."""
    positive = blocks > 0
    greatest = blocks.amax(dim=1).clamp_min(_LEAST)
    least = torch.where(positive, blocks, greatest.unsqueeze(1)).amin(dim=1).clamp_min(_LEAST)
    ends = torch.stack([_rounded_down(least), _rounded_up(greatest)])
    low, span = _ends(ends)
    part = (blocks.clamp_min(_LEAST).log() - low) / span.clamp_min(1e-6)
    codes = (part * (2**bits - 2)).round_().clamp_(0, 2**bits - 2).add_(1)
    return torch.where(positive, codes, 0.0).to(torch.uint8), ends


def _dequantise_log(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    low, span = _ends(scales.view(2, -1))
    values = (low + (codes.float() - 1) / (2**bits - 2) * span).exp()
    return torch.where(codes > 0, values, 0.0)


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
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % size))
    return padded.view(-1, size)


def _pack(codes: Tensor, format_: Format) -> Tensor:
    """Return codes with the first of a byte in its lowest bits."""
    if (bits := _BITS[format_]) == 8:
        return codes
    columns = _blocks(codes, 8 // bits)
    packed = columns[:, 0]
    for i in range(1, 8 // bits):
        packed = packed | columns[:, i] << i * bits
    return packed


def _unpack(data: Tensor, format_: Format, count: int) -> Tensor:
    if (bits := _BITS[format_]) == 8:
        return data
    columns = [data >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return torch.stack(columns, dim=1).view(-1)[:count]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
