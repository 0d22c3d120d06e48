"""The loss of a batch in parts, whose gradient needs the memory of one part."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def accumulated(losses: Iterable[Tensor], params: Sequence[Tensor]) -> Tensor:
    """Return the sum of ``losses``, holding one of their graphs at a time.

    Computes the gradients of ``params`` at once; ``backward()`` only adds them, and gives nothing
    else a gradient.
    """
    trained = [p for p in params if p.requires_grad]
    total: Tensor = _Accumulated.apply(losses, *trained)  # type: ignore[no-untyped-call]  # PyTorch's
    return total


class _Accumulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses: Iterable[Tensor], *params: Tensor) -> Tensor:
        kept = [p.grad for p in params]
        for p in params:
            p.grad = None
        values = []
        with torch.enable_grad():
            for loss in losses:
                loss.backward()
                values.append(loss.detach())
        ctx.gradients = [p.grad for p in params]
        for p, gradient in zip(params, kept, strict=True):
            p.grad = gradient
        return torch.stack(values).sum()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        # Moved, not copied: as with any graph, a second backward() fails.
        gradients, ctx.gradients = ctx.gradients, None
        torch._foreach_mul_([g for g in gradients if g is not None], outer[0])
        return None, *gradients
