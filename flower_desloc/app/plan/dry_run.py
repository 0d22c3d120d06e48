"""The report of a dry run: parameters, memory, disk, traffic and time, line by line."""

import timeit
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from flower_desloc.app.config import Config
from flower_desloc.app.config.schema import AUTO
from flower_desloc.app.config.units import (
    TEXT,
    bytes_text,
    count_text,
    precision_text,
    seconds_text,
)
from flower_desloc.app.plan.wall_clock import MBIT, Link, star_seconds
from flower_desloc.app.setup.build import build_schedule
from flower_desloc.app.setup.machine import cores, memory
from flower_desloc.app.setup.preflight import Hardware, Needs, Parts
from flower_desloc.app.setup.sketch import Sketch, estimating, sample
from flower_desloc.core import traffic
from flower_desloc.core.schedule import GRADIENTS
from flower_desloc.flower.inprocess import num_threads

_LINK = Link(bandwidth=1000 * MBIT, latency=0.05)  # as in `desloc plan`
_PARAMS = 50_000_000  # only some blocks of a larger model are timed
_WORK = 5e9  # parameters times tokens: a second on one core
_EXAMPLES = 8  # if the data are not text, and a batch takes long
_LONG = 1.0  # second
_TIMED = 0.5  # seconds of repeated steps


def full_report(needs: Needs, hardware: Hardware) -> Iterator[str]:
    """Yield the lines of the report; one local step is timed."""
    yield from _model(needs)
    total, free = memory()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield (
        f"this machine: {cores()} CPU cores, {bytes_text(total)} of memory, {bytes_text(free)} "
        f"free, {', '.join(gpus) or 'no GPU'}"
    )
    yield from _memory(needs, hardware)
    yield from _bytes(needs)
    yield from _time(needs, hardware)


def memory_line(needs: Needs, hardware: Hardware) -> Iterator[str]:
    """Yield the one line that is printed before a run starts, if its memory can be estimated."""
    sketch = needs.sketch
    try:
        client = sum(needs.client(hardware.device, hardware.micro_batch).values())
    except ValueError:
        return
    yield (
        f"{sketch.num_params:,} parameters, computed in {precision_text(needs.config.model)}; by "
        f"estimate a client fills {bytes_text(client)} {_on(hardware)}, the server "
        f"{bytes_text(sum(needs.server().values()))}"
    )


def _on(hardware: Hardware) -> str:
    return "on the CPU" if hardware.device.type == "cpu" else "on a GPU"


def _model(needs: Needs) -> Iterator[str]:
    sketch, config = needs.sketch, needs.config
    rest = sketch.num_params - sketch.num_embeddings
    yield (
        f"{sketch.num_params:,} parameters: {sketch.num_embeddings:,} in embeddings, "
        f"{rest:,} in the rest"
    )
    if config.task == TEXT:
        keys = ["source"] + ["tokenizer"] * (config.model.vocab_size is not None)
        named = {key: str(getattr(config.data, key)) for key in keys}
        hidden = [f"data.{k}={v}" for k, v in named.items() if v not in ("builtin", "bytes")]
        if hidden:
            yield f"not read: {', '.join(hidden)}"


def _memory(needs: Needs, hardware: Hardware) -> Iterator[str]:
    config = needs.config
    at_once = f"{hardware.micro_batch} of {config.data.batch_size} at once"
    at_once += f" in {precision_text(config.model)}"
    if not hardware.exists and config.data.micro_batch_size == AUTO:
        at_once += "; auto takes what the GPU holds"
    try:
        yield from _table(
            f"a client needs, {_on(hardware)} ({at_once})",
            needs.client(hardware.device, hardware.micro_batch),
        )
    except ValueError as error:
        yield f"the memory of a step cannot be estimated: {error}"
    try:
        needs.sketch.evaluation_bytes(hardware.micro_batch)
    except ValueError as error:
        yield f"the memory of an evaluation cannot be estimated, and is not counted: {error}"
    if hardware.device.type != "cpu":
        yield from _table("and in the host's memory", needs.host_memory())
    yield from _table("the server needs", needs.server())
    clients = config.simulation.num_clients * needs.client_disk()
    yield (
        f"on disk: up to {bytes_text(needs.server_disk())} in the run's folder, and "
        f"{bytes_text(clients)} for the state of {config.simulation.num_clients} clients"
    )


def _table(title: str, parts: Parts) -> Iterator[str]:
    yield f"{title}: {bytes_text(sum(parts.values()))}"
    for what, count in parts.items():
        if count:
            yield f"  {what:<40} {bytes_text(count):>10}"


def _bytes(needs: Needs) -> Iterator[str]:
    config = needs.config
    schedule, steps = build_schedule(config), config.run.steps
    events = schedule.num_events(steps)
    uploads = traffic.uploads(schedule, needs.sizes, steps, needs.wire)
    sent = uploads.desloc
    yield f"each client will send, in {steps} steps:"
    for stream, count in sent.items():
        times = f"{count_text(events[stream], 'time')} {bytes_text(needs.wire[stream])}"
        yield f"  {stream:<16} {times:>24} {bytes_text(count):>10}"
    total = sum(sent.values())
    yield f"  {'total':<16} {'':>24} {bytes_text(total):>10}"
    windows = traffic.window_bytes(schedule, needs.wire, steps)
    yield (
        f"in {len(windows)} windows, each from {bytes_text(min(windows))} to "
        f"{bytes_text(max(windows))}"
    )
    if config.strategy == "desloc":
        sizes = {name: size for name, size in needs.sizes.items() if name != GRADIENTS}
        federated = config.evaluation.federated
        down = traffic.download_bytes(schedule, sizes, needs.wire, steps, federated=federated)
        yield f"and will receive {bytes_text(sum(down.values()))}"
    others = {"Local Adam": sum(uploads.local_adam.values()), "DDP": uploads.ddp}
    for name, other in others.items():
        if other and total:
            yield f"{name} would send {bytes_text(other)}, {other / total:.2f} times as much"


def _time(needs: Needs, hardware: Hardware) -> Iterator[str]:
    config = needs.config
    device = hardware.device if hardware.exists else torch.device("cpu")
    try:
        seconds, how = timed_step(config, device, needs.sketch.num_params)
    except ValueError as error:
        yield f"the time of a step cannot be estimated: {error}"
        return
    clients, steps = config.simulation.num_clients, config.run.steps
    turns = -(-clients // hardware.at_once)
    here = "GPU" if device.type == "cuda" else "CPU"
    yield f"a step takes {seconds_text(seconds)} on this {here} ({how})"
    if not hardware.exists:
        return
    compute = turns * steps * seconds
    yield f"{clients} clients, {hardware.at_once} at a time, compute {seconds_text(compute)}"
    schedule = build_schedule(config)
    windows = list(schedule.windows(steps))
    sent = sum(traffic.uploads(schedule, needs.wire, steps).desloc.values())
    waiting = star_seconds(sent, clients, replace(_LINK, latency=len(windows) * _LINK.latency))
    yield f"between sites, links of 1 Gbit/s would add {seconds_text(waiting)} (see `desloc plan`)"
    longest = turns * seconds * max(w.stop - w.start for w in windows)
    if longest > config.federation.timeout:
        yield (
            f"beware: a window takes {seconds_text(longest)} here, longer than "
            f"federation.timeout={config.federation.timeout:g} s; set a longer one"
        )


def timed_step(config: Config, device: torch.device, num_params: int) -> tuple[float, str]:
    """Return the seconds of a local step of a model of ``num_params``, and how they were measured.

    Its forward and backward pass are assumed to take time in proportion to parameters and tokens.
    Attention grows faster with the sequence, so scaling from shorter sequences underestimates it.
    The optimizer's step is left out; it is small compared with a batch.

    Raises ``ValueError`` if the model or a batch cannot be built or does not fit.
    """
    part = _part(config, num_params)
    _require_memory(part, device)
    seconds = _scaled(config, part, device, num_params)
    # A batch of examples has fixed costs, so it is not scaled if it is short, and fits as in a run.
    if config.task != TEXT and seconds < _LONG and config.data.micro_batch_size is None:
        part = config
        seconds = _scaled(config, part, device, num_params)
    return seconds, _description(config, part)


def _scaled(config: Config, part: Config, device: torch.device, num_params: int) -> float:
    """Return the seconds of a step of ``config``, from timing ``part``."""
    rows = part.data.batch_size
    with num_threads(config.simulation.client_cpus), estimating():
        task, batch = sample(part, rows, rows)
        model = task.build_model().to(device).train()
        seconds = _timed(lambda: task.loss(model, batch).backward(), device)
    larger = num_params / sum(p.numel() for p in model.parameters())
    longer = config.data.batch_size / rows
    if config.task == TEXT:
        longer *= config.data.seq_len / part.data.seq_len
    return larger * longer * seconds


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
    """Return the seconds of the fastest of several calls, after one warm-up.

    Other load on the machine only makes a call slower; of short calls there are more.
    """

    def act_to_end() -> None:
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    _, first = timeit.repeat(act_to_end, number=1, repeat=2)
    more = max(1, min(50, int(_TIMED / first)))
    return min(first, *timeit.repeat(act_to_end, number=1, repeat=more))
