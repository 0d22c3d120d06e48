"""How long a step takes on this machine: a part of one is taken, and timed."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from flower_desloc.config import Config
from flower_desloc.config.units import bytes_text
from flower_desloc.setup.preflight.machine import memory
from flower_desloc.setup.preflight.sketch import TEXT, Sketch, sample

_PARAMS = 50_000_000  # of a larger model some blocks are timed
_WORK = 5e9  # parameters times tokens: a second on one core
_EXAMPLES = 8  # of what is not text


@dataclass(frozen=True)
class Timing:
    """A step's time, and what it was scaled from."""

    seconds: float
    of: str


def timed_step(config: Config, device: torch.device, num_params: int) -> Timing:
    """Return what a local step of a model of ``num_params`` takes on ``device``.

    That is its forward and backward pass, taken to need time in proportion to parameters and
    tokens. Attention needs more than that as sequences grow, so that what is scaled from shorter
    ones is too little. The optimizer's own work is left out: beside a batch of some size it is
    little.

    Raises ``ValueError`` where the model or a batch of it cannot be made, or does not fit.
    """
    part = _part(config, num_params)
    rows = part.data.batch_size
    _require_room(part, device)
    task, batch = sample(part, rows, rows)
    model = task.build_model().to(device).train()
    threads = torch.get_num_threads()
    torch.set_num_threads(config.federation.client_cpus)
    try:
        seconds = _timed(lambda: task.loss(model, batch).backward(), device)
    finally:
        torch.set_num_threads(threads)
    larger = num_params / sum(p.numel() for p in model.parameters())
    longer = _examples(config) / _examples(part)
    return Timing(larger * longer * seconds, _what(config, part))


def _part(config: Config, num_params: int) -> Config:
    """Return a configuration whose step is of the same kind, and short."""
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


def _require_room(part: Config, device: torch.device) -> None:
    """Raise ``ValueError`` if the weights and gradients of ``part`` would fill the device."""
    sketch = Sketch(part)
    needs = sketch.weights + sketch.gradients
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory()[1]
    if needs > free:
        raise ValueError(f"a part of one fills {bytes_text(needs)}, {bytes_text(free)} are free")


def _examples(config: Config) -> int:
    """Return the size of a batch: tokens of text, else examples."""
    return config.data.batch_size * (config.data.seq_len if config.task == TEXT else 1)


def _what(config: Config, part: Config) -> str:
    if part.data == config.data and part.model == config.model:
        return "one taken here"
    if config.task != TEXT:
        return f"one taken here with {part.data.batch_size} examples"
    blocks, rows = part.model.num_hidden_layers, part.data.batch_size
    return (
        f"one taken here with {blocks} of {config.model.num_hidden_layers} blocks and {rows} x "
        f"{part.data.seq_len} tokens"
    )


def _timed(act: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the faster of two, after one that warms up."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
