"""A worker's local steps between two sync events."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from flower_desloc.core.averaging import Stream
from flower_desloc.core.lr_schedule import LRSchedule
from flower_desloc.core.streams import set_step


@dataclass(frozen=True)
class Clipping:
    """Gradient clipping: to a global ``norm`` rho, or each coordinate to +-``value``.

    The paper's experiments clip the norm (rho = 1); its listings clip coordinates.
    """

    norm: float | None = None
    value: float | None = None
    whole: Callable[[Tensor], Tensor] | None = None
    """For a client of several processes: the norm of all gradients from that of this process's."""


@dataclass(frozen=True)
class StepMetrics:
    """Measurements of one window's local steps, one number per step.

    ``grad_norms`` are before clipping, ``learning_rates`` of the first parameter group.
    """

    losses: list[float]
    grad_norms: list[float]
    learning_rates: list[float]

    def __add__(self, later: "StepMetrics") -> "StepMetrics":
        return StepMetrics(
            self.losses + later.losses,
            self.grad_norms + later.grad_norms,
            self.learning_rates + later.learning_rates,
        )


def local_steps(
    module: nn.Module,
    optimizer: Optimizer,
    loss_at: Callable[[int], Tensor],
    *,
    start: int,
    stop: int,
    lr_schedule: LRSchedule,
    clipping: Clipping,
    origin: int = 0,
) -> StepMetrics:
    """Take the local steps ``start + 1 .. stop`` of the federation.

    Args:
        module: The model.
        optimizer: Its optimizer, primed.
        loss_at: Loss of the batch after ``step`` completed steps; a pure function of the step, so
            that a window can be repeated.
        start: Completed steps at the start of the window.
        stop: Completed steps at its end.
        lr_schedule: Factor of each group's own learning rate.
        clipping: How gradients are clipped.
        origin: Step at which the optimizer's states were last reset; it counts from there.

    """
    set_step(optimizer, start - origin)
    module.train()
    params = _params(optimizer)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    losses, grad_norms, rates = [], [], []
    for step in range(start, stop):
        for p in params:
            p.grad = None  # as optimizer.zero_grad(), whose hooks take 10 % of a small step
        loss = loss_at(step)
        loss.backward()
        grad_norms.append(clip(params, clipping))
        losses.append(loss.detach())
        factor = lr_schedule(step)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    # Read once per window: a read in the loop would synchronise device and host.
    return StepMetrics(torch.stack(losses).tolist(), torch.stack(grad_norms).tolist(), rates)


@runtime_checkable
class SeedsStates(Protocol):
    """An optimizer some of whose states must not be zero where a worker starts at a later step."""

    seeded: Collection[str]
    """Names of the states that ``seed_states`` can set."""

    def seed_states(self, names: Collection[str]) -> None:
        """Set the named states from the present gradients, as the first step would."""


def needs_seed(optimizer: Optimizer, states: Mapping[str, Stream]) -> list[str]:
    """Return those of ``states``, the optimizer's streams, that are zero and must not be."""
    if not isinstance(optimizer, SeedsStates):
        return []
    return [
        name
        for name in optimizer.seeded
        if not any(tensor.any() for tensor in states[name].values())
    ]


def seed_states(
    optimizer: Optimizer,
    names: Collection[str],
    loss_at: Callable[[int], Tensor],
    *,
    step: int,
    clipping: Clipping,
) -> None:
    """Let an optimizer that starts with zeros at a later ``step`` seed the named states.

    This costs the gradient of one batch, which is then used again for the step itself.
    """
    assert isinstance(optimizer, SeedsStates)
    loss_at(step).backward()
    clip(_params(optimizer), clipping)
    optimizer.seed_states(names)
    optimizer.zero_grad(set_to_none=True)


def gradients(
    module: nn.Module, optimizer: Optimizer, loss_at: Callable[[int], Tensor], *, step: int
) -> tuple[dict[str, Tensor], StepMetrics]:
    """Return the gradient after ``step`` completed steps, by parameter name.

    It is not clipped and no step is taken: the server does both. The gradient of a parameter that
    the loss does not depend on is zero.
    """
    module.train()
    optimizer.zero_grad(set_to_none=True)
    loss = loss_at(step)
    loss.backward()
    grads = {
        key: torch.zeros_like(p) if p.grad is None else p.grad
        for key, p in module.named_parameters()
        if p.requires_grad
    }
    optimizer.zero_grad(set_to_none=True)
    norm = get_total_norm(grads.values())
    return grads, StepMetrics([float(loss.detach())], [float(norm)], [])


def accumulated(losses: Iterable[Tensor], params: Sequence[Tensor]) -> Tensor:
    """Return the sum of ``losses``, holding one of their graphs at a time.

    Computes the gradients of ``params`` at once; ``backward()`` only adds them, and gives nothing
    else a gradient.
    """
    trained = [p for p in params if p.requires_grad]
    total: Tensor = _Accumulated.apply(losses, *trained)  # type: ignore[no-untyped-call]
    return total


class _Accumulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses: Iterable[Tensor], *params: Tensor) -> Tensor:
        kept = [p.grad for p in params]
        for p in params:
            p.grad = None
        values = []
        with torch.enable_grad():
            for loss in losses:
                loss.backward()
                values.append(loss.detach())
        ctx.gradients = [p.grad for p in params]
        for p, gradient in zip(params, kept, strict=True):
            p.grad = gradient
        return torch.stack(values).sum()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        # Moved, not copied: as with any graph, a second backward() fails.
        gradients, ctx.gradients = ctx.gradients, None
        torch._foreach_mul_([g for g in gradients if g is not None], outer[0])
        return None, *gradients


def clip(params: list[Tensor], clipping: Clipping) -> Tensor:
    """Clip the gradients of ``params`` in place; return their norm before that."""
    grads = [p.grad for p in params if p.grad is not None]
    if clipping.whole is not None:
        norm = clipping.whole(get_total_norm(grads))
        if clipping.norm is not None:
            clip_grads_with_norm_(params, clipping.norm, norm)
    else:
        norm = (
            get_total_norm(grads)
            if clipping.norm is None
            else clip_grad_norm_(params, clipping.norm)
        )
    if clipping.value is not None:
        torch._foreach_clamp_min_(grads, -clipping.value)
        torch._foreach_clamp_max_(grads, clipping.value)
    return norm


def _params(optimizer: Optimizer) -> list[Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
