"""The gradient noise scale of McCandlish et al., "An Empirical Model of Large-Batch Training"."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

_BATCHES = "gradient_batches"
_PAIRS = "gradient_pairs"
_SQUARES = "gradient_squares"
_SQUARE_OF_SUM = "gradient_square_of_sum"


def noise_totals(losses: Iterable[Tensor], params: Sequence[Tensor]) -> dict[str, float]:
    """Return what ``noise_scale`` needs, from the losses of several batches of one client.

    Totals of several clients, or of several measurements, add. The gradients of ``params`` are
    computed one batch after the other; no ``.grad`` is changed.
    """
    squares, total, n = 0.0, [torch.zeros(()) for _ in params], 0
    for loss in losses:
        # On the CPU: a device that training fills has no room for another gradient.
        gradient = [g.cpu() for g in torch.autograd.grad(loss, params, materialize_grads=True)]
        squares += _square(gradient)
        total, n = [a + g for a, g in zip(total, gradient, strict=True)], n + 1
    return {
        _BATCHES: n,
        _PAIRS: n * (n - 1),
        _SQUARES: squares,
        _SQUARE_OF_SUM: _square(total),
    }


def noise_scale(totals: Mapping[str, float]) -> float | None:
    """Return tr(S) / |G|^2 in batches: the noise of one batch's gradient over the gradient itself.

    Both terms are unbiased. None without all totals of two batches of a client, or where the
    estimate of |G|^2 is not positive: then too few batches were measured.
    """
    pairs, batches = totals.get(_PAIRS, 0.0), totals.get(_BATCHES, 0.0)
    if not (pairs > 0 and batches > 0 and totals.keys() >= {_SQUARES, _SQUARE_OF_SUM}):
        return None
    signal = (totals[_SQUARE_OF_SUM] - totals[_SQUARES]) / pairs
    noise = totals[_SQUARES] / batches - signal
    scale = noise / signal if signal > 0 else math.nan
    return scale if math.isfinite(scale) else None


def _square(tensors: Iterable[Tensor]) -> float:
    return sum(float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2 for t in tensors)
