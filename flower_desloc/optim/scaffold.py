"""SCAFFOLD's local steps: SGD, corrected by control variates."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from flower_desloc.core.kinds import Kind
from flower_desloc.core.states import State


class Scaffold(Optimizer):
    """SGD with control variates (Karimireddy et al., 2020, Algorithm 1, option II).

    In a window of K steps from x, on client i, and then on the server:

    y <- y - lr (g - c_i + c)
    c_i <- c_i - c + (x - y) / (K lr)
    x <- E_i[y],  c <- E_i[c_i]

    At a constant rate the second line is the mean of the window's gradients, which is what this
    takes at any rate. The streams: ``control``, averaged whenever params are, is c at the start of
    a window and the new c_i at its end; ``own_control`` (c_i) and ``correction`` (c - c_i of this
    window) are never averaged. So all clients should take part in every window: the paper adds
    the changes of the others' c_i to c, and here only those that took part count.

    Raises ``ValueError`` for a negative ``lr``.
    """

    states = (
        State("control", Kind.OTHER, averaged="with params"),
        State("own_control", Kind.OTHER, averaged="never"),
        State("correction", Kind.OTHER, averaged="never"),
    )
    elementwise = True

    def __init__(self, params: ParamsT, lr: float = 1e-2) -> None:
        if not lr >= 0:
            raise ValueError(f"lr={lr}: must be at least 0")
        self._start = 0  # completed steps at the start of this window
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def begin_window(self, step: int) -> None:
        """Fix the correction of a window that begins after ``step`` completed steps."""
        self._start = step
        params = (p for group in self.param_groups for p in group["params"])
        for state in (self.state[p] for p in params if p in self.state):  # not of other optimizers
            torch.sub(state["control"], state["own_control"], out=state["correction"])
            state["own_control"].zero_()

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """Take one step; return the loss that ``closure`` computes, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    for described in self.states:
                        state[described.name] = torch.zeros_like(p)
                state["step"] += 1
                mean = state["own_control"].lerp_(p.grad, 1 / (float(state["step"]) - self._start))
                state["control"].copy_(mean)
                p.sub_(p.grad + state["correction"], alpha=group["lr"])
        return loss
