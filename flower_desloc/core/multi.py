"""Several optimizers as one, each for parameters of its own: Muon beside AdamW, for example."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, overload

import torch
from torch.optim import Optimizer


class MultiOptimizer(Optimizer):
    """Steps several optimizers of different parameters together.

    Its parameter groups are theirs, one optimizer after the other, and its state is theirs, so a
    learning-rate scheduler, a state dict and ``flower_desloc`` see one optimizer. A state that only
    some of them have is a stream of their parameters only.

    >>> matrix, bias = torch.nn.Linear(2, 2).parameters()
    >>> parts = torch.optim.SGD([matrix], lr=0.1), torch.optim.AdamW([bias], lr=0.001)
    >>> [group["lr"] for group in MultiOptimizer(parts).param_groups]
    [0.1, 0.001]

    Args:
        parts: The optimizers, in which no parameter is twice. They are not used by themselves any
            more: their states and groups are now those of this one.

    Raises ``ValueError`` for a parameter of two optimizers, or no optimizer.

    """

    def __init__(self, parts: Iterable[Optimizer]) -> None:
        self.parts = tuple(parts)
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        for part in self.parts:
            self.state.update(part.state)
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # of a copy, or of load_state_dict: new groups, a new state
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.state = self.state
            part.param_groups = list(islice(groups, len(part.param_groups)))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while this optimizer is made; later it would belong to no part."""
        if len(self.param_groups) == sum(len(part.param_groups) for part in self.parts):
            raise ValueError("add the group to one of the optimizers before they become one")
        super().add_param_group(param_group)

    def compile(self, compiler: Callable[..., Any] = torch.compile) -> None:
        """Compile the steps of the optimizers that can be compiled, as this project's can."""
        for part in self.parts:
            if (compile_step := getattr(part, "compile", None)) is not None:
                compile_step(compiler)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step of every optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers that take an optimizer's steps, in the order of its groups."""
    return optimizer.parts if isinstance(optimizer, MultiOptimizer) else (optimizer,)
