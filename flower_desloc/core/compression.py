"""Formats in which a stream travels with fewer bits than it has, and what makes up for the loss.

A tensor is cut into blocks, each coded with a scale of its own (Dettmers et al., "8-bit Optimizers
via Block-wise Quantization", 2022). Parameters travel as their difference to the last common ones.
What the code could not say of a stream with a sign is kept by the sender and added to what it sends
next (error feedback: Seide et al., 2014; Karimireddy et al., 2019), so that the sum over time is
right. Second moments are coded by their logarithm: they have no sign, span many orders of
magnitude within a block, and divide: a small entry may never become zero.

Streams at either end stay as they are, fp32 or whatever the model has; only what travels is coded.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flower_desloc.core.averaging import Stream
from flower_desloc.core.formats import EXACT, NEVER_NEGATIVE, Format, lossy

_BITS = {"int8": 8, "int4": 4}
_BLOCK = {"int8": 256, "int4": 64}
"""Values that share a scale of two bytes, or, coded by logarithm, two ends of two bytes."""


@dataclass(frozen=True)
class Sent:
    """A stream on its way."""

    coded: dict[str, Tensor]
    """What travels: a tensor of bytes for each of the stream's."""
    received: dict[str, Tensor]
    """What becomes of it at the other end."""
    residual: dict[str, Tensor]
    """What was not said, to be given to the next :func:`send`; empty for a stream without."""


def send(
    name: str,
    stream: Stream,
    format_: Format,
    *,
    reference: Stream | None = None,
    residual: Stream | None = None,
) -> Sent:
    """Code a stream that is to be ``stream`` at the other end, where ``reference`` is known.

    ``reference`` is for parameters, and must be what the other end has; ``residual`` is that of
    the last time this sender sent this stream.
    """
    coded, received, rest = {}, {}, {}
    signed = _is_signed(name)
    for key, tensor in stream.items():
        value = tensor.detach().cpu()  # where codes are made, and all that is held beside
        if reference is not None:
            value = value - reference[key]
        if residual:
            value = value + residual[key]
        coded[key] = encode(value, format_, signed=signed)
        heard = decode(coded[key], format_, value, signed=signed)
        if signed:
            rest[key] = value - heard
        received[key] = heard if reference is None else reference[key] + heard
    return Sent(coded, received, rest)


def receive(
    name: str,
    coded: Stream,
    format_: Format,
    like: Stream,
    *,
    reference: Stream | None = None,
) -> dict[str, Tensor]:
    """Return what :func:`send` says is received; ``like`` gives shapes and types.

    Raises ``ValueError`` where the bytes are not as many as the shape needs, or a name is unknown.
    """
    stream = {}
    for key, data in coded.items():
        if key not in like:
            raise ValueError(f"stream {name!r} has {key!r}, which the model does not have")
        try:
            heard = decode(data, format_, like[key], signed=_is_signed(name))
        except ValueError as error:
            raise ValueError(f"{key!r} of stream {name!r}: {error}") from error
        stream[key] = heard if reference is None else reference[key] + heard
    return stream


def coded_bytes(format_: Format, tensor: Tensor, *, signed: bool = True) -> int:
    """Return how many bytes a tensor of this size takes on its way."""
    if format_ == EXACT:
        return tensor.nbytes
    if format_ == "bf16":
        return 2 * tensor.numel()
    blocks = math.ceil(tensor.numel() / _BLOCK[format_])
    return _bytes_of_codes(format_, tensor.numel()) + blocks * (2 if signed else 4)


def wire_bytes(streams: Mapping[str, Stream], formats: Mapping[str, str]) -> dict[str, int]:
    """Return the bytes that each stream takes on its way."""
    coded = lossy(formats)
    return {
        name: sum(
            coded_bytes(coded.get(name, EXACT), tensor, signed=_is_signed(name))
            for tensor in stream.values()
        )
        for name, stream in streams.items()
    }


def encode(tensor: Tensor, format_: Format, *, signed: bool) -> Tensor:
    """Return the bytes of a finite tensor, 1-D of type uint8: codes first, then scales."""
    flat = tensor.detach().reshape(-1).to("cpu", torch.float32)
    if format_ == "bf16":
        return _bytes(flat.bfloat16())
    blocks = _blocks(flat, _BLOCK[format_])
    codes, scales = (_linear if signed else _logarithmic)(blocks, _BITS[format_])
    return torch.cat([_packed(codes.reshape(-1)[: flat.numel()], format_), _bytes(scales)])


def decode(data: Tensor, format_: Format, like: Tensor, *, signed: bool) -> Tensor:
    """Return what :func:`encode` made bytes of, in the shape and type of ``like``, on the CPU.

    Raises ``ValueError`` unless ``data`` are as many bytes as that takes.
    """
    expected = coded_bytes(format_, like, signed=signed)
    if data.dtype != torch.uint8 or data.dim() != 1 or len(data) != expected:
        raise ValueError(
            f"{tuple(data.shape)} values of {data.dtype} are not {expected} bytes of {format_}"
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
        codes = _blocks(_unpacked(data[:split], format_, count), block)
        back = _from_linear if signed else _from_logarithmic
        flat = back(codes, scales, _BITS[format_]).reshape(-1)[:count]
    return flat.reshape(like.shape).to(like.dtype)


def _is_signed(name: str) -> bool:
    return name not in NEVER_NEGATIVE


def _bytes_of_codes(format_: Format, count: int) -> int:
    return math.ceil(count * _BITS[format_] / 8)


def _linear(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    most = (1 << (bits - 1)) - 1
    scales = (blocks.abs().amax(dim=1) / most).bfloat16()
    # By the scale as it travels. Where it was rounded down the ends are cut, which is residual.
    steps = scales.float().clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
    return (blocks / steps).round_().clamp_(-most, most).add_(most + 1).to(torch.uint8), scales


def _from_linear(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    middle = 1 << (bits - 1)
    return (codes.float() - middle) * scales.unsqueeze(1)


def _logarithmic(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Code zero as 0, the rest as 1 to 2^bits - 1, evenly by logarithm from least to greatest."""
    positive = blocks > 0
    greatest = blocks.amax(dim=1).clamp_min(_LEAST)
    least = torch.where(positive, blocks, greatest.unsqueeze(1)).amin(dim=1).clamp_min(_LEAST)
    ends = torch.stack([_rounded_down(least), _rounded_up(greatest)])
    low, span = _ends(ends)
    part = (blocks.clamp_min(_LEAST).log() - low) / span.clamp_min(1e-6)
    codes = (part * (2**bits - 2)).round_().clamp_(0, 2**bits - 2).add_(1)
    return torch.where(positive, codes, 0.0).to(torch.uint8), ends


def _from_logarithmic(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    low, span = _ends(scales.view(2, -1))
    values = (low + (codes.float() - 1) / (2**bits - 2) * span).exp()
    return torch.where(codes > 0, values, 0.0)


def _ends(ends: Tensor) -> tuple[Tensor, Tensor]:
    low, high = ends.float().clamp_min(_LEAST).log()
    return low.unsqueeze(1), (high - low).clamp_min(0).unsqueeze(1)


_LEAST = 2.0**-126  # of the normal numbers, which any device has


def _rounded_down(positive: Tensor) -> Tensor:
    # The upper half of a float's bits is a bfloat16 towards zero.
    return (positive.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def _rounded_up(positive: Tensor) -> Tensor:
    bits = positive.view(torch.int32)
    return ((bits + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)


def _blocks(flat: Tensor, size: int) -> Tensor:
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % size))
    return padded.view(-1, size)


def _packed(codes: Tensor, format_: Format) -> Tensor:
    if format_ == "int8":
        return codes
    low, high = _blocks(codes, 2).unbind(dim=1)
    return torch.bitwise_or(low, high << 4)


def _unpacked(data: Tensor, format_: Format, count: int) -> Tensor:
    if format_ == "int8":
        return data
    return torch.stack([data & 15, data >> 4], dim=1).view(-1)[:count]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
