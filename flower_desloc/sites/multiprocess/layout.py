"""How a model and its optimizer lie in the processes of a group."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_desloc.core.averaging import Stream

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class Layout(Protocol):
    """One process's part of a model and its optimizer.

    Its streams have the parameters' names, as in :mod:`flower_desloc.core.streams`.
    Every method but :meth:`like` is called in all processes at once.
    """

    device: torch.device
    model: nn.Module
    """What a loss is computed of."""
    module: nn.Module
    """What holds the parameters that the optimizer of this process trains."""
    optimizer: Optimizer
    scale: float
    """What this process's share of a loss is to be multiplied by before it is differentiated."""

    def sum_gradients(self) -> None:
        """Sum the gradients over the processes; one that none of them has stays away."""

    def norm(self, norm: Tensor) -> Tensor:
        """Return the norm of all gradients, from that of those in this process."""

    def like(self, stream: Stream) -> Stream:
        """Return tensors of the shapes and types that ``stream``, of this process, has in one."""

    def put(self, views: Stream, stream: Stream | None) -> None:
        """Write what rank 0 has in ``stream`` into the ``views`` of every process."""

    def take(self, names: list[str], folder: Path | None) -> dict[str, dict[str, Tensor]]:
        """Return streams as one process has them, in rank 0, which may use the disk in ``folder``.

        To be read before anything else is done.
        """
