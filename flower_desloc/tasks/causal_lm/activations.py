"""How large a model's activations are: growth is an early sign of an unstable training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class ActivationNorm:
    """Sum over positions of the Euclidean norm of the residual stream after the last block."""

    def __init__(self) -> None:
        self.total = 0.0

    def add(self, block: nn.Module, inputs: Any, output: Any) -> None:
        """Count one forward pass of the last block; a forward hook."""
        del block, inputs
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        self.total += float(torch.linalg.vector_norm(hidden.float(), dim=-1).sum())


@contextmanager
def measured(model: nn.Module) -> Iterator[ActivationNorm]:
    """Measure the activations of ``model`` while inside; 0 where it has no list of blocks."""
    norm = ActivationNorm()
    blocks = next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)), None)
    if blocks is None:
        yield norm
        return
    handle = blocks[-1].register_forward_hook(norm.add)
    try:
        yield norm
    finally:
        handle.remove()
