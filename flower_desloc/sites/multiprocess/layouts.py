"""How a model and its optimizer are distributed over a client's processes: replicas or shards.

Streams have the parameters' names, as in :mod:`flower_desloc.core.streams`. Every method except
``shapes`` is called on all ranks at once.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from flower_desloc.core.averaging import Stream

BuildModel = Callable[[], nn.Module]
BuildOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class Replicated:
    """``ddp``: the whole model and optimizer in every process, equal bit for bit.

    Not ``DistributedDataParallel``: it requires every rank to go through the wrapped model equally
    often, so a loss could not call a part of the model, and ranks with different numbers of rows
    could not choose their own micro-batches.
    """

    loss_scale = 1.0
    """Factor of a rank's share of the loss before the backward pass."""

    def __init__(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, device: torch.device
    ) -> None:
        self.device = device
        self.model = build_model().to(device)
        """What the loss is computed with."""
        self.module = self.model
        """What holds the parameters that the optimizer trains."""
        self.optimizer = build_optimizer(self.module.parameters())

    def sum_gradients(self) -> None:
        """Sum the gradients over the ranks; a gradient that no rank has stays None."""
        given = [p for group in self.optimizer.param_groups for p in group["params"]]
        params = [p for p in given if p.requires_grad]
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

    def total_norm(self, norm: Tensor) -> Tensor:
        """Return the norm of all gradients, from the norm of those in this process."""
        return norm

    def shapes(self, stream: Stream) -> Stream:
        """Return tensors of the shapes and types that ``stream`` has in a single process."""
        return stream

    def put(self, views: Stream, stream: Stream | None) -> None:
        """Write ``stream``, which only rank 0 has, into the ``views`` of every rank."""
        for key, view in views.items():
            if stream is not None:
                view.copy_(stream[key])
            _broadcast(view)

    def take(
        self, streams: Mapping[str, Stream], folder: Path | None
    ) -> dict[str, dict[str, Tensor]]:
        """Return whole streams on rank 0, which may store them in files of ``folder``."""
        del folder
        return {name: dict(stream) for name, stream in streams.items()}


class Sharded:
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
            key: p for key, p in self.model.named_parameters() if p.requires_grad
        }
        shards = {key: nn.Parameter(p.to_local().detach()) for key, p in self._params.items()}
        self.module: nn.Module = _Shards(self.model, shards)
        self.optimizer = build_optimizer(shards.values())

    def sum_gradients(self) -> None:
        """Hand the gradients, which FSDP has summed, over to the shards."""
        shards = dict(self.module.named_parameters())
        for key, p in self._params.items():
            shards[key].grad = None if p.grad is None else p.grad.to_local()
            p.grad = None

    def total_norm(self, norm: Tensor) -> Tensor:
        """Return the norm of all gradients, from the norm of those in this process."""
        square = norm.square()
        dist.all_reduce(square)
        return square.sqrt()

    def shapes(self, stream: Stream) -> Stream:
        """Return tensors of the shapes and types that ``stream`` has in a single process.

        Each is a single value, expanded.
        """
        return {
            key: shard.new_zeros(()).expand(self._params[key].shape)
            if key in self._params
            else shard
            for key, shard in stream.items()
        }

    def put(self, views: Stream, stream: Stream | None) -> None:
        """Write ``stream``, which only rank 0 has, into the ``views`` of every rank."""
        # Imported here, as fully_shard.
        from torch.distributed.tensor import distribute_tensor

        for key, like in self.shapes(views).items():
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

    def take(
        self, streams: Mapping[str, Stream], folder: Path | None
    ) -> dict[str, dict[str, Tensor]]:
        """Return whole streams on rank 0, which may store them in files of ``folder``."""
        result: dict[str, dict[str, Tensor]] = {name: {} for name in streams}
        for name, stream in streams.items():
            for key, shard in stream.items():
                whole = self._gathered(key, shard)
                if folder is not None:
                    result[name][key] = _on_disk(folder, whole)
        return result

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

    The kernel can evict the file from memory. Raises ``OSError`` when the disk
    is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        # Allocated now: writing to a mapping on a full disk would end the process.
        os.posix_fallocate(file.fileno(), 0, (tensor.numel() + 1) * tensor.itemsize)
        mapped = torch.from_file(
            file.name, shared=True, size=tensor.numel() + 1, dtype=tensor.dtype
        )
    return mapped[:-1].view(tensor.shape).copy_(tensor)
