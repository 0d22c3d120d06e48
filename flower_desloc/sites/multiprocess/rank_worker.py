"""One rank's model, optimizer and data: the methods that rank 0 calls on all ranks."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from flower_desloc.core.averaging import Stream
from flower_desloc.core.local_steps import StepMetrics, accumulated
from flower_desloc.core.streams import prime, take
from flower_desloc.flower.worker import Worker
from flower_desloc.sites.multiprocess.layouts import Replicated, Sharded
from flower_desloc.sites.multiprocess.parallelism import NodeConfig


class RankWorker:
    """Every method is called on all ranks at once, with the same arguments.

    Only rank 0 passes the arguments after ``*``. ``build_worker`` returns the worker of a client by
    its node config; the worker's ``loss_at`` is this rank's share of the loss, and the shares of
    all ranks add up to the mean over the batch.
    """

    def __init__(
        self, layout: Replicated | Sharded, build_worker: Callable[[NodeConfig], Worker]
    ) -> None:
        self._layout = layout
        self._build_worker = build_worker
        prime(layout.optimizer)

    def serve(self, node_config: NodeConfig) -> Worker:
        """Work for the client with that node config from now on; return this rank's worker."""
        worker = self._build_worker(node_config)
        self._worker = replace(
            worker,
            module=self._layout.module,
            optimizer=self._layout.optimizer,
            loss_at=self._with_summed_gradients(worker.loss_at),
            clipping=replace(worker.clipping, whole=self._layout.total_norm),
        )
        return self._worker

    def shapes(self, name: str) -> Stream:
        """Return tensors of a stream's whole shapes and types; any rank may call it alone."""
        return self._layout.shapes(self._views([name])[name])

    def put(self, names: list[str], *, streams: Mapping[str, Stream] | None = None) -> None:
        """Write rank 0's ``streams`` into all ranks."""
        with torch.no_grad():
            for name, views in self._views(names).items():
                self._layout.put(views, None if streams is None else streams[name])

    def take(self, names: list[str], *, folder: Path | None = None) -> dict[str, dict[str, Tensor]]:
        """Return whole streams on rank 0, which may store them in files of ``folder``."""
        return self._layout.take(self._views(names), folder)

    def seed(self, names: list[str], step: int) -> None:
        """Let this rank's optimizer seed the named states."""
        self._worker.seed(names, step)

    def steps(self, start: int, stop: int, origin: int) -> StepMetrics:
        """Take the local steps ``start + 1 .. stop``; the losses are those of whole batches."""
        steps = self._worker.steps(start, stop, origin)
        losses = [loss / self._layout.loss_scale for loss in steps.losses]
        return replace(steps, losses=self._summed(losses))

    def gradient(self, step: int) -> tuple[dict[str, Tensor], StepMetrics]:
        """Return the gradient of the next whole batch."""
        grads, steps = self._worker.gradient(step)
        return grads, replace(steps, losses=self._summed(steps.losses))

    def evaluate(self) -> Mapping[str, float]:
        """Return the client's totals; a sharded model needs all ranks for them."""
        assert self._worker.evaluate is not None
        return self._worker.evaluate()

    def _views(self, names: list[str]) -> dict[str, dict[str, Tensor]]:
        return take(self._layout.module, self._layout.optimizer, names)

    def _summed(self, losses: list[float]) -> list[float]:
        sums = torch.tensor(losses, dtype=torch.float64, device=self._layout.device)
        dist.all_reduce(sums)
        summed: list[float] = sums.tolist()
        return summed

    def _with_summed_gradients(self, loss_at: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
        """Return a loss whose gradients are summed over the ranks when it returns."""
        groups = self._layout.optimizer.param_groups
        params: list[Tensor] = [p for group in groups for p in group["params"]]

        def share(step: int) -> Iterator[Tensor]:
            yield loss_at(step) * self._layout.loss_scale
            self._layout.sum_gradients()  # the backward pass is done when the generator resumes

        return lambda step: accumulated(share(step), params)
