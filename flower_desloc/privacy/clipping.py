"""The sum of per-example gradients, each clipped: its sensitivity to one example is the bound."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
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
    batch: Any,
    *,
    max_grad_norm: float,
    chunk: int,
) -> dict[str, Tensor]:
    """Return the sum over the examples of ``batch`` of their clipped gradients, by parameter.

    It is of float64, whatever the type of the parameters: rounding, which depends on all examples,
    would otherwise change it by more than the bound.

    The gradient of an example, over all ``params`` together, is scaled down to the norm
    ``max_grad_norm`` if it is longer; one with NaN or infinity counts as zero. So an example more
    or less changes the sum by at most ``max_grad_norm``. Abadi et al. 2016, arXiv:1607.00133.

    Args:
        loss: Called with a batch of one example.
        module: Without ``require_independent`` problems.
        params: The module's parameters to differentiate, by name; tied ones once.
        batch: See ``tensors_of``.
        max_grad_norm: The bound C; infinite for no clipping.
        chunk: Examples whose gradients are in memory at once.

    Raises ``ValueError`` naming the module through which they cannot be computed, and for a bound
    below ``LEAST_NORM``.

    """
    if max_grad_norm < LEAST_NORM:
        raise ValueError(f"max_grad_norm={max_grad_norm}: must be at least {LEAST_NORM}")
    total = zeros(params)
    tensors, rebuild = tensors_of(batch)
    device = next(iter(params.values())).device
    whole = _Loss(module, loss)

    def of_example(values: dict[str, Tensor], *example: Tensor) -> Tensor:
        inputs = rebuild([tensor[None] for tensor in example])
        result: Tensor = functional_call(whole, values, (inputs,))
        return result

    values = {f"module.{key}": p.detach() for key, p in params.items()}
    dims = (None, *[0] * len(tensors))
    of_each = vmap(grad(of_example), in_dims=dims, randomness="different")
    for parts in zip(*(tensor.to(device).split(chunk) for tensor in tensors), strict=True):
        if not len(parts[0]):
            break
        try:
            with sdpa_kernel(SDPBackend.MATH):  # the only one that vmap batches
                grads = of_each(values, *parts)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise _unfit(module, error) from error
        for key, summed in _clipped(grads, max_grad_norm).items():
            total[key.removeprefix("module.")] += summed
    return total


def zeros(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the ``clipped_sum`` of no examples."""
    return {key: torch.zeros_like(p, dtype=torch.float64) for key, p in params.items()}


def tensors_of(batch: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """Return the tensors of a batch, one example a row, and what makes a batch of others.

    A batch is a tensor, or a tuple, list, dictionary or dataclass of them; fields of a dataclass
    that are no tensors stay as they are. Raises ``ValueError`` for anything else.
    """
    if isinstance(batch, Tensor):
        return _rows([batch]), lambda tensors: tensors[0]
    if isinstance(batch, tuple | list):
        return _rows(batch), tuple if isinstance(batch, tuple) else list
    if isinstance(batch, Mapping):
        return _rows(batch.values()), lambda tensors: dict(zip(batch, tensors, strict=True))
    if is_dataclass(batch) and not isinstance(batch, type):
        held = {f.name: getattr(batch, f.name) for f in fields(batch)}
        names = [name for name, value in held.items() if isinstance(value, Tensor)]
        return _rows([held[name] for name in names]), lambda tensors: replace(
            batch, **dict(zip(names, tensors, strict=True))
        )
    return _rows([batch]), lambda _: batch


def require_independent(module: nn.Module) -> None:
    """Raise ``SiteRefusedError`` naming a module that mixes examples, or has their statistics."""
    for name, part in module.named_modules():
        keeps = isinstance(part, _InstanceNorm) and part.track_running_stats
        if isinstance(part, _BatchNorm) or keeps:
            raise SiteRefusedError(
                f"differential privacy: module {name!r} is a {type(part).__name__}, which keeps "
                "statistics over examples that no clipping bounds; use a GroupNorm or a LayerNorm"
            )


class _Loss(nn.Module):
    """A loss as a module, for ``functional_call``."""

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.module, self._loss = module, loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(self.module, batch)


def _clipped(grads: Mapping[str, Tensor], max_grad_norm: float) -> dict[str, Tensor]:
    wide = {"dim": 1, "dtype": torch.float64}
    parts = [torch.linalg.vector_norm(g.reshape(len(g), -1), **wide) for g in grads.values()]
    norms = torch.linalg.vector_norm(torch.stack(parts), dim=0)
    factors = (max_grad_norm / norms).clamp(max=1)
    finite = norms.isfinite()
    if not finite.all():
        factors = torch.where(finite, factors, 0)
        grads = {key: g.where(finite.view(-1, *[1] * (g.ndim - 1)), 0) for key, g in grads.items()}
    return {key: torch.tensordot(factors, g.double(), 1) for key, g in grads.items()}


def _rows(values: Any) -> list[Tensor]:
    tensors = list(values)
    if (
        not tensors
        or not all(isinstance(tensor, Tensor) and tensor.ndim for tensor in tensors)
        or len({len(tensor) for tensor in tensors}) > 1
    ):
        raise ValueError(
            "differential privacy needs batches of tensors with one example in each row, all of "
            f"equally many rows; got {[type(each).__name__ for each in tensors]}"
        )
    return tensors


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
