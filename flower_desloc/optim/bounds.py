"""Bound of a first moment by the worker's own second moment."""

import math

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from flower_desloc.core.averaging import Stream
from flower_desloc.optim.paper_adam import PaperAdam
from flower_desloc.optim.qhadam import QHAdam

FIRST, SECOND = "exp_avg", "exp_avg_sq"
_ADAMS = (Adam, AdamW, PaperAdam, QHAdam)


def moment_ratio(optimizer: Optimizer) -> float:
    """Return the greatest |u| / sqrt(v) that any gradients can give Adam.

    By Cauchy and Schwarz its square is (1 - beta1)^2 / ((1 - beta2) (1 - beta1^2 / beta2)); with
    equal betas of 0.95 it is 1. Averages of u and v together keep to it, by Jensen's inequality.

    Raises ``ValueError`` for an optimizer that does not divide u by sqrt(v), for beta1^2 >= beta2,
    where the ratio has no bound, and for parameter groups that differ in their betas.
    """
    if not isinstance(optimizer, _ADAMS):
        raise ValueError(
            f"{type(optimizer).__name__} does not divide {FIRST} by a root of {SECOND}"
        )
    found = {tuple(group["betas"]) for group in optimizer.param_groups}
    if len(found) > 1:
        raise ValueError(f"its parameter groups have different betas: {sorted(found)}")
    beta1, beta2 = (float(beta) for beta in found.pop())
    if beta1**2 >= beta2:
        raise ValueError(f"betas={[beta1, beta2]}: beta1^2 must be below beta2")
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))


@torch.no_grad()
def bounded(firsts: Stream, seconds: Stream, ratio: float) -> dict[str, Tensor]:
    """Return ``firsts`` with each value moved to at most ``ratio`` sqrt(v) from zero."""
    result = {}
    for key, u in firsts.items():
        most = seconds[key].to(u.device).sqrt().mul_(ratio)
        result[key] = torch.maximum(torch.minimum(u, most), -most)
    return result
