"""The thin ``torch.optim.Optimizer`` around a pure step; every optimizer of ours is one."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

_Alike = tuple[list[Tensor], list[Tensor], list[dict[str, Any]]]
"""Parameters that have taken equally many steps, their gradients and their states."""


class ForeachOptimizer(Optimizer):
    """Applies a pure step to lists of tensors, so that a step is a few kernels, not one a tensor.

    A subclass names its states in :attr:`streams` and gives the step in :meth:`_update`. All
    states start at zero, beside a ``step`` that counts completed steps.
    """

    streams: ClassVar[tuple[str, ...]]

    def _update(
        self,
        group: dict[str, Any],
        step: int,
        xs: list[Tensor],
        gs: list[Tensor],
        states: tuple[list[Tensor], ...],
    ) -> None:
        """Take step ``step + 1`` in place; ``states`` are in the order of :attr:`streams`."""
        raise NotImplementedError

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step on every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for step, (params, gradients, states) in self._by_step(group["params"]).items():
                families = tuple([state[name] for state in states] for name in self.streams)
                self._update(group, step, params, gradients, families)
                for state in states:
                    state["step"] = step + 1
        return loss

    def _by_step(self, params: list[Tensor]) -> dict[int, _Alike]:
        # A parameter without a gradient takes no step, so counts can differ within a group.
        groups: dict[int, _Alike] = defaultdict(lambda: ([], [], []))
        for p in params:
            if (gradient := p.grad) is None:
                continue
            if gradient.is_sparse:
                raise ValueError(f"{type(self).__name__} does not take sparse gradients")
            if not (state := self.state[p]):
                # A number: adding to hundreds of tensors of one element costs as much as a step.
                state["step"] = 0
                for name in self.streams:
                    state[name] = torch.zeros_like(p)
            xs, gs, states = groups[int(state["step"])]
            xs.append(p)
            gs.append(gradient)
            states.append(state)
        return groups


def require_rate(name: str, value: float, below: float = float("inf")) -> None:
    """Raise ``ValueError`` unless ``0 <= value < below``."""
    if not 0 <= value < below:
        limit = "" if below == float("inf") else f" and below {below:g}"
        raise ValueError(f"{name} must be at least 0{limit}, got {value}")
