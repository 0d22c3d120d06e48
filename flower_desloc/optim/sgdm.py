"""SGD with momentum as the paper writes it (Algorithm 5, DES-LOC-SGDM)."""

from typing import Final

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from flower_desloc.core.kinds import Kind
from flower_desloc.core.states import State
from flower_desloc.optim._foreach import ForeachOptimizer, add_scaled_
from flower_desloc.optim.description import Description


def sgdm_step(
    xs: list[Tensor],
    gs: list[Tensor],
    us: list[Tensor],
    *,
    lr: float | Tensor,
    momentum: float,
    weight_decay: float,
) -> None:
    """One SGDM step, in place; the three lists have equal shapes.

    u <- beta u + (1 - beta) (g + decay x)
    x <- x - lr u
    """
    if weight_decay:
        gs = list(torch._foreach_add(gs, xs, alpha=weight_decay))
    torch._foreach_mul_(us, momentum)
    torch._foreach_add_(us, gs, alpha=1 - momentum)
    add_scaled_(xs, us, -lr)


class SGDM(ForeachOptimizer):
    """SGD with momentum, stream ``momentum_buffer`` (u).

    Differs from ``torch.optim.SGD``: the gradient is damped by ``1 - momentum`` from the first
    step on, and u starts at zero. ``torch.optim.SGD(dampening=momentum)`` takes its first
    gradient undamped.

    Raises ``ValueError`` for a negative ``lr`` or ``weight_decay``, or a momentum outside [0, 1).
    """

    states = (
        State("momentum_buffer", Kind.FIRST_MOMENT, decay=lambda group: float(group["momentum"])),
    )
    update = staticmethod(sgdm_step)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        *,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})


DESCRIPTION: Final = Description(
    name="sgdm",
    make=SGDM,
    settings={"momentum": 0.9, "weight_decay": 0.0},
    states=SGDM.states,
    weight_decay="gradient",
)
