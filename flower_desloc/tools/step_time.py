"""The time of a local step on this machine, scaled from a smaller one that is timed."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from flower_desloc.config import Config
from flower_desloc.config.units import TEXT, bytes_text
from flower_desloc.setup.machine import memory, num_threads
from flower_desloc.setup.sketch import Sketch, sample

_PARAMS = 50_000_000  # only some blocks of a larger model are timed
_WORK = 5e9  # parameters times tokens: a second on one core
_EXAMPLES = 8  # if the data are not text


@dataclass(frozen=True)
class Timing:
    """The time of a step, and a description of the measurement."""

    seconds: float
    of: str


def timed_step(config: Config, device: torch.device, num_params: int) -> Timing:
    """Return what a local step of a model of ``num_params`` takes on ``device``.

    Its forward and backward pass are assumed to take time in proportion to parameters and tokens.
    Attention grows faster with the sequence, so scaling from shorter sequences underestimates it.
    The optimizer's step is left out; it is small compared with a batch.

    Raises ``ValueError`` if the model or a batch cannot be built or does not fit.
    """
    part = _part(config, num_params)
    rows = part.data.batch_size
    _require_memory(part, device)
    task, batch = sample(part, rows, rows)
    model = task.build_model().to(device).train()
    with num_threads(config.federation.client_cpus):
        seconds = _timed(lambda: task.loss(model, batch).backward(), device)
    larger = num_params / sum(p.numel() for p in model.parameters())
    longer = _examples(config) / _examples(part)
    return Timing(larger * longer * seconds, _description(config, part))


def _part(config: Config, num_params: int) -> Config:
    """Return a configuration with a similar step that takes about a second."""
    data, model = config.data, config.model
    if config.task != TEXT:
        return replace(config, data=replace(data, batch_size=min(data.batch_size, _EXAMPLES)))
    if num_params > _PARAMS:
        one = replace(model, num_hidden_layers=1)
        first = Sketch(replace(config, model=one)).num_params
        if block := (num_params - first) // max(1, model.num_hidden_layers - 1):
            blocks = 1 + max(0, _PARAMS - first) // block
            model = replace(model, num_hidden_layers=min(blocks, model.num_hidden_layers))
            num_params = first + (blocks - 1) * block
    tokens = max(1, int(_WORK / num_params))
    length = min(data.seq_len, max(16, tokens))
    rows = min(data.batch_size, max(1, tokens // length))
    return replace(config, model=model, data=replace(data, seq_len=length, batch_size=rows))


def _require_memory(part: Config, device: torch.device) -> None:
    """Raise ``ValueError`` if the weights and gradients of ``part`` would fill the device."""
    sketch = Sketch(part)
    needs = sketch.weights + sketch.gradients
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory()[1]
    if needs > free:
        raise ValueError(
            f"a part of the model fills {bytes_text(needs)}, {bytes_text(free)} are free"
        )


def _examples(config: Config) -> int:
    """Return the size of a batch: tokens of text, otherwise examples."""
    return config.data.batch_size * (config.data.seq_len if config.task == TEXT else 1)


def _description(config: Config, part: Config) -> str:
    if part.data == config.data and part.model == config.model:
        return "measured here"
    if config.task != TEXT:
        return f"scaled from one of {part.data.batch_size} examples, measured here"
    blocks, rows = part.model.num_hidden_layers, part.data.batch_size
    return (
        f"scaled from one with {blocks} of {config.model.num_hidden_layers} blocks and {rows} x "
        f"{part.data.seq_len} tokens, measured here"
    )


def _timed(act: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the faster of two calls, after one warm-up."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
