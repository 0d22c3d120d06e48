"""Base classes of our optimizers: a ``torch.optim.Optimizer`` around a pure step on lists."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from flower_desloc.core.states import State

_Alike = tuple[list[Tensor], list[Tensor], list[dict[str, Any]]]
"""Parameters that have taken equally many steps, their gradients and their states."""

_IN_CACHE = 1 << 18
"""Elements per call of the step on a CPU: what one operation writes, the next finds in the cache.
Measured by benchmarks/optimizer_step.py: up to 1.8 times faster than one call for all tensors."""


class ForeachOptimizer(Optimizer):
    """Calls a pure step on lists of tensors, so that a step is a few operations for all of them.

    A subclass describes its states in ``states`` and names its step in ``update``. States start at
    zero, besides a ``step`` that counts completed steps.

    Raises ``ValueError`` for a hyperparameter that is negative, or a beta or a momentum of 1 or
    more.
    """

    states: ClassVar[tuple[State, ...]]
    update: Callable[..., None]
    """``update(params, gradients, *states, **arguments)``, in place; the states in the order of
    ``states``, and by default the settings of the parameter group as arguments."""
    varying: ClassVar[tuple[str, ...]] = ("lr",)
    """Arguments of ``update`` that may change in every step."""
    compiled = False

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        for name, value in defaults.items():
            if name == "betas":
                for number, beta in enumerate(value, start=1):
                    _check(f"beta{number}", beta)
            else:
                _check(name, value)
        super().__init__(params, defaults)

    def arguments(self, group: dict[str, Any], step: int) -> dict[str, Any]:
        """Return the keyword arguments of ``update`` after ``step`` completed steps."""
        del step  # by default they are the group's hyperparameters
        # PyTorch adds "differentiable" when it loads a state dict.
        return {name: group[name] for name in self.defaults if name != "differentiable"}

    def compile(self, compiler: Callable[..., Any] = torch.compile) -> None:
        """Compile ``update``, which then takes the step of all tensors in one call.

        What may change in every step becomes a tensor. Shapes are fixed: a second model in one
        process would otherwise get slower code for shapes of any size.
        """
        self.update = compiler(type(self).update, dynamic=False)
        self.compiled = True

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
                tensors = [
                    params,
                    gradients,
                    *([s[each.name] for s in states] for each in self.states),
                ]
                arguments = self.arguments(group, step)
                if self.compiled:  # for each new number PyTorch would compile again
                    for name in self.varying:
                        if arguments[name] is not None:
                            arguments[name] = torch.tensor(arguments[name], dtype=torch.float64)
                for part in self._parts(params):
                    self.update(*(family[part] for family in tensors), **arguments)
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
                for each in self.states:
                    state[each.name] = torch.zeros_like(p)
            xs, gs, states = groups[int(state["step"])]
            xs.append(p)
            gs.append(gradient)
            states.append(state)
        return groups

    def _parts(self, params: list[Tensor]) -> Iterator[slice]:
        """Yield which tensors take their step in one call: all of them, except on a CPU."""
        if self.compiled or params[0].device.type != "cpu":
            yield slice(None)
            return
        begin = size = 0
        for end, p in enumerate(params, start=1):
            size += p.numel()
            if size >= _IN_CACHE or end == len(params):
                yield slice(begin, end)
                begin, size = end, 0


def update_moments_(
    us: list[Tensor], vs: list[Tensor], gs: list[Tensor], betas: tuple[float, float]
) -> None:
    """Take gradients into Adam's moments, in place: u <- b1 u + (1 - b1) g, v likewise of g^2."""
    beta1, beta2 = betas
    torch._foreach_lerp_(us, gs, 1 - beta1)
    torch._foreach_mul_(vs, beta2)
    torch._foreach_addcmul_(vs, gs, gs, 1 - beta2)


def add_scaled_(xs: list[Tensor], us: list[Tensor], factor: float | Tensor) -> None:
    """Add ``factor`` times ``us`` to ``xs``, in place; a compiled step's factor is a tensor."""
    if isinstance(factor, Tensor):
        torch._foreach_add_(xs, torch._foreach_mul(us, factor))
    else:
        torch._foreach_add_(xs, us, alpha=factor)


def _check(name: str, value: float) -> None:
    below_1 = name.startswith(("beta", "momentum"))
    if not 0 <= value < (1 if below_1 else math.inf):
        limit = " and below 1" if below_1 else ""
        raise ValueError(f"{name} must be at least 0{limit}, got {value}")
