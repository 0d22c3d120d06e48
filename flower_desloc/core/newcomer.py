"""Optimizer states of a worker that starts at a later step, before they were averaged.

The other workers' second moments have grown since their first step, a newcomer's would be zero: it
would divide the federation's first moment by almost nothing. So it seeds its second moment with its
own first gradient.
"""

from collections.abc import Collection, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer, RAdam

from flower_desloc.core.types import Stream


@runtime_checkable
class SeedsStates(Protocol):
    """An optimizer some of whose states must not be zero where a worker starts at a later step."""

    seeded: Collection[str]
    """Names of the states that can be seeded."""

    def seed_states(self, names: Collection[str]) -> None:
        """Set the named states from the present gradients, as the first step would."""


def seeded_by(optimizer: Optimizer) -> Collection[str]:
    """Return the states that ``seed_states`` can set for this optimizer."""
    if isinstance(optimizer, SeedsStates):
        return optimizer.seeded
    return ("exp_avg_sq",) if isinstance(optimizer, (Adam, RAdam)) else ()


def needs_seed(optimizer: Optimizer, states: Mapping[str, Stream]) -> list[str]:
    """Return those of ``states``, the optimizer's streams, that are zero and must not be."""
    return [
        name
        for name in seeded_by(optimizer)
        if not any(tensor.any() for tensor in states[name].values())
    ]


def seed_states(optimizer: Optimizer, names: Collection[str]) -> None:
    """Set the named states from the present gradients: PyTorch's Adam's ``exp_avg_sq`` to g^2."""
    if isinstance(optimizer, SeedsStates):
        optimizer.seed_states(names)
        return
    assert set(names) <= set(seeded_by(optimizer))
    for group in optimizer.param_groups:
        decoupled = isinstance(optimizer, AdamW) or group.get("decoupled_weight_decay", False)
        decay = 0.0 if decoupled else group["weight_decay"]
        sign = -1 if group["maximize"] else 1
        for p in group["params"]:
            square_gradient(p, optimizer.state[p], decay, sign)


@torch.no_grad()
def square_gradient(p: Tensor, state: Mapping[str, Tensor], decay: float, sign: int = 1) -> None:
    """Set ``exp_avg_sq`` to the square of the gradient with weight decay; without one, leave it."""
    if p.grad is not None:
        state["exp_avg_sq"].copy_((sign * p.grad).add(p, alpha=decay).square())
