"""One local step on the device that is there, to measure what cannot be known before.

The memory of activations depends on a model's code, the device's kernels and the micro-batch.
"""

import gc
import sys
import timeit
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from flower_desloc.app.config import Config
from flower_desloc.app.config.schema import AUTO
from flower_desloc.app.config.units import TEXT
from flower_desloc.app.setup.build import build_optimizer
from flower_desloc.app.setup.machine import gpu_share
from flower_desloc.app.setup.meta_model import offline_task, task_errors
from flower_desloc.app.setup.param_groups import param_groups
from flower_desloc.app.tasks import Batch, Site, Task
from flower_desloc.core.streams import prime

_AUTO_SHARE = 0.8  # of a client's GPU memory; the rest is for evaluations and late averages


@dataclass(frozen=True)
class MeasuredStep:
    """The time and memory of a local step."""

    seconds: float
    """Of a forward and a backward pass."""
    peak: int
    """Bytes of all tensors on a GPU, or of this whole process since it started."""


def measured_step(
    config: Config, device: torch.device, rows: int, data_path: Path | None = None
) -> MeasuredStep:
    """Take a step with ``rows`` examples at once; model and optimizer are built for it.

    The batch is the first of the client with ``data_path``, or of the first simulated one; a batch
    of text is all zeros, and no text is read.

    Raises ``torch.OutOfMemoryError`` if the GPU is too small, and ``ValueError`` for any other
    error.
    """
    whole = rows == config.data.batch_size
    # Without micro-batches, whose size would be halved here.
    data = replace(config.data, batch_size=rows, micro_batch_size=None)
    config = replace(config, data=data)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    with task_errors():
        task = offline_task(config)
        model = task.build_model().to(device).train()
        optimizer = build_optimizer(config, param_groups(config, model))
        prime(optimizer)
        batch = _first_batch(task, config, data_path)

        def act() -> None:
            if whole:  # otherwise the gradients of the rows before are held meanwhile
                optimizer.zero_grad(set_to_none=True)
            task.loss(model, batch).backward()
            if on_gpu:
                torch.cuda.synchronize(device)

        seconds = min(timeit.repeat(act, number=1, repeat=3))
        optimizer.step()
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else _process_peak()
    return MeasuredStep(seconds, peak)


def with_micro_batch_size(
    config: Config, device: torch.device, data_path: Path | None = None, *, is_private: bool = False
) -> Config:
    """Return ``config`` with the number that ``data.micro_batch_size=auto`` is on ``device``.

    On a GPU the batch is halved until a step fits into most of the client's share of the memory:
    of the total and not of what is free, because the size changes the last bits of a gradient. It
    is 1 on a CPU, where the system kills a process that runs out of memory, and with differential
    privacy, which computes each example alone: what fits would tell of the data.
    """
    data = config.data
    if data.micro_batch_size != AUTO:
        return config
    is_measured = device.type == "cuda" and config.privacy.epsilon is None and not is_private
    size = _largest_that_fits(config, device, data_path) if is_measured else 1
    return replace(config, data=replace(data, micro_batch_size=size))


def _largest_that_fits(config: Config, device: torch.device, data_path: Path | None) -> int:
    torch.cuda.set_per_process_memory_fraction(_AUTO_SHARE * gpu_share(config), device.index)
    try:
        return next(
            (n for n in _halved(config.data.batch_size) if _fits(config, device, n, data_path)), 1
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device.index)


def _halved(batch_size: int) -> Iterator[int]:
    """Yield divisors of ``batch_size`` from the largest, each at most half of the one before."""
    size = batch_size
    while size > 1:
        yield size
        size = max(n for n in range(1, size // 2 + 1) if batch_size % n == 0)


def _fits(config: Config, device: torch.device, rows: int, data_path: Path | None) -> bool:
    try:
        measured_step(config, device, rows, data_path)
    except torch.OutOfMemoryError:
        return False
    except ValueError:  # the run has the same error, or halves its micro-batches itself
        return True
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    return True


def _first_batch(task: Task, config: Config, data_path: Path | None) -> Batch:
    if config.task != TEXT:
        site = Site(0, config.simulation.num_clients, data_path)
        return task.client_data(site).train_batch(0)
    # Imported here: transformers takes seconds.
    from flower_desloc.app.tasks.causal_lm import TextBatch

    shape = config.data.batch_size, config.data.seq_len + 1
    return TextBatch(torch.zeros(shape, dtype=torch.int64), num_bytes=0)


def _process_peak() -> int:
    try:
        import resource
    except ModuleNotFoundError:  # on Windows
        memory = psutil.Process().memory_info()
        return int(getattr(memory, "peak_wset", memory.rss))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # kilobytes on Linux
