"""Adam in the paper's literal form (Algorithm 3, DES-LOC-Adam).

For training use PyTorch's Adam. This is the form that the theory analyses: no bias correction, and
the stability term inside the root.
"""

from typing import ClassVar, Final

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from flower_desloc.core.states import ADAM, State
from flower_desloc.optim._foreach import ForeachOptimizer, add_scaled_, update_moments_
from flower_desloc.optim.description import Description


def paper_adam_step(
    xs: list[Tensor],
    gs: list[Tensor],
    us: list[Tensor],
    vs: list[Tensor],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """One Adam step as printed, in place; the four lists have equal shapes.

    u <- beta1 u + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2
    x <- x - lr u / sqrt(v + eps^2)         eps is the paper's lambda
    """
    update_moments_(us, vs, gs, betas)
    denominators = torch._foreach_add(vs, eps**2)
    torch._foreach_sqrt_(denominators)
    add_scaled_(xs, list(torch._foreach_div(us, denominators)), -lr)


class PaperAdam(ForeachOptimizer):
    """Adam as the paper prints it, streams ``exp_avg`` (u) and ``exp_avg_sq`` (v).

    Raises ``ValueError`` for a negative ``lr``, a beta outside [0, 1), or an ``eps`` that is not
    positive: without it the first step of a parameter with no gradient is 0 / 0.
    """

    states: ClassVar[tuple[State, ...]] = ADAM
    update = staticmethod(paper_adam_step)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if not eps > 0:
            raise ValueError(f"eps must be positive, got {eps}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})


DESCRIPTION: Final = Description(
    name="paper_adam",
    make=PaperAdam,
    settings={"betas": (0.95, 0.95), "eps": 1e-8},
    states=PaperAdam.states,
    weight_decay="none",
)
