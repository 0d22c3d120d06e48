"""The layout ``ddp``: model and optimizer whole in every process."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_desloc.core.averaging import Stream
from flower_desloc.core.streams import take
from flower_desloc.sites.multiprocess.layout import MakeOptimizer

_BUCKET = 25 << 20  # bytes of gradients summed at once, as DDP does; they are copied meanwhile


class Whole:
    """All of it in every process; the processes hold the same, bit for bit."""

    scale = 1.0

    def __init__(
        self, build_model: Callable[[], nn.Module], make: MakeOptimizer, device: torch.device
    ) -> None:
        self.device = device
        self.model = self.module = build_model().to(device)
        self.optimizer = make(self.module.parameters())

    def sum_gradients(self) -> None:
        """Sum the gradients over the processes; one that none of them has stays away."""
        params = [p for p in _given(self.optimizer) if p.requires_grad]
        had = [p.grad is not None for p in params]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        counts = torch.tensor(had, dtype=torch.int32, device=self.device)
        dist.all_reduce(counts)
        for bucket in _buckets(grads):
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            dist.all_reduce(flat)
            parts = flat.split([grad.numel() for grad in bucket])
            for grad, part in zip(bucket, parts, strict=True):
                grad.copy_(part.view_as(grad))
        if not all(had):  # or there would be a read of the device in every step
            for p, grad, count in zip(params, grads, counts.tolist(), strict=True):
                p.grad = grad if count else None

    def norm(self, norm: Tensor) -> Tensor:
        """Return the norm of all gradients, from that of those in this process."""
        return norm

    def like(self, stream: Stream) -> Stream:
        """Return tensors of the shapes and types that ``stream`` has in one process."""
        return stream

    def put(self, views: Stream, stream: Stream | None) -> None:
        """Write what rank 0 has in ``stream`` into the ``views`` of every process."""
        for key, view in views.items():
            if stream is not None:
                view.copy_(stream[key])
            if view.numel():
                data = view.contiguous()
                dist.broadcast(data, src=0)
                if data is not view:
                    view.copy_(data)

    def take(self, names: list[str], folder: Path | None) -> dict[str, dict[str, Tensor]]:
        """Return streams as one process has them, in rank 0."""
        del folder
        return take(self.module, self.optimizer, names)


def _given(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        full = sum(t.nbytes for t in bucket) + tensor.nbytes > _BUCKET
        if bucket and (full or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
