"""How a loss is computed: where, in what precision, compiled or not, in how many parts."""

import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from flower_desloc.config import Config
from flower_desloc.core.local_steps import accumulated

Loss = Callable[..., Tensor]
"""The mean loss of a model on tensors that have an example a row, ``loss(model, *tensors)``."""


class TrainingLoss:
    """A loss to differentiate, computed as ``model`` and ``data.micro_batch_size`` want it."""

    def __init__(self, loss: Loss, config: Config) -> None:
        self._loss = _Compiled(loss) if config.model.compile else loss
        self._precision = config.model.precision
        self._config = config
        self._size: int | None = None

    def __call__(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the mean loss over the rows of ``tensors``, which may be on the CPU still.

        Parts that a GPU has no memory for are halved from here on, with a warning: the run's last
        bits are then others.
        """
        if self._config.data.micro_batch_size is None:
            return self._mean(model, *tensors)
        while True:
            size = self._size or self._micro_batch_size(model)
            try:
                return self._in_parts(size, model, *tensors)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
            # Out of the handler, or its traceback would hold what is to be freed.
            self._size = size // 2
            model.zero_grad(set_to_none=True)
            logging.getLogger(__name__).warning(
                "data.micro_batch_size: %d are too many for this GPU; going on with %d",
                size,
                self._size,
            )

    def _micro_batch_size(self, model: nn.Module) -> int:
        # Imported when asked for, as it builds tasks.
        from flower_desloc.setup.preflight.needs import micro_batch_size

        self._size = micro_batch_size(self._config, next(model.parameters()).device)
        return self._size

    def _in_parts(self, size: int, model: nn.Module, *tensors: Tensor) -> Tensor:
        rows = len(tensors[0])
        if size >= rows:
            return self._mean(model, *tensors)
        parts = zip(*(tensor.split(size) for tensor in tensors), strict=True)
        return accumulated(
            (self._mean(model, *part) * (len(part[0]) / rows) for part in parts),
            list(model.parameters()),
        )

    def _mean(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        device = next(model.parameters()).device
        with autocast(self._precision, device):
            return self._loss(model, *(to_device(tensor, device) for tensor in tensors))


@runtime_checkable
class SharesBatches(Protocol):
    """What a task has, beside the rest, that can be trained by several processes of one client."""

    def share(self, batch: Any, rank: int, world: int) -> tuple[Any, float]:
        """Return the part of ``batch`` that is for process ``rank`` of ``world``, and its weight.

        The losses of the parts, times their weights, add up to the loss of the batch.
        """


def share_rows(rank: int, world: int, *tensors: Tensor) -> tuple[tuple[Tensor, ...], float]:
    """Return the rows for process ``rank`` of ``world``, and their share of all rows.

    Raises ``ValueError`` when there is not a row for each.
    """
    rows = len(tensors[0])
    if rows < world:
        raise ValueError(
            f"a batch of {rows} is too small for {world} processes; raise data.batch_size, or "
            "lower processes in the node config"
        )
    mine = tuple(tensor.tensor_split(world)[rank] for tensor in tensors)
    return mine, len(mine[0]) / rows


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of a forward pass under ``model.precision``."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``; on CUDA the host goes on before the copy is made."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        # From pageable memory it would wait for all that was queued before.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class _Compiled:
    """A function, compiled when first called; where that fails, as it is."""

    def __init__(self, function: Loss) -> None:
        # The default is a folder of /tmp, and a restart of the machine would cost minutes.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
        self._function = function
        self._compiled: Loss | None = torch.compile(function)

    def __call__(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        if self._compiled is not None:
            try:
                return self._compiled(model, *tensors)
            except Exception as error:
                if not _is_of_the_compiler(error):
                    raise
                self._compiled = None
                logging.getLogger(__name__).warning(
                    "model.compile=true: going on without, as torch.compile failed: %s",
                    " ".join(str(error).split())[:200],
                )
        return self._function(model, *tensors)


def _is_of_the_compiler(error: Exception) -> bool:
    # Not imported: it takes seconds, and has been if the compiler has run.
    module = sys.modules.get("torch._dynamo.exc")
    return module is not None and isinstance(error, module.TorchDynamoException)


def cache_folder() -> Path:
    """Return where this user's files lie that can be made again."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "flower-desloc"
