"""Bound of a first moment by the worker's own second moment."""

import math
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from flower_desloc.core.states import Group, states_of
from flower_desloc.core.types import Stream


def moment_ratios(optimizer: Optimizer) -> dict[str, float | None]:
    """Return the greatest |u| / sqrt(v) that any gradients can give each first moment u.

    By Cauchy and Schwarz its square is (1 - beta1)^2 / ((1 - beta2) (1 - beta1^2 / beta2)); with
    equal betas of 0.95 it is 1. Averages of u and v together keep to it, by Jensen's inequality.

    Only for first moments that a step divides by sqrt(v) (``State.divided_by``), as Adam does; None
    for beta1^2 >= beta2. Of parameter groups with different betas it is the greatest.
    """
    states, ratios = states_of(optimizer), {}
    for name, state in states.items():
        if state.divided_by:
            first, second = state.decay, states[state.divided_by].decay
            assert first is not None
            assert second is not None
            ratios[name] = _greatest(optimizer, first, second)
    return ratios


def _greatest(
    optimizer: Optimizer, first: Callable[[Group], float], second: Callable[[Group], float]
) -> float | None:
    ratios = [_ratio(first(group), second(group)) for group in optimizer.param_groups]
    return None if None in ratios else max(ratio for ratio in ratios if ratio is not None)


def _ratio(beta1: float, beta2: float) -> float | None:
    if beta1**2 >= beta2:
        return None
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))


def suits_newcomers(optimizer: Optimizer) -> bool:
    """Return whether averages of some states suit a worker that has none of the others.

    They do where the optimizer seeds states of its own (``State.seed``), and all its first moments
    that are divided by a root are bounded (``moment_ratios``).
    """
    seeded = any(state.seed is not None for state in states_of(optimizer).values())
    return seeded and None not in moment_ratios(optimizer).values()


@torch.no_grad()
def bounded(
    optimizer: Optimizer, streams: Mapping[str, Stream], averaged: Collection[str]
) -> dict[str, dict[str, Tensor]]:
    """Return the first moments with each value moved to at most its ratio times sqrt(v) from zero.

    Only those of which there is a ratio, after an average of either moment.
    """
    states, result = states_of(optimizer), {}
    for name, ratio in moment_ratios(optimizer).items():
        second = states[name].divided_by
        if ratio is not None and (name in averaged or second in averaged):
            result[name] = _within(streams[name], streams[second], ratio)
    return result


def _within(firsts: Stream, seconds: Stream, ratio: float) -> dict[str, Tensor]:
    result = {}
    for key, u in firsts.items():
        most = seconds[key].to(u.device).sqrt().mul_(ratio)
        result[key] = torch.maximum(torch.minimum(u, most), -most)
    return result
