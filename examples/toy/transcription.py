"""A vectorised implementation, with all workers and many settings in one tensor.

It exists in addition to tests/reference.py because it is fast: it runs the search's 225 settings of
256 workers in minutes. In float64 it agrees with the federation up to rounding.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from examples.toy.problem import BLOCK, START, Noise, Reals, gradient
from examples.toy.setting import K_X, ToyMethod, ToySetting
from flower_desloc.core.schedule import NEVER, RESET, Period

ADOPT_CLIP = 0.25  # the power of the step


@dataclass(frozen=True)
class Course:
    """The parameters over time, of one method under some settings."""

    averages: Reals
    """The start and every average of the parameters: (1 + rounds, 2, settings, splits, seeds)."""
    means: Reals
    """The start and the workers' mean every ``every`` steps: (times, 2, settings, ...)."""


def noise(
    num_workers: int, num_steps: int, seeds: Sequence[int], dtype: torch.dtype = torch.float64
) -> Iterator[Tensor]:
    """Yield every step's noise on all workers' gradients: (2, workers, 1, splits, seeds)."""
    workers = [Noise(worker, seeds) for worker in range(num_workers)]
    for start in range(0, num_steps, BLOCK):
        blocks = np.stack([worker.block(start // BLOCK) for worker in workers], axis=2)
        yield from torch.from_numpy(blocks).to(dtype).unsqueeze(3)[: num_steps - start]


@torch.no_grad()
def transcribe(
    settings: Sequence[ToySetting], method: ToyMethod, noises: Iterable[Tensor], *, every: int = K_X
) -> Course:
    """Return the course of ``method`` under ``settings``, all of one rule, on ``noises``.

        u <- beta1 u + (1 - beta1) g            v <- beta2 v + (1 - beta2) g^2
        x <- x - lr u^ / (sqrt(v^) + eps)       Adam; u^ and v^ with bias correction

    The workers' mean is recorded every ``every`` steps.
    """
    eps, adam = settings[0].eps, settings[0].rule == "adam"
    # lr, beta1, beta2, rho: (4, settings, 1, 1)
    rows = [(s.lr, *s.betas, torch.inf if s.clip is None else s.clip) for s in settings]
    columns = torch.tensor(rows, dtype=torch.float64).T[:, :, None, None]
    averages: list[Tensor] = []
    means: list[Tensor] = []
    origin = 0  # where the states were last reset
    for n, xi in enumerate(noises, start=1):
        if n == 1:
            # (2, workers, settings, splits, seeds)
            shape = (*xi.shape[:2], len(settings), *xi.shape[3:])
            x = torch.tensor(START, dtype=xi.dtype).reshape(2, 1, 1, 1, 1).expand(shape)
            u, v = torch.zeros_like(x), torch.zeros_like(x)
            lr, beta1, beta2, rho = columns.to(xi.dtype)
            averages.append(_mean(x))
            means.append(_mean(x))
        g = (torch.stack(gradient(*x)) + xi).clamp(-rho, rho)
        t = n - origin
        if adam:
            u = u + (1 - beta1) * (g - u)
            v = beta2 * v + (1 - beta2) * g * g
            # Of the double columns: in float32, 1 - 0.9999 has three digits.
            unbias_u, unbias_v = 1 / (1 - columns[1:3] ** t).to(xi.dtype)
            x = x - lr * unbias_u * u / ((v * unbias_v).sqrt() + eps)
        elif t == 1:  # ADOPT only seeds v
            v = g * g
        else:
            bound = (t - 1) ** ADOPT_CLIP
            u = u + (1 - beta1) * ((g / v.sqrt().clamp(min=eps)).clamp(-bound, bound) - u)
            x = x - lr * u
            v = beta2 * v + (1 - beta2) * g * g
        if _due(method.exp_avg, n):
            u = _mean(u).expand_as(x)
        if _due(method.exp_avg_sq, n):
            v = _mean(v).expand_as(x)
        if n % every == 0:
            means.append(_mean(x))
        if n % K_X == 0:
            averages.append(_mean(x))
            x = averages[-1].expand_as(x)
            if method.exp_avg == RESET:
                u, v, origin = torch.zeros_like(x), torch.zeros_like(x), n
    return Course(averages=_history(averages), means=_history(means))


def _mean(stream: Tensor) -> Tensor:
    return stream.mean(dim=1, keepdim=True)


def _due(period: Period, n: int) -> bool:
    return period not in (NEVER, RESET) and n % int(period) == 0


def _history(points: Sequence[Tensor]) -> Reals:
    history: Reals = torch.cat(list(points), dim=1).transpose(0, 1).double().numpy()
    return history
