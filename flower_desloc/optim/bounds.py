"""Bound of a first moment by the worker's own second moment."""

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_desloc.core.states import states_by_group
from flower_desloc.core.streams import group_of
from flower_desloc.core.types import Stream


def moment_ratios(optimizer: Optimizer) -> dict[str, dict[int, float | None]]:
    """Return the greatest |u| / sqrt(v) that any gradients can give each first moment u.

    Each has one value for every parameter group that has the moment, by the group's index; their
    betas may differ.

    By Cauchy and Schwarz its square is (1 - beta1)^2 / ((1 - beta2) (1 - beta1^2 / beta2)); with
    equal betas of 0.95 it is 1. Averages of u and v together keep to it, by Jensen's inequality.

    Only for first moments that a step divides by sqrt(v) (``State.divided_by``), as Adam does; None
    for beta1^2 >= beta2.
    """
    ratios: dict[str, dict[int, float | None]] = {}
    groups = zip(optimizer.param_groups, states_by_group(optimizer), strict=True)
    for index, (group, states) in enumerate(groups):
        for name, state in states.items():
            if state.divided_by:
                first, second = state.decay, states[state.divided_by].decay
                assert first is not None
                assert second is not None
                ratios.setdefault(name, {})[index] = _ratio(first(group), second(group))
    return ratios


def _ratio(beta1: float, beta2: float) -> float | None:
    if beta1**2 >= beta2:
        return None
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))


def unsuited(module: nn.Module, optimizer: Optimizer) -> set[str]:
    """Return the parameters of which averages of some states suit no worker without the others.

    Those are the parameter groups of an optimizer that seeds no states (``State.seed``), and those
    in which a first moment that is divided by a root has no bound (``moment_ratios``).
    """
    ratios = moment_ratios(optimizer).values()
    bad = {
        index
        for index, states in enumerate(states_by_group(optimizer))
        if all(state.seed is None for state in states.values())
        or any(index in each and each[index] is None for each in ratios)
    }
    return {key for key, index in group_of(module, optimizer).items() if index in bad}


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
    groups, by_group = group_of(module, optimizer), states_by_group(optimizer)
    result: dict[str, dict[str, Tensor]] = {}
    for name, ratios in moment_ratios(optimizer).items():
        for key, u in streams.get(name, {}).items():  # {}: all its parameters are frozen
            index = groups[key]
            ratio = ratios.get(index)
            second = by_group[index][name].divided_by if ratio is not None else ""
            if ratio is not None and (name in averaged or second in averaged):
                stream = result.setdefault(name, dict(streams[name]))
                stream[key] = _within(u, streams[second][key], ratio)
    return result


def _within(u: Tensor, v: Tensor, ratio: float) -> Tensor:
    most = v.to(u.device).sqrt().mul_(ratio)
    return torch.maximum(torch.minimum(u, most), -most)
