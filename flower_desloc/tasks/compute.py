"""Training losses: device, precision, ``torch.compile`` and micro-batches."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from flower_desloc.config import Config
from flower_desloc.config.errors import one_line
from flower_desloc.config.schema import AUTO
from flower_desloc.core.accumulation import accumulated
from flower_desloc.flower.system import cache_folder

Loss = Callable[..., Tensor]
"""``loss(model, *tensors)``: the mean loss of a model on tensors with one example in each row."""

_log = logging.getLogger(__name__)


class TrainingLoss:
    """A loss to differentiate, computed as ``model`` and ``data.micro_batch_size`` state.

    ``data.micro_batch_size=auto`` is the whole batch here: the client apps replace it by a number
    before they build the task.
    """

    def __init__(self, loss: Loss, config: Config) -> None:
        self._loss = Compiled(loss) if config.model.compile else loss
        self._precision = config.model.precision
        size = config.data.micro_batch_size
        self._micro_batch_size = config.data.batch_size if size == AUTO else size

    def __call__(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the mean loss over the rows of ``tensors``, which are moved to the model's device.

        When the GPU runs out of memory, the size of a micro-batch is halved for the rest of the
        run, with a warning: the sum of the gradients then differs in the last bits.
        """
        if self._micro_batch_size is None:
            return self._mean(model, *tensors)
        while True:
            size = int(self._micro_batch_size)
            try:
                return self._in_parts(size, model, *tensors)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
            # Outside the handler: its traceback references the tensors that are to be freed.
            self._micro_batch_size = size // 2
            model.zero_grad(set_to_none=True)
            _log.warning(
                "data.micro_batch_size: %d are too many for this GPU; going on with %d",
                size,
                self._micro_batch_size,
            )

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


@contextmanager
def evaluating(model: nn.Module, config: Config) -> Iterator[torch.device]:
    """Put the model into evaluation mode, without gradients, in the run's precision.

    Yields the model's device.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), autocast(config.model.precision, device):
            yield device
    finally:
        model.train(was_training)


@runtime_checkable
class SharesBatches(Protocol):
    """A task that several processes of one client can train together."""

    def share(self, batch: Any, rank: int, world: int) -> tuple[Any, float]:
        """Return the part of ``batch`` for process ``rank`` of ``world``, and its weight.

        The losses of the parts, times their weights, add up to the loss of the batch.
        """


def share_rows(rank: int, world: int, *tensors: Tensor) -> tuple[tuple[Tensor, ...], float]:
    """Return the rows for process ``rank`` of ``world``, and their fraction of all rows.

    Raises ``ValueError`` if there is not one row for each process.
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
    """Return ``tensor`` on ``device``; a copy to CUDA does not block the host."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        # From pageable memory the copy would wait for all work that was queued before.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Compiled:
    """A function under ``torch.compile`` with ``options``, compiled when first called.

    If the compiler fails, it logs a warning and calls the function itself from then on.
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        # The default is a folder of /tmp: after a reboot everything would be compiled again.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
        self._function = function
        self._compiled: Callable[..., Any] | None = torch.compile(function, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled function."""
        if self._compiled is not None:
            try:
                return self._compiled(*args, **kwargs)
            except Exception as error:
                if not _is_compiler_error(error):
                    raise
                self._compiled = None
                _log.warning(
                    "model.compile=true: going on without, as torch.compile failed: %s",
                    one_line(error)[:200],
                )
        return self._function(*args, **kwargs)


def _is_compiler_error(error: Exception) -> bool:
    # Not imported, which takes seconds: if the compiler has run, the module is there.
    module = sys.modules.get("torch._dynamo.exc")
    return module is not None and isinstance(error, module.TorchDynamoException)
