"""One process's part of a window: what every rank does when rank 0 is told to do it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flower_desloc.core.averaging import Stream
from flower_desloc.core.local_steps import StepMetrics, accumulated
from flower_desloc.core.streams import prime, take
from flower_desloc.flower.client import Worker
from flower_desloc.sites.multiprocess.layout import Layout
from flower_desloc.sites.multiprocess.settings import Node


class Member:
    """The model, the optimizer and the data of one rank.

    ``layout`` is where model and optimizer lie; ``worker_of`` gives the worker of a client by its
    node config. Its ``loss_at`` is this rank's share of the loss: the shares of all ranks add up
    to the mean over the batch.

    Every method is called in all ranks at once, with the same arguments but for those after ``*``,
    which rank 0 alone has.
    """

    def __init__(self, layout: Layout, worker_of: Callable[[Node], Worker]) -> None:
        self._layout = layout
        self._worker_of = worker_of
        prime(layout.optimizer)

    def serve(self, node: Node) -> Worker:
        """Work for another client; return its worker as rank 0 has it."""
        worker = self._worker_of(node)
        self._worker = replace(
            worker,
            module=self._layout.module,
            optimizer=self._layout.optimizer,
            loss_at=self._together(worker.loss_at),
            clipping=replace(worker.clipping, whole=self._layout.norm),
        )
        return self._worker

    def like(self, name: str) -> Stream:
        """Return tensors of the shapes and types that a stream has in one process.

        Any rank may ask by itself.
        """
        return self._layout.like(self._views([name])[name])

    def put(self, names: list[str], *, streams: Mapping[str, Stream] | None = None) -> None:
        """Write the streams that rank 0 has."""
        with torch.no_grad():
            for name, views in self._views(names).items():
                self._layout.put(views, None if streams is None else streams[name])

    def take(self, names: list[str], *, folder: Path | None = None) -> dict[str, dict[str, Tensor]]:
        """Return the streams, in rank 0."""
        return self._layout.take(names, folder)

    def seed(self, step: int) -> None:
        """Give ADOPT the v that its first step would have."""
        self._worker.seed(step)

    def steps(self, start: int, stop: int, origin: int) -> StepMetrics:
        """Take local steps; the losses are those of whole batches."""
        steps = self._worker.steps(start, stop, origin)
        losses = torch.tensor(steps.losses, dtype=torch.float64, device=self._layout.device)
        dist.all_reduce(losses)
        return replace(steps, losses=(losses / self._layout.scale).tolist())

    def gradient(self, step: int) -> tuple[dict[str, Tensor], StepMetrics]:
        """Return the gradient of a whole batch."""
        grads, steps = self._worker.gradient(step)
        loss = torch.tensor(steps.losses, dtype=torch.float64, device=self._layout.device)
        dist.all_reduce(loss)
        return grads, replace(steps, losses=loss.tolist())

    def evaluate(self) -> Mapping[str, float]:
        """Return the client's totals: a model of which each rank has a share needs all of them."""
        assert self._worker.evaluate is not None
        return self._worker.evaluate()

    def _views(self, names: list[str]) -> dict[str, dict[str, Tensor]]:
        return take(self._layout.module, self._layout.optimizer, names)

    def _together(self, loss_at: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
        """Return a loss whose gradients are summed over the ranks when it returns."""
        params: list[Any] = [p for g in self._layout.optimizer.param_groups for p in g["params"]]

        def share(step: int) -> Iterator[Tensor]:
            yield loss_at(step) * self._layout.scale
            self._layout.sum_gradients()  # its backward pass is through when this goes on

        return lambda step: accumulated(share(step), params)
