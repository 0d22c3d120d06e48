"""One rank's model, optimizer and data: the methods that rank 0 calls on all ranks.

The model and its optimizer are distributed over a client's ranks as replicas or as shards. Streams
have the parameters' names, as in ``flower_desloc.core.streams``.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from flower_desloc.app.sites.multiprocess.parallelism import NodeConfig
from flower_desloc.core.accumulation import accumulated
from flower_desloc.core.streams import parameters, prime, take, trained_by
from flower_desloc.core.types import Stream
from flower_desloc.core.worker import StepMetrics, Worker

BuildModel = Callable[[], nn.Module]
BuildOptimizer = Callable[[nn.Module, Mapping[str, nn.Parameter]], Optimizer]
"""Makes the optimizer of a model's trained parameters from these or their shards, by name."""


class RankWorker:
    """``ddp``: the whole model and optimizer in every process, equal bit for bit.

    Every public method but ``shapes`` is called on all ranks at once, with the same arguments. Only
    rank 0 passes the arguments after ``*``.

    Not ``DistributedDataParallel``: it requires every rank to go through the wrapped model equally
    often, so a loss could not call a part of the model, and ranks with different numbers of rows
    could not choose their own micro-batches.
    """

    loss_scale = 1.0
    """Factor of a rank's share of the loss before the backward pass."""
    build_worker: Callable[[NodeConfig], Worker]
    """Returns the worker of a client by its node config. Its ``loss_at`` is this rank's share of
    the loss; the shares of all ranks add up to the mean over the batch."""

    def __init__(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, device: torch.device
    ) -> None:
        self.device = device
        self.model: nn.Module = build_model().to(device)
        """Module that the loss is computed with."""
        self.module = self.model
        """Module with the parameters that the optimizer trains."""
        trained = {key: p for key, p in parameters(self.model).items() if p.requires_grad}
        self.optimizer = build_optimizer(self.model, trained)
        prime(self.optimizer)

    def serve(self, node_config: NodeConfig) -> Worker:
        """Work for the client with that node config from now on; return this rank's worker."""
        worker = self.build_worker(node_config)
        self._worker = replace(
            worker,
            module=self.module,
            optimizer=self.optimizer,
            loss_at=self._with_summed_gradients(worker.loss_at),
            clipping=replace(worker.clipping, whole=self._total_norm),
        )
        return self._worker

    def shapes(self, name: str) -> Stream:
        """Return tensors of the shapes and types that a stream has in a single process."""
        return self._whole_shapes(self._views([name])[name])

    def put(self, names: list[str], *, streams: Mapping[str, Stream] | None = None) -> None:
        """Write rank 0's ``streams`` into all ranks."""
        with torch.no_grad():
            for name, views in self._views(names).items():
                self._put(views, None if streams is None else streams[name])

    def take(self, names: list[str], *, folder: Path | None = None) -> dict[str, dict[str, Tensor]]:
        """Return whole streams on rank 0, which may store them in files of ``folder``."""
        del folder
        return self._views(names)

    def seed(self, names: list[str], step: int) -> None:
        """Let this rank's optimizer seed the named states."""
        self._worker.seed(names, step)

    def steps(self, start: int, stop: int, origin: int) -> StepMetrics:
        """Take the local steps ``start + 1 .. stop``; the losses are those of whole batches."""
        steps = self._worker.steps(start, stop, origin)
        losses = [loss / self.loss_scale for loss in steps.losses]
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
        return take(self.module, self.optimizer, names)

    def _sum_gradients(self) -> None:
        """Sum the gradients over the ranks; a gradient that no rank has stays None."""
        params = trained_by(self.optimizer)
        missing = [p for p in params if p.grad is None]
        present = [int(p.grad is not None) for p in params]
        counts = torch.tensor(present, dtype=torch.int32, device=self.device)
        for p in missing:
            p.grad = torch.zeros_like(p)
        works = [dist.all_reduce(t, async_op=True) for t in (counts, *(p.grad for p in params))]
        for work in works:
            work.wait()
        if missing:  # only then, because it waits for the device
            for p, count in zip(params, counts.tolist(), strict=True):
                p.grad = p.grad if count else None

    def _total_norm(self, norm: Tensor) -> Tensor:
        """Return the norm of all gradients, from the norm of those in this process."""
        return norm

    def _whole_shapes(self, views: Stream) -> Stream:
        """Return tensors of the whole shapes of ``views``."""
        return views

    def _put(self, views: Stream, stream: Stream | None) -> None:
        """Write ``stream``, which only rank 0 has, into the ``views`` of every rank."""
        for key, view in views.items():
            if stream is not None:
                view.copy_(stream[key])
            _broadcast(view)

    def _summed(self, losses: list[float]) -> list[float]:
        sums = torch.tensor(losses, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        summed: list[float] = sums.tolist()
        return summed

    def _with_summed_gradients(self, loss_at: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
        """Return a loss whose gradients are summed over the ranks when it returns."""

        def share(step: int) -> Iterator[Tensor]:
            yield loss_at(step) * self.loss_scale
            self._sum_gradients()  # the backward pass is done when the generator resumes

        return lambda step: accumulated(share(step), trained_by(self.optimizer))


class ShardedRankWorker(RankWorker):
    """``fsdp``: a shard of every parameter in each process, by FSDP2.

    The optimizer sees the shards as ordinary tensors, so any optimizer works that treats every
    value by itself. Streams are distributed and gathered one tensor at a time. Not
    ``torch.distributed.checkpoint.state_dict``: its helpers gather all states at once, and name a
    tied weight twice.
    """

    def __init__(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, device: torch.device
    ) -> None:
        # Imported here, because it takes a second that replicas need not spend.
        from torch.distributed.fsdp import fully_shard

        self.device = device
        self.loss_scale = float(dist.get_world_size())  # FSDP averages gradients over the ranks
        self._mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for rank in range(dist.get_world_size()):
            if rank == dist.get_rank():  # in turn: the host holds one whole model at a time
                self.model = build_model()
                lists = [m for m in self.model.modules() if isinstance(m, nn.ModuleList)]
                # Repeated blocks are gathered one at a time, everything else together.
                for part in (*(block for blocks in lists for block in blocks), self.model):
                    # The root as well: it would otherwise stay gathered after an evaluation.
                    fully_shard(part, mesh=self._mesh, reshard_after_forward=True)
                self.model.to(device)
            dist.barrier()
        self._params: dict[str, Any] = {
            key: p for key, p in parameters(self.model).items() if p.requires_grad
        }
        shards = {key: nn.Parameter(p.to_local().detach()) for key, p in self._params.items()}
        self.module: nn.Module = _Shards(self.model, shards)
        self.optimizer = build_optimizer(self.model, shards)
        prime(self.optimizer)

    def take(self, names: list[str], *, folder: Path | None = None) -> dict[str, dict[str, Tensor]]:
        """Return whole streams on rank 0, which may store them in files of ``folder``."""
        result: dict[str, dict[str, Tensor]] = {name: {} for name in names}
        for name, stream in self._views(names).items():
            for key, shard in stream.items():
                whole = self._gathered(key, shard)
                if folder is not None:
                    result[name][key] = _on_disk(folder, whole)
        return result

    def _sum_gradients(self) -> None:
        # FSDP has summed the gradients.
        shards = dict(self.module.named_parameters())
        for key, p in self._params.items():
            shards[key].grad = None if p.grad is None else p.grad.to_local()
            p.grad = None

    def _total_norm(self, norm: Tensor) -> Tensor:
        square = norm.square()
        dist.all_reduce(square)
        return square.sqrt()

    def _whole_shapes(self, views: Stream) -> Stream:
        # Each is a single value, expanded.
        return {
            key: view.new_zeros(()).expand(self._params[key].shape) if key in self._params else view
            for key, view in views.items()
        }

    def _put(self, views: Stream, stream: Stream | None) -> None:
        # Imported here, as fully_shard.
        from torch.distributed.tensor import distribute_tensor

        for key, like in self._whole_shapes(views).items():
            view, p = views[key], self._params.get(key)
            if stream is not None:
                whole = stream[key].to(self.device, view.dtype)
            else:
                whole = view.new_empty(like.shape)
            if p is None:
                view.copy_(whole)
                _broadcast(view)
            else:
                view.copy_(distribute_tensor(whole, self._mesh, p.placements).to_local())

    def _gathered(self, key: str, shard: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        if key not in self._params:  # a buffer, of which each rank has its own
            return shard
        p = self._params[key]
        whole = DTensor.from_local(
            shard, self._mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )
        return whole.full_tensor()


class _Shards(nn.Module):
    """A sharded model seen from one process: its own shards, under the parameters' names."""

    def __init__(self, model: nn.Module, shards: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._model = [model]  # in a list, so that its parameters are not this module's
        self._shards = shards

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._shards.items())

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, Tensor]]:
        return self._model[0].named_buffers()

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return self._model[0].state_dict()

    def train(self, mode: bool = True) -> "_Shards":
        self._model[0].train(mode)
        return self


def _broadcast(view: Tensor) -> None:
    """Copy rank 0's values into the ``view`` of every rank."""
    if view.numel():
        data = view.contiguous()
        dist.broadcast(data, src=0)
        view.copy_(data)


def _on_disk(folder: Path, tensor: Tensor) -> Tensor:
    """Return a copy of ``tensor`` in a mapped file of ``folder``, which is deleted with it.

    The kernel can evict the file from memory. Raises ``OSError`` when the disk is full.
    """
    if not tensor.numel():
        return tensor.cpu()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        file.flush()
        mapped = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return mapped.view(tensor.shape)
