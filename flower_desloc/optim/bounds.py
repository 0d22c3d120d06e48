"""Bound of a first moment by the worker's own second moment."""

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_desloc.core.states import states_of
from flower_desloc.core.streams import group_of
from flower_desloc.core.types import Stream


def moment_ratios(optimizer: Optimizer) -> dict[str, list[float | None]]:
    """Return the greatest |u| / sqrt(v) that any gradients can give each first moment u.

    Each has one value for every parameter group, whose betas may differ.

    By Cauchy and Schwarz its square is (1 - beta1)^2 / ((1 - beta2) (1 - beta1^2 / beta2)); with
    equal betas of 0.95 it is 1. Averages of u and v together keep to it, by Jensen's inequality.

    Only for first moments that a step divides by sqrt(v) (``State.divided_by``), as Adam does; None
    for beta1^2 >= beta2.
    """
    states, ratios = states_of(optimizer), {}
    for name, state in states.items():
        if state.divided_by:
            first, second = state.decay, states[state.divided_by].decay
            assert first is not None
            assert second is not None
            ratios[name] = [_ratio(first(group), second(group)) for group in optimizer.param_groups]
    return ratios


def _ratio(beta1: float, beta2: float) -> float | None:
    if beta1**2 >= beta2:
        return None
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))


def unsuited(module: nn.Module, optimizer: Optimizer) -> set[str]:
    """Return the parameters of which averages of some states suit no worker without the others.

    Those are all if the optimizer seeds no states (``State.seed``), otherwise the parameter groups
    in which a first moment that is divided by a root has no bound (``moment_ratios``).
    """
    groups = group_of(module, optimizer)
    if all(state.seed is None for state in states_of(optimizer).values()):
        return set(groups)
    by_group = moment_ratios(optimizer).values()
    return {key for key, i in groups.items() if any(ratios[i] is None for ratios in by_group)}


@torch.no_grad()
def bounded(
    module: nn.Module,
    optimizer: Optimizer,
    streams: Mapping[str, Stream],
    averaged: Collection[str],
) -> dict[str, dict[str, Tensor]]:
    """Return the first moments with each value moved to at most its ratio times sqrt(v) from zero.

    Only those of which a parameter group has a ratio, after an average of either moment. Tensors of
    the other groups are as in ``streams``.
    """
    states, result = states_of(optimizer), {}
    for name, ratios in moment_ratios(optimizer).items():
        second = states[name].divided_by
        if any(ratios) and (name in averaged or second in averaged):
            by_key = {key: ratios[index] for key, index in group_of(module, optimizer).items()}
            result[name] = {
                key: _within(u, streams[second][key], by_key[key])
                for key, u in streams[name].items()
            }
    return result


def _within(u: Tensor, v: Tensor, ratio: float | None) -> Tensor:
    if ratio is None:
        return u
    most = v.to(u.device).sqrt().mul_(ratio)
    return torch.maximum(torch.minimum(u, most), -most)
