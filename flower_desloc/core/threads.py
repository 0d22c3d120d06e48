"""How many threads PyTorch computes with."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """Compute with so many threads; some sums differ in the last bits from those of others."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
