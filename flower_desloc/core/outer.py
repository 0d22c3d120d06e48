"""The server's optimizer: DiLoCo's outer step, and the optimizer of data parallelism."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_desloc.core.lr_schedule import LRSchedule, constant
from flower_desloc.core.streams import STEP, prime, set_step
from flower_desloc.core.types import Stream
from flower_desloc.core.worker import Clipping, clip


class OuterOptimizer:
    """An optimizer of the global parameters.

    In DiLoCo (Douillard et al., 2023) its gradient is the difference of the last parameters to the
    clients' mean, and it is SGD with Nesterov momentum. In data parallelism its gradient is the
    mean of the clients' gradients, and it is the optimizer that clients would otherwise run.

    Parameters
    ----------
    build : Callable
        Makes the optimizer from a list of parameters, or of groups of them.
    lr_schedule : LRSchedule, optional
        Factor of its learning rate, by the global step.
    clipping : Clipping, optional
        How its gradient is clipped.
    groups : Callable, optional
        Makes PyTorch's parameter groups from the parameters by name; by default one of all.

    """

    def __init__(
        self,
        build: Callable[[list[Any]], Optimizer],
        *,
        lr_schedule: LRSchedule | None = None,
        clipping: Clipping | None = None,
        groups: Callable[[Mapping[str, nn.Parameter]], list[Any]] | None = None,
    ) -> None:
        self._build = build
        self._groups = groups or (lambda params: list(params.values()))
        self._lr_schedule = lr_schedule or constant()
        self._clipping = clipping or Clipping()
        self._params: dict[str, nn.Parameter] = {}
        self._optimizer: Optimizer

    def begin(self, params: Stream) -> None:
        """Start from a copy of ``params``."""
        self._params = {key: nn.Parameter(tensor.clone()) for key, tensor in params.items()}
        self._optimizer = self._build(self._groups(self._params))
        for group in self._optimizer.param_groups:
            group["initial_lr"] = group["lr"]

    @torch.no_grad()
    def set_params(self, params: Stream) -> None:
        """Replace the parameters by what the clients have, where compression changed them."""
        for key, tensor in params.items():
            self._params[key].copy_(tensor)

    @property
    def params(self) -> dict[str, Tensor]:
        """The present parameters, not copied."""
        return {key: p.detach() for key, p in self._params.items()}

    @property
    def state(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state by its own names, ``step`` included; not copied."""
        state: dict[str, dict[str, Tensor]] = {}
        # Other libraries count steps once per group.
        counts = {
            p: {STEP: group[STEP]}
            for group in self._optimizer.param_groups
            if STEP in group
            for p in group["params"]
        }
        for key, p in self._params.items():
            for name, value in {**counts.get(p, {}), **self._optimizer.state.get(p, {})}.items():
                if value is not None:  # SGD without momentum
                    state.setdefault(name, {})[key] = torch.as_tensor(value)
        return state

    def restore(self, state: Mapping[str, Stream]) -> None:
        """Resume from a saved ``state``, after ``begin`` with the saved parameters."""
        if not state:
            return
        prime(self._optimizer, checked=False)
        for name, stream in state.items():
            for key, tensor in stream.items():
                if name == STEP:
                    set_step(self._optimizer, int(tensor))
                else:
                    self._optimizer.state[self._params[key]][name] = tensor.clone()

    def towards(self, mean: Stream, step: int) -> dict[str, Tensor]:
        """Take a step along ``x - mean``, the pseudo-gradient; return the new parameters."""
        return self.step({key: p - mean[key] for key, p in self.params.items()}, step)

    def step(self, gradients: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """Take a step after ``step`` completed ones; return a copy of the new parameters."""
        for key, parameter in self._params.items():
            parameter.grad = gradients[key].to(parameter.dtype)
        clip(list(self._params.values()), self._clipping)
        for group in self._optimizer.param_groups:
            group["lr"] = group["initial_lr"] * self._lr_schedule(step)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {key: tensor.clone() for key, tensor in self.params.items()}
