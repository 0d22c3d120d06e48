"""ADOPT: Adam that converges for any beta_2 (Taniguchi et al., NeurIPS 2024).

The semantics are those of the authors' code, which the paper's experiments use: the first step
only seeds v, the denominator is clamped, and the normalised gradient is clipped to
``step ** 0.25``. DES-LOC-ADOPT is Algorithm 4 of the paper.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from flower_desloc.core.kinds import Kind
from flower_desloc.core.states import State, beta1, beta2, squared_gradient
from flower_desloc.optim._foreach import ForeachOptimizer, add_scaled_
from flower_desloc.optim.description import Description


def fourth_root(step: int) -> float:
    """Return the clip of the authors' code after ``step`` completed steps."""
    return float(step**0.25)


def adopt_step(
    xs: list[Tensor],
    gs: list[Tensor],
    us: list[Tensor],
    vs: list[Tensor],
    *,
    first: bool,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    clip: float | Tensor | None,
    weight_decay: float,
    decouple: bool,
) -> None:
    """One ADOPT step, in place; the four lists have equal shapes.

    The ``first`` step spends one batch on the scale: v <- g^2, and x stays. Every other:

    n <- clip(g / max(sqrt(v), eps), +-clip)
    u <- beta1 u + (1 - beta1) n
    x <- x - lr u
    v <- beta2 v + (1 - beta2) g^2

    Weight decay comes before it: g <- g + decay x, or with ``decouple`` x <- x - lr decay x.
    """
    beta1, beta2 = betas
    if weight_decay and not decouple:
        gs = list(torch._foreach_add(gs, xs, alpha=weight_decay))
    if first:
        torch._foreach_addcmul_(vs, gs, gs)
        return
    if weight_decay and decouple:
        torch._foreach_mul_(xs, 1 - lr * weight_decay)
    denominators = torch._foreach_sqrt(vs)
    torch._foreach_clamp_min_(denominators, eps)
    ns = torch._foreach_div(gs, denominators)
    if clip is not None:
        # A tensor of one value counts as a number, which PyTorch's types do not know.
        torch._foreach_clamp_min_(ns, [-clip] * len(ns))  # type: ignore[list-item]
        torch._foreach_clamp_max_(ns, [clip] * len(ns))  # type: ignore[list-item]
    torch._foreach_lerp_(us, ns, 1 - beta1)
    add_scaled_(xs, us, -lr)
    torch._foreach_mul_(vs, beta2)
    torch._foreach_addcmul_(vs, gs, gs, 1 - beta2)


class ADOPT(ForeachOptimizer):
    """ADOPT with streams ``exp_avg`` (u) and ``exp_avg_sq`` (v).

    ``clip_lambda`` gives the bound of the normalised gradient after ``step`` completed steps;
    ``None`` is ADOPT as first published. ``weight_decay`` is added to the gradient, or with
    ``decouple`` taken off the parameters as in AdamW.

    Raises ``ValueError`` for a negative ``lr``, ``eps`` or ``weight_decay``, or a beta outside
    [0, 1).
    """

    states = (
        # Of g / sqrt(v), clipped at step^(1/4) for gradients of any size.
        State("exp_avg", Kind.FIRST_MOMENT, beta1, ceiling=fourth_root),
        State("exp_avg_sq", Kind.SECOND_MOMENT, beta2, squared_gradient),
    )
    update = staticmethod(adopt_step)
    varying = ("lr", "clip")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.9999),
        eps: float = 1e-6,
        *,
        clip_lambda: Callable[[int], float] | None = fourth_root,
        weight_decay: float = 0.0,
        decouple: bool = False,
    ) -> None:
        # The clip is not a hyperparameter of a group: a function has no place in a state dict.
        self._clip_lambda = clip_lambda
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decouple": decouple,
        }
        super().__init__(params, defaults)

    def arguments(self, group: dict[str, Any], step: int) -> dict[str, Any]:
        """Return the keyword arguments of ``adopt_step`` after ``step`` completed steps."""
        clip = None if self._clip_lambda is None else self._clip_lambda(step)
        return super().arguments(group, step) | {"first": step == 0, "clip": clip}


DESCRIPTION: Final = Description(
    name="adopt",
    make=partial(ADOPT, decouple=True),
    settings={"betas": (0.95, 0.9999), "eps": 1e-6, "weight_decay": 0.0},
    states=ADOPT.states,
    weight_decay="decoupled",
    family="ADOPT",
)
