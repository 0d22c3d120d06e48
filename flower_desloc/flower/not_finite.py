"""Why the training of a client is not finite: a batch, or the learning rate."""

from collections.abc import Callable
from math import isfinite

import torch
from torch.optim import Optimizer

from flower_desloc.core.worker import StepMetrics
from flower_desloc.flower.failures import DivergedError

_LEAST_EPS = 2e-4
"""Where float16 rounds the square of a gradient to 0, Adam divides the gradient by eps alone: the
step stays below the learning rate if eps is at least as large as such a gradient."""


def cause(
    error: ValueError,
    optimizer: Optimizer,
    start: int,
    steps: StepMetrics,
    again: Callable[[int], StepMetrics] | None,
) -> FloatingPointError | DivergedError:
    """Return the error of a window after which a stream has NaN or infinity, as ``error`` states.

    ``steps`` were taken from the step ``start``. ``again`` takes a step by itself from where these
    started: a batch whose loss or gradient is not finite there either is the cause. Otherwise, and
    without ``again``, the training has diverged, and the error is a ``DivergedError``.
    """
    if again and (step := _bad_batch(start, steps, again)) is not None:
        return FloatingPointError(
            f"the loss or the gradient of step {step + 1} is NaN or infinite, also with the "
            "parameters at the start of the window; look for NaN and infinity in the data of that "
            "batch, and for a division by zero in the task's loss"
        )
    advice = "lower optimizer.lr"
    for eps in {group["eps"] for group in optimizer.param_groups if "eps" in group}:
        if eps == 0:
            advice += ", or set optimizer.eps above 0"  # 0 / 0 where a gradient is 0
        elif eps < _LEAST_EPS and _has_half(optimizer):
            advice = (
                f"in float16 optimizer.eps={eps:g} is {torch.tensor(eps).half():g}, and the square "
                "of a gradient below 2e-4 is 0: keep the parameters in float32 and compute under "
                f"torch.autocast, or set optimizer.eps={_LEAST_EPS:g}; otherwise {advice}"
            )
    return DivergedError(f"training diverged: {error}; {advice}")


def _has_half(optimizer: Optimizer) -> bool:
    return any(
        p.dtype == torch.float16 for group in optimizer.param_groups for p in group["params"]
    )


def _bad_batch(start: int, steps: StepMetrics, again: Callable[[int], StepMetrics]) -> int | None:
    finite = [isfinite(norm) for norm in steps.grad_norms]  # a private loss is not stated
    if all(finite):
        return None
    step = start + finite.index(False)
    if _is_finite(again(step)):
        return None
    # At the first step of a later window the parameters may be the cause: then no batch is finite.
    is_alone = step > start or start == 0 or _is_finite(again(step + 1))
    return step if is_alone else None


def _is_finite(steps: StepMetrics) -> bool:
    return isfinite(sum(steps.grad_norms))
