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
) -> dict[str, Tensor]:
    """Return the sum over ``examples`` of their clipped gradients, by parameter.

    The gradient of an example, over all ``params`` together, is scaled down to the norm
    ``max_grad_norm`` if it is longer; one with NaN or infinity counts as zero. So an example more
    or less changes the sum by at most ``max_grad_norm``. Abadi et al. 2016, arXiv:1607.00133.

    Each gradient is computed alone. Those of several at once (``torch.func.vmap``) depend on how
    many there are by rounding, and by more than the bound with parameters that are made for it. The
    sum is of float64, whatever the type of the parameters, for the same reason.

    Args:
        loss: Called with one example after the other.
        module: Without ``require_independent`` problems.
        params: The module's parameters to differentiate, by name; tied ones once.
        examples: Each a batch of one.
        max_grad_norm: The bound C; infinite for no clipping.

    Raises ``ValueError`` naming the module through which they cannot be computed, or which keeps
    what it computes of an example, and for a bound below ``LEAST_NORM``.

    """
    if max_grad_norm < LEAST_NORM:
        raise ValueError(f"max_grad_norm={max_grad_norm}: must be at least {LEAST_NORM}")
    total = zeros(params)
    with _nothing_kept(module) as check:
        for example in examples:
            try:
                grads = _gradients(loss(module, example), params)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                raise _unfit(module, error) from error
            check()
            norm = _norm(grads.values())
            if math.isfinite(norm):
                for key, grad in grads.items():
                    total[key].add_(grad, alpha=min(1.0, max_grad_norm / max(norm, LEAST_NORM)))
    return total


def zeros(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the ``clipped_sum`` of no examples."""
    return {key: torch.zeros_like(p, dtype=torch.float64) for key, p in params.items()}


def require_independent(module: nn.Module) -> None:
    """Raise ``SiteRefusedError`` naming a module that mixes examples, or has their statistics."""
    for name, part in module.named_modules():
        keeps = isinstance(part, _InstanceNorm) and part.track_running_stats
        if isinstance(part, _BatchNorm) or keeps:
            raise SiteRefusedError(
                f"differential privacy: module {name!r} is a {type(part).__name__}, which keeps "
                "statistics over examples that no clipping bounds; use a GroupNorm or a LayerNorm"
            )


def _gradients(loss: Tensor, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    return {key: grad for key, grad in zip(params, grads, strict=True) if grad is not None}


def _norm(grads: Iterable[Tensor]) -> float:
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


@contextmanager
def _nothing_kept(module: nn.Module) -> Iterator[Callable[[], None]]:
    """Give what raises ``SiteRefusedError`` naming a module that has kept a tensor of an example.

    What it computes of the next one could depend on it. Its tensors are set back in the end.
    """
    tensors = _held(module)
    values = {name: tensor.clone() for name, tensor in tensors.items()}

    def check() -> None:
        for name, tensor in _held(module).items():
            if name not in values or not _same(tensor, values[name]):
                where, _, attribute = name.rpartition(".")
                kind = type(module.get_submodule(where)).__name__
                raise SiteRefusedError(
                    f"differential privacy: module {where!r} ({kind}) keeps {attribute!r} of an "
                    "example, on which the gradients of others would depend; no clipping bounds it"
                )

    try:
        yield check
    finally:
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.data.copy_(values[name])


def _held(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that are no parameters: buffers, and what attributes hold."""
    return {
        f"{name}.{key}" if name else key: value
        for name, part in module.named_modules()
        for key, value in (*part.named_buffers(recurse=False), *vars(part).items())
        if isinstance(value, Tensor)
    }


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    both_nan = (one != one) & (other != other)
    return bool(((one == other) | both_nan).all())


def _unfit(module: nn.Module, error: Exception) -> ValueError:
    """Return the error that names the innermost module in which ``error`` was raised."""
    names = {id(part): name for name, part in module.named_modules()}
    callers = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
    inside = [part for part in callers if isinstance(part, nn.Module) and id(part) in names]
    where = f"module {names[id(inside[-1])]!r} ({type(inside[-1]).__name__})" if inside else "loss"
    return SiteRefusedError(  # without the error's text, which may quote the example
        f"differential privacy: the gradients of single examples cannot be computed through the "
        f"{where}: {type(error).__name__}"
    )
