"""QHAdam: Adam whose update mixes the gradient with a slow momentum (Ma and Yarats, ICLR 2019).

With beta1 close to 1, an average of u is still worth something when the next one comes, however
rare averages are; the gradient's own share keeps the update up to date. MT-DAO (Iacob et al., 2025)
uses this form for local steps.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from flower_desloc.optim._foreach import TwoMoments, add_scaled_


def qhadam_step(
    xs: list[Tensor],
    gs: list[Tensor],
    us: list[Tensor],
    vs: list[Tensor],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    mix: float,
    weight_decay: float,
    decouple: bool,
    bias1: float | Tensor,
    bias2: float | Tensor,
) -> None:
    """One QHAdam step, in place; the four lists have equal shapes.

    u <- beta1 u + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2
    x <- x - lr (mix u / bias1 + (1 - mix) g) / (sqrt(v / bias2) + eps)      mix = 1: Adam

    ``bias1`` and ``bias2`` are 1 - beta^t. Weight decay comes before it: g <- g + decay x, or with
    ``decouple`` x <- x - lr decay x.
    """
    beta1, beta2 = betas
    if weight_decay and decouple:
        torch._foreach_mul_(xs, 1 - lr * weight_decay)
    elif weight_decay:
        gs = list(torch._foreach_add(gs, xs, alpha=weight_decay))
    torch._foreach_lerp_(us, gs, 1 - beta1)
    torch._foreach_mul_(vs, beta2)
    torch._foreach_addcmul_(vs, gs, gs, 1 - beta2)
    directions = torch._foreach_mul(us, mix)
    torch._foreach_div_(directions, bias1)
    torch._foreach_add_(directions, gs, alpha=1 - mix)
    denominators = torch._foreach_sqrt(vs)
    torch._foreach_div_(denominators, bias2**0.5)
    torch._foreach_add_(denominators, eps)
    torch._foreach_div_(directions, denominators)
    add_scaled_(xs, list(directions), -lr)


class QHAdam(TwoMoments):
    """Quasi-hyperbolic Adam, streams ``exp_avg`` (u) and ``exp_avg_sq`` (v).

    ``mix`` is the share of u in the update. ``weight_decay`` is added to the gradient, or with
    ``decouple`` taken off the parameters as in AdamW.

    Raises ``ValueError`` for a negative ``lr``, ``eps`` or ``weight_decay``, a beta outside
    [0, 1), or a ``mix`` outside [0, 1].
    """

    update = staticmethod(qhadam_step)
    varying = ("lr", "bias1", "bias2")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.999, 0.999),
        eps: float = 1e-8,
        *,
        mix: float = 0.7,
        weight_decay: float = 0.0,
        decouple: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "mix": mix,
            "weight_decay": weight_decay,
            "decouple": decouple,
        }
        super().__init__(params, defaults)

    def arguments(self, group: dict[str, Any], step: int) -> dict[str, Any]:
        """Return the keyword arguments of ``qhadam_step`` after ``step`` completed steps."""
        bias1, bias2 = (1 - beta ** (step + 1) for beta in group["betas"])
        return super().arguments(group, step) | {"bias1": bias1, "bias2": bias2}
