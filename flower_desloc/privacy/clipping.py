"""The sum of per-example gradients, each clipped: its sensitivity to one example is the bound."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from flower_desloc.core.errors import SiteRefusedError
from flower_desloc.core.exits import exits_as_errors
from flower_desloc.privacy.failures import Failures, is_of_memory

Loss = Callable[[nn.Module, Any], Tensor]
"""``loss(module, batch)``: the mean loss of a batch, a scalar."""
LEAST_NORM = 1e-6
"""The least bound: gradients and noise are far above the least numbers of single precision."""


def clipped_sum(
    loss: Loss,
    module: nn.Module,
    params: Mapping[str, Tensor],
    examples: Iterable[Any],
    *,
    max_grad_norm: float,
    failed: Failures | None = None,
) -> dict[str, Tensor]:
    """Return the sum over ``examples`` of their clipped gradients, by parameter.

    The gradient of an example, over all ``params`` together, is scaled down to the norm
    ``max_grad_norm`` if it is longer. An example fails, and counts as zero, if its gradient has NaN
    or infinity, or its loss depends on no parameter. So an example more or less changes the sum by
    at most ``max_grad_norm``, unless the module keeps what it computes, for which ``PrivateLoss``
    looks. Abadi et al. 2016, arXiv:1607.00133.

    Each gradient is computed alone. Those of several at once (``torch.func.vmap``) depend on how
    many there are by rounding, and by more than the bound with parameters that are made for it. The
    sum is of float64, whatever the type of the parameters, for the same reason.

    Args:
        loss: Called with one example after the other.
        module: Without ``require_independent`` problems.
        params: The module's parameters to differentiate, by name; tied ones once.
        examples: Each a batch of one.
        max_grad_norm: The bound C; infinite for no clipping.
        failed: Counts the examples that fail, which then count as zero: an error would tell that
            they are there.

    Raises ``ValueError`` naming the module through which they cannot be computed, for one that
    adds to gradients itself, and for a bound below ``LEAST_NORM``.

    """
    if max_grad_norm < LEAST_NORM:
        raise ValueError(f"max_grad_norm={max_grad_norm}: must be at least {LEAST_NORM}")
    total = zeros(params)
    with _own_gradients(module):
        for example in examples:
            try:
                with exits_as_errors():
                    grads = _gradients(loss(module, example), params)
                    norm = norm_of(grads.values())
            except Exception as error:
                if is_of_memory(error):
                    raise
                if failed is None:
                    raise _unfit(module, error) from error
                failed.add(_unfit(module, error))
                continue
            if math.isfinite(norm):
                for key, grad in grads.items():
                    total[key].add_(grad, alpha=min(1.0, max_grad_norm / max(norm, LEAST_NORM)))
            elif failed is not None:
                failed.add(FloatingPointError("its gradient has NaN or infinity"))
    return total


def zeros(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the ``clipped_sum`` of no examples."""
    return {key: torch.zeros_like(p, dtype=torch.float64) for key, p in params.items()}


def require_independent(module: nn.Module) -> None:
    """Raise ``SiteRefusedError`` naming a module that mixes or marks examples."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise SiteRefusedError(
                f"differential privacy: module {name!r} is a {type(part).__name__} with max_norm, "
                "which changes the rows that an example uses; leave max_norm out"
            )
        keeps = isinstance(part, _InstanceNorm) and part.track_running_stats
        if isinstance(part, _BatchNorm) or keeps:
            raise SiteRefusedError(
                f"differential privacy: module {name!r} is a {type(part).__name__}, which keeps "
                "statistics over examples that no clipping bounds; use a GroupNorm or a LayerNorm"
            )


def _gradients(loss: Tensor, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    grads: dict[str, Tensor] = {}
    if loss.requires_grad:
        all_of = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        grads = {key: grad for key, grad in zip(params, all_of, strict=True) if grad is not None}
    if not grads:
        raise ValueError("its loss depends on no parameter; is it detached?")
    return grads


def norm_of(grads: Iterable[Tensor]) -> float:
    """Return the norm of gradients together, which may be on several devices."""
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
    if not norms:
        return 0.0
    return float(torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms])))


@contextmanager
def _own_gradients(module: nn.Module) -> Iterator[None]:
    """Raise ``SiteRefusedError`` if a module leaves gradients of its own, which nobody clips."""
    kept = [(p, p.grad) for p in module.parameters()]
    for p, _ in kept:
        p.grad = None
    try:
        yield
        left = [name for name, p in module.named_parameters() if p.grad is not None]
    finally:
        for p, grad in kept:
            p.grad = grad
    if left:
        raise SiteRefusedError(
            f"differential privacy: the backward pass adds to the gradient of {left[0]!r} itself, "
            "as reversible layers do; it cannot be clipped"
        )


def _unfit(module: nn.Module, error: Exception) -> SiteRefusedError:
    """Return an error by ``error`` that names the innermost module in which that was raised."""
    names = {id(part): name for name, part in module.named_modules()}
    # Without the first, which is of this file: looking at its variables would keep the error.
    within = None if error.__traceback__ is None else error.__traceback__.tb_next
    callers = (frame.f_locals.get("self") for frame, _ in walk_tb(within))
    inside = [part for part in callers if isinstance(part, nn.Module) and id(part) in names]
    where = f"module {names[id(inside[-1])]!r} ({type(inside[-1]).__name__})" if inside else "loss"
    unfit = SiteRefusedError(  # without the error's text, which may quote the example
        f"differential privacy: the gradients of single examples cannot be computed through the "
        f"{where}: {type(error).__name__}"
    )
    unfit.__cause__ = error
    return unfit
