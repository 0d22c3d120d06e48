"""Bound of a first moment by the worker's own second moment."""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_desloc.core.states import states_by_group
from flower_desloc.core.streams import group_of
from flower_desloc.core.types import Stream

Ratios = dict[str, dict[int, float | None]]


def moment_ratios(optimizer: Optimizer) -> Ratios:
    """Return the greatest |u| / sqrt(v) that any gradients can give each first moment u.

    Each has one value for every parameter group that has the moment, by the group's index; their
    betas may differ.

    By Cauchy and Schwarz its square is (1 - beta1)^2 / ((1 - beta2) (1 - beta1^2 / beta2)); with
    equal betas of 0.95 it is 1. Averages of u and v together keep to it, by Jensen's inequality.

    Only for first moments that a step divides by sqrt(v) (``State.divided_by``), as Adam does; None
    for beta1^2 >= beta2, and for beta2 = 1.
    """
    ratios: Ratios = {}
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
    if beta1**2 >= beta2 or beta2 == 1:
        return None
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))


class WidestRatios:
    """The greatest ``moment_ratios`` that an optimizer has had, as betas may vary.

    No gradients exceed them. A step with the ratio c makes of the greatest u^2 / v, r, a mean of r
    and c^2: (beta1^2 / beta2) r + (1 - beta1^2 / beta2) c^2. Where a step had no ratio, there is
    none any more.
    """

    def __init__(
        self, optimizer: Optimizer, before: Mapping[str, Mapping[str, float | None]] | None = None
    ) -> None:
        self._optimizer = optimizer
        self.now: Ratios = {
            name: {int(index): ratio for index, ratio in ratios.items()}
            for name, ratios in (before or {}).items()
        }
        """They, as far as the optimizer was seen."""

    def widen(self, *_: object) -> None:
        """Take up those of the present betas."""
        self.add(moment_ratios(self._optimizer))

    def add(self, other: Ratios) -> None:
        """Take up those of other steps of the optimizer."""
        self.now = {
            name: {i: _wider(c, self.now.get(name, {}).get(i, c)) for i, c in ratios.items()}
            for name, ratios in other.items()
        }

    @contextmanager
    def of_steps(self) -> Iterator[None]:
        """Look at the betas of each step in this context."""
        hook = self._optimizer.register_step_post_hook(self.widen)
        try:
            yield
        finally:
            hook.remove()

    def to_json(self) -> dict[str, dict[str, float | None]]:
        """Return what another one can take up (``before``)."""
        return {name: {str(i): c for i, c in ratios.items()} for name, ratios in self.now.items()}


def _wider(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else max(one, other)


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
    ratios: Ratios,
) -> dict[str, dict[str, Tensor]]:
    """Return the first moments with each value moved to at most its ratio times sqrt(v) from zero.

    Only those of which a parameter group has a ratio, after an average of either moment. Tensors of
    the other groups are as in ``streams``.
    """
    groups, by_group = group_of(module, optimizer), states_by_group(optimizer)
    result: dict[str, dict[str, Tensor]] = {}
    for name, of_groups in ratios.items():
        for key, u in streams.get(name, {}).items():  # {}: all its parameters are frozen
            index = groups[key]
            ratio = of_groups.get(index)
            second = by_group[index][name].divided_by if ratio is not None else ""
            if ratio is not None and (name in averaged or second in averaged):
                stream = result.setdefault(name, dict(streams[name]))
                stream[key] = _within(u, streams[second][key], ratio)
    return result


def _within(u: Tensor, v: Tensor, ratio: float) -> Tensor:
    most = v.to(u.device).sqrt().mul_(ratio)
    return torch.maximum(torch.minimum(u, most), -most)
