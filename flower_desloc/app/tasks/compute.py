"""Losses and evaluations: device, precision, ``torch.compile`` and micro-batches."""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from flower_desloc.app.config import Config
from flower_desloc.app.config.errors import one_line
from flower_desloc.app.config.schema import AUTO
from flower_desloc.core.accumulation import accumulated
from flower_desloc.flower.system import cache_folder

Loss = Callable[..., Tensor]
"""``loss(model, *tensors)``: the mean loss of a model on tensors with one example in each row."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class MicroBatches:
    """The rows that go through the model at once, ``data.micro_batch_size``.

    ``auto`` begins with the whole batch on a GPU and is 1 on a CPU, where the system kills a
    process that runs out of memory. A client finds its number before the task is built.
    """

    def __init__(self, config: Config) -> None:
        self._batch_size, self._size = config.data.batch_size, config.data.micro_batch_size

    def fitting(
        self, device: torch.device, act: Callable[[int | None], T], retry: Callable[[], object]
    ) -> T:
        """Return ``act(size)``; None is a whole batch.

        When the GPU runs out of memory, the size is halved for the rest of the run, with a warning:
        sums over the parts then differ in the last bits. ``retry`` is called before the next try.
        """
        if self._size == AUTO:
            self._size = self._batch_size if device.type == "cuda" else 1
        while True:
            size = None if self._size is None else int(self._size)
            try:
                return act(size)
            except torch.OutOfMemoryError:
                if size is None or size == 1:
                    raise
            # Outside the handler: its traceback references the tensors that are to be freed.
            self._size = size // 2
            retry()
            _log.warning(
                "data.micro_batch_size: %d are too many for this GPU; going on with %d",
                size,
                self._size,
            )


class TrainingLoss:
    """A loss to differentiate, computed as ``model`` and ``data.micro_batch_size`` state."""

    def __init__(self, loss: Loss, config: Config) -> None:
        self._loss = Compiled(loss) if config.model.compile else loss
        self._precision = config.model.precision
        self._micro_batches = MicroBatches(config)

    def __call__(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the mean loss over the rows of ``tensors``, which are moved to the model's device.

        When the GPU runs out of memory, the size of a micro-batch is halved for the rest of the
        run, with a warning: the sum of the gradients then differs in the last bits.
        """
        return self._micro_batches.fitting(
            next(model.parameters()).device,
            lambda size: self._in_parts(size, model, *tensors),
            retry=lambda: model.zero_grad(set_to_none=True),
        )

    def _in_parts(self, size: int | None, model: nn.Module, *tensors: Tensor) -> Tensor:
        rows = len(tensors[0])
        if size is None or size >= rows:
            return self._mean(model, *tensors)
        return accumulated(
            (self._mean(model, *part) * (len(part[0]) / rows) for part in _parts(size, tensors)),
            list(model.parameters()),
        )

    def _mean(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        device = next(model.parameters()).device
        with autocast(self._precision, device):
            return self._loss(model, *(to_device(tensor, device) for tensor in tensors))


class Evaluator(Generic[T]):
    """What a task measures, without gradients, in the run's precision and in micro-batches.

    ``measure(model, *tensors)`` gets the rows that go through the model at once, on its device.
    """

    def __init__(self, measure: Callable[..., T], config: Config) -> None:
        self._measure = measure
        self._precision = config.model.precision
        self._micro_batches = MicroBatches(config)

    def __call__(self, model: nn.Module, *tensors: Tensor) -> list[T]:
        """Return what is measured for each micro-batch, with the model in evaluation mode."""
        return self._micro_batches.fitting(
            next(model.parameters()).device,
            lambda size: self._in_parts(size, model, *tensors),
            retry=lambda: None,
        )

    def _in_parts(self, size: int | None, model: nn.Module, *tensors: Tensor) -> list[T]:
        device = next(model.parameters()).device
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad(), autocast(self._precision, device):
                return [
                    self._measure(model, *(to_device(tensor, device) for tensor in part))
                    for part in _parts(size or len(tensors[0]), tensors)
                ]
        finally:
            model.train(was_training)


def _parts(size: int, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


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
