"""Batches as pure functions of tokens and a key."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_desloc.tasks.causal_lm.tokens import Tokens


@dataclass(frozen=True, eq=False)
class TextBatch:
    """Windows of text; every token but a window's first is predicted from those before it."""

    tokens: Tensor  # (batch, seq_len + 1), int64
    num_bytes: int
    """UTF-8 bytes the predicted tokens stand for."""


def random_batch(tokens: Tokens, *, seq_len: int, batch_size: int, key: Sequence[int]) -> TextBatch:
    """Return windows at random offsets, a pure function of the arguments.

    ``tokens`` has at least ``seq_len + 1``.
    """
    starts = np.random.default_rng(key).integers(len(tokens) - seq_len, size=batch_size)
    return _windows(tokens, starts, seq_len + 1)


def heldout_batches(
    tokens: Tokens, *, seq_len: int, batch_size: int, sequences: int
) -> list[TextBatch]:
    """Return at most ``sequences`` windows that do not overlap, spread evenly over ``tokens``.

    Text shorter than a window is one shorter window. ``tokens`` has at least two.
    """
    length = min(seq_len + 1, len(tokens))
    available = len(tokens) // length
    num = min(sequences, available)
    starts = np.arange(num) * available // num * length
    return [_windows(tokens, starts[i : i + batch_size], length) for i in range(0, num, batch_size)]


def _windows(tokens: Tokens, starts: NDArray[Any], length: int) -> TextBatch:
    index = starts[:, None] + np.arange(length)
    return TextBatch(
        torch.from_numpy(tokens.ids[index].astype(np.int64)),
        int(tokens.num_bytes[index[:, 1:]].sum()),
    )
