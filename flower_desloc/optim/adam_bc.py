"""Adam for private gradients: the noise's part of the second moment is taken off."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from flower_desloc.core.states import ADAM, State
from flower_desloc.optim._foreach import ForeachOptimizer, add_scaled_, update_moments_


def adam_bc_step(
    xs: list[Tensor],
    gs: list[Tensor],
    us: list[Tensor],
    vs: list[Tensor],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    noise_std: float,
    corrections: tuple[float, float],
) -> None:
    """One step, in place; the four lists have equal shapes.

    u <- beta1 u + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2
    x <- x - lr u' / sqrt(max(v' - noise_std^2, eps^2)),   u' and v' without the bias of the start
    """
    update_moments_(us, vs, gs, betas)
    denominators = list(torch._foreach_div(vs, corrections[1]))
    torch._foreach_sub_(denominators, noise_std**2)
    torch._foreach_clamp_min_(denominators, eps**2)
    torch._foreach_sqrt_(denominators)
    torch._foreach_mul_(denominators, corrections[0])
    add_scaled_(xs, list(torch._foreach_div(us, denominators)), -lr)


class AdamBC(ForeachOptimizer):
    """Adam without the variance of the noise in v (Tang et al., 2023, arXiv:2312.14334).

    Adam divides by the root of v, to which noise of the standard deviation ``noise_std`` adds its
    square in every coordinate, so that with much noise it is SGD. A client with differential
    privacy sets ``noise_std``, in each parameter group, before each step. Denominators below
    ``eps`` become ``eps``: larger than that of Adam, since v less its mean noise may be anything
    around zero. With ``noise_std`` 0 it is Adam but for where ``eps`` enters.

    An average of v has the mean of the sites' noise: it is that of each where all have one budget
    and equally many records.

    Raises ``ValueError`` for a negative ``lr``, an ``eps`` that is not positive, or a beta outside
    [0, 1).
    """

    states: ClassVar[tuple[State, ...]] = ADAM
    update = staticmethod(adam_bc_step)
    varying = ("lr", "corrections")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-3,
        *,
        noise_std: float = 0.0,
    ) -> None:
        if not eps > 0:
            raise ValueError(f"eps must be positive, got {eps}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "noise_std": noise_std})

    def arguments(self, group: dict[str, Any], step: int) -> dict[str, Any]:
        """Return the keyword arguments of ``adam_bc_step`` after ``step`` completed steps."""
        corrections = tuple(1 - beta ** (step + 1) for beta in group["betas"])
        return super().arguments(group, step) | {"corrections": corrections}
