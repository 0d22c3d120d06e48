"""Random numbers that cannot be predicted without the key.

A seeded generator of PyTorch or NumPy is none: the first has 32 bits of seed on a CPU, and neither
is meant to withstand an adversary.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray
from torch import Tensor

_CHUNK = 1 << 18
"""Values that are drawn at once."""
_GRID = 16
"""Binary digits of a noisy sum below those of the noise's deviation."""


def uniform(key: bytes, number: int) -> NDArray[np.float64]:
    """Return ``number`` values above 0 and at most 1, a function of the 32 bytes of ``key``."""
    drawn = list(_uniform(key, [number]))
    return drawn[0]


def with_noise(summed: Tensor, key: bytes, deviation: float) -> Tensor:
    """Return ``summed``, of float64, plus Gaussian noise, on a grid that is the same for all sums.

    The lowest bits of a sum of floats tell of its terms: with noise of float32, which records they
    are (Mironov 2012, "On significance of the least significant bits"). So what is below a 65,536th
    of the deviation is rounded off.
    """
    grid = 2.0 ** (math.floor(math.log2(deviation)) - _GRID)
    noisy = gaussian(key, summed).mul_(deviation).add_(summed)
    return noisy.div_(grid).round_().mul_(grid)  # by a power of two: exact


def gaussian(key: bytes, like: Tensor) -> Tensor:
    """Return standard normal values of float64, of the shape and device of ``like``.

    Each is half the sum of four: what the floating-point grid reveals of one is then of no use.
    Holohan and Braghin 2021, arXiv:2107.10138, section 5.1.
    """
    sizes = [min(_CHUNK, like.numel() - start) for start in range(0, like.numel(), _CHUNK)]
    parts = [_box_muller(each) for each in _uniform(key, [4 * size for size in sizes])]
    values = torch.from_numpy(np.concatenate([*parts, np.empty(0)]))
    return values.view(like.shape).to(like.device)


def _box_muller(uniforms: NDArray[np.float64]) -> NDArray[np.float64]:
    first, second, angle, other = uniforms.reshape(4, -1)
    total = np.zeros_like(first)
    for u, v in ((first, angle), (second, other)):
        total += np.sqrt(-2 * np.log(u)) * (np.cos(2 * math.pi * v) + np.sin(2 * math.pi * v))
    half: NDArray[np.float64] = total / 2
    return half


def _uniform(key: bytes, sizes: list[int]) -> Iterator[NDArray[np.float64]]:
    """Yield arrays of those sizes, one after the other from the stream cipher ChaCha20."""
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    for size in sizes:
        bits = np.frombuffer(stream.update(bytes(8 * size)), np.uint64) >> np.uint64(11)
        yield (bits + np.uint64(1)).astype(np.float64) * 2.0**-53
