"""The layout ``fsdp``: a share of the model and of the optimizer in each process."""

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from flower_desloc.core.averaging import Stream
from flower_desloc.core.streams import take
from flower_desloc.sites.multiprocess.layout import MakeOptimizer

_ALIGNED = 64


class Sharded:
    """A share of every tensor in each process, by FSDP2: its rows, in order of the ranks.

    The optimizer sees the shares as ordinary tensors, so that ours run on them as they are. It must
    be one that treats every value by itself.

    The processes build their models one after the other: no two lie on the host at once.
    """

    def __init__(
        self, build_model: Callable[[], nn.Module], make: MakeOptimizer, device: torch.device
    ) -> None:
        self.device = device
        self.scale = float(dist.get_world_size())  # FSDP takes the mean over the processes
        self._mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for rank in range(dist.get_world_size()):
            if rank == dist.get_rank():
                self.model = _fully_sharded(build_model(), self._mesh).to(device)
            dist.barrier()
        trained = {k: p for k, p in self.model.named_parameters() if p.requires_grad}
        self._shared: dict[str, DTensor] = {key: _spread(p) for key, p in trained.items()}
        shares = {key: nn.Parameter(p.to_local().detach()) for key, p in self._shared.items()}
        self.module: nn.Module = _Shares(self.model, shares)
        self.optimizer = make(shares.values())

    def sum_gradients(self) -> None:
        """Hand over the gradients, which FSDP has summed, to the shares."""
        shares = dict(self.module.named_parameters())
        for key, p in self._shared.items():
            shares[key].grad = None if p.grad is None else _spread(p.grad).to_local()
            p.grad = None

    def norm(self, norm: Tensor) -> Tensor:
        """Return the norm of all gradients, from that of those in this process."""
        square = norm.square()
        dist.all_reduce(square)
        return square.sqrt()

    def like(self, stream: Stream) -> Stream:
        """Return tensors of the shapes and types that ``stream`` has in one process.

        They have one value each.
        """
        return {
            key: tensor.new_zeros(()).expand(self._shared[key].shape)
            if key in self._shared
            else tensor
            for key, tensor in stream.items()
        }

    def put(self, views: Stream, stream: Stream | None) -> None:
        """Write what rank 0 has in ``stream`` into the ``views`` of every process."""
        for key, view in views.items():
            p = self._shared.get(key)
            if stream is not None:
                whole = stream[key].to(self.device, view.dtype)
            else:
                whole = view.new_empty(view.shape if p is None else p.shape)
            if p is not None:
                whole = distribute_tensor(whole, self._mesh, p.placements).to_local()
            elif whole.numel():
                whole = whole.contiguous()
                dist.broadcast(whole, src=0)
            view.copy_(whole)

    def take(self, names: list[str], folder: Path | None) -> dict[str, dict[str, Tensor]]:
        """Return streams as one process has them, in rank 0; the others return nothing.

        They are gathered tensor by tensor, into a file of ``folder`` that has no name and goes with
        them: what memory has no room for, the disk has.
        """
        streams = take(self.module, self.optimizer, names)
        shapes = {name: self.like(stream) for name, stream in streams.items()}
        result = None if folder is None else _mapped(folder, shapes)
        for name, stream in streams.items():
            for key, share in stream.items():
                whole = self._gathered(key, share)
                if result is not None:
                    result[name][key].copy_(whole)
        return result or {}

    def _gathered(self, key: str, share: Tensor) -> Tensor:
        p = self._shared.get(key)
        if p is None:  # a buffer, of which every process has its own; rank 0's counts
            return share
        return DTensor.from_local(
            share,
            self._mesh,
            p.placements,
            run_check=False,
            shape=p.shape,
            stride=p.stride(),
        ).full_tensor()


class _Shares(nn.Module):
    """A sharded model as this process has it: its own rows, under the parameters' names."""

    def __init__(self, model: nn.Module, shares: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._model = [model]  # not a part of this module, for its parameters are others
        self._own = shares

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._own.items())

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, Tensor]]:
        return self._model[0].named_buffers()

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return self._model[0].state_dict()

    def train(self, mode: bool = True) -> "_Shares":
        self._model[0].train(mode)
        return self


def _fully_sharded(model: nn.Module, mesh: Any) -> nn.Module:
    # What a model repeats is gathered for its own turn alone, the rest together.
    blocks = [b for m in model.modules() if isinstance(m, nn.ModuleList) for b in m]
    for part in (*blocks, model):
        # The outermost too, or its parameters would stay gathered after an evaluation.
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    return model


def _spread(tensor: Tensor) -> DTensor:
    assert isinstance(tensor, DTensor), f"FSDP left a tensor of shape {tuple(tensor.shape)} whole"
    return tensor


def _mapped(folder: Path, like: Mapping[str, Stream]) -> dict[str, dict[str, Tensor]]:
    """Return tensors of those shapes and types in a file of ``folder`` that has no name.

    Raises ``OSError`` when the disk has no room.
    """
    places: dict[tuple[str, str], int] = {}
    end = 0
    for name, stream in like.items():
        for key, tensor in stream.items():
            places[name, key] = end
            end += -(-tensor.numel() * tensor.itemsize // _ALIGNED) * _ALIGNED
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        # All of it now: where a disk is full, writing to a mapping ends the process.
        os.posix_fallocate(file.fileno(), 0, end + 1)
        data = torch.frombuffer(mmap.mmap(file.fileno(), end + 1), dtype=torch.uint8)

    def at(place: int, tensor: Tensor) -> Tensor:
        length = tensor.numel() * tensor.itemsize
        return data[place : place + length].view(tensor.dtype).view(tensor.shape)

    return {
        name: {key: at(places[name, key], tensor) for key, tensor in stream.items()}
        for name, stream in like.items()
    }
