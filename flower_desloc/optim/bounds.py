"""Bound of a first moment by the worker's own second moment."""

import math

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer, RAdam

from flower_desloc.core.newcomer import SeedsStates
from flower_desloc.core.types import Stream
from flower_desloc.optim.paper_adam import PaperAdam
from flower_desloc.optim.qhadam import QHAdam

FIRST, SECOND = "exp_avg", "exp_avg_sq"
_ADAMS = (Adam, AdamW, RAdam, PaperAdam, QHAdam)


def moment_ratio(optimizer: Optimizer) -> float | None:
    """Return the greatest |u| / sqrt(v) that any gradients can give Adam; None if there is none.

    By Cauchy and Schwarz its square is (1 - beta1)^2 / ((1 - beta2) (1 - beta1^2 / beta2)); with
    equal betas of 0.95 it is 1. Averages of u and v together keep to it, by Jensen's inequality.

    There is none for an optimizer that does not divide u by sqrt(v), and for beta1^2 >= beta2. Of
    parameter groups with different betas it is the greatest.
    """
    if not divides_by_root(optimizer):
        return None
    ratios = [_ratio(*map(float, group["betas"])) for group in optimizer.param_groups]
    return None if None in ratios else max(ratio for ratio in ratios if ratio is not None)


def _ratio(beta1: float, beta2: float) -> float | None:
    if beta1**2 >= beta2:
        return None
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))


def divides_by_root(optimizer: Optimizer) -> bool:
    """Return whether the optimizer is known to divide u by a root of v."""
    return isinstance(optimizer, _ADAMS)


def suits_newcomers(optimizer: Optimizer) -> bool:
    """Return whether averages of some states suit a worker that has none of the others.

    Those of Adam do where ``moment_ratio`` bounds them, and those of an optimizer that seeds its
    other states (``core.newcomer``), as ADOPT does.
    """
    if divides_by_root(optimizer):
        return moment_ratio(optimizer) is not None
    return isinstance(optimizer, SeedsStates)


@torch.no_grad()
def bounded(firsts: Stream, seconds: Stream, ratio: float) -> dict[str, Tensor]:
    """Return ``firsts`` with each value moved to at most ``ratio`` sqrt(v) from zero."""
    result = {}
    for key, u in firsts.items():
        most = seconds[key].to(u.device).sqrt().mul_(ratio)
        result[key] = torch.maximum(torch.minimum(u, most), -most)
    return result
