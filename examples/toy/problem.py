"""The function, and the noise on its gradients."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Reals = NDArray[np.float64]

START: Final = (-1.2, 1.0)
"""Rosenbrock's own starting point; the paper states none."""
OPTIMUM: Final = (1.0, 1.0)

SPLITS: Final = ("iid", "niid")
SIGMA: Final = 1.5
"""Standard deviation of every worker's noise, IID."""
SIGMA_SPREAD: Final = 3.0
"""Non-IID: every worker has its own standard deviation, sigma^m ~ |N(0, 3)|."""

BLOCK: Final = 256
"""Steps of noise drawn at a time."""


def value(x1: Any, x2: Any) -> Any:
    """Return f(x1, x2) = (1 - x1)^2 + 100 (x2 - x1^2)^2, of numbers, arrays or tensors."""
    return (1 - x1) ** 2 + 100 * (x2 - x1 * x1) ** 2


def gradient(x1: Any, x2: Any) -> tuple[Any, Any]:
    """Return the gradient of ``value``."""
    residual = x2 - x1 * x1
    return 2 * (x1 - 1) - 400 * x1 * residual, 200 * residual


def distance(x: Reals) -> Reals:
    """Return the distance to the optimum of points ``x``, whose first axis is x1, x2."""
    away: Reals = np.hypot(x[0] - OPTIMUM[0], x[1] - OPTIMUM[1])
    return away


class Noise:
    """One worker's noise on both partial derivatives: a pure function of (seed, worker, step).

    The two splits share their draws and differ in scale only.
    """

    def __init__(self, worker: int, seeds: Sequence[int]) -> None:
        self._worker = worker
        self._seeds = seeds
        self._number = -1
        self._block: Reals = np.empty(0)
        # (splits, seeds)
        self.sigma: Reals = np.array(
            [
                [SIGMA] * len(seeds),
                [abs(SIGMA_SPREAD * self._normal(s, 1, stream=1)[0]) for s in seeds],
            ]
        )

    def at(self, step: int) -> Reals:
        """Return the noise of the step after ``step`` completed ones: (2, splits, seeds)."""
        number, row = divmod(step, BLOCK)
        if number != self._number:
            self._number, self._block = number, self.block(number)
        noise: Reals = self._block[row]
        return noise

    def block(self, number: int) -> Reals:
        """Return the noise of a block of steps: (steps, 2, splits, seeds)."""
        draws = [self._normal(seed, 2 * BLOCK, block=number) for seed in self._seeds]
        unit = np.stack(draws, axis=-1).reshape(BLOCK, 2, 1, len(self._seeds))
        return unit * self.sigma

    def _normal(self, seed: int, size: int, *, block: int = 0, stream: int = 0) -> Reals:
        # A counter-based generator has no state: every worker and process draws the same values.
        bits = np.random.Philox(key=[seed, self._worker], counter=[0, block, stream, 0])
        return np.random.Generator(bits).standard_normal(size)


def noisy_value(x: Tensor, noise: Reals) -> Tensor:
    """Return the sum of f over points ``x`` (2, ...), with ``noise`` added to its gradient.

    The result is linear in ``x``, with the value and the gradient of the sum at ``x``: autograd
    through f itself would take ten times as many calls.
    """
    points = x.detach().numpy()
    g1, g2 = gradient(*points)
    g = noise.copy()
    g[0] += g1
    g[1] += g2
    height = value(*points).sum() - np.vdot(g, points)
    return torch.vdot(x.view(-1), torch.from_numpy(g).view(-1)) + float(height)
