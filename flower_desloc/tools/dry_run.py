"""The report of a dry run: parameters, memory, disk, traffic and time, line by line."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from flower_desloc.config import Config
from flower_desloc.config.schema import AUTO
from flower_desloc.config.units import TEXT, bytes_text, seconds_text
from flower_desloc.core import traffic
from flower_desloc.core.schedule import GRADIENTS
from flower_desloc.plan.wall_clock import MBIT, Link, star_seconds
from flower_desloc.setup.build import build_schedule
from flower_desloc.setup.machine import cores, memory
from flower_desloc.setup.preflight import Hardware, Needs, Parts
from flower_desloc.tools.step_time import timed_step

_LINK = Link(bandwidth=1000 * MBIT, latency=0.05)  # as in `desloc plan`


def full_report(needs: Needs, hardware: Hardware) -> Iterator[str]:
    """Yield the lines of the report; one local step is timed."""
    yield from _model(needs)
    yield _machine()
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
        f"{sketch.num_params:,} parameters; by estimate a client fills {bytes_text(client)} "
        f"{_on(hardware)}, the server {bytes_text(sum(needs.server().values()))}"
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
    if hidden := _not_read(config):
        yield f"not read: {', '.join(hidden)}"


def _not_read(config: Config) -> list[str]:
    """Return the settings of data that a dry run does not read."""
    if config.task != TEXT:
        return []
    keys = ["source"] + ["tokenizer"] * (config.model.vocab_size is not None)
    named = {key: str(getattr(config.data, key)) for key in keys}
    return [f"data.{k}={value}" for k, value in named.items() if value not in ("builtin", "bytes")]


def _machine() -> str:
    total, free = memory()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return (
        f"this machine: {cores()} CPU cores, {bytes_text(total)} of memory, {bytes_text(free)} "
        f"free, {', '.join(gpus) or 'no GPU'}"
    )


def _memory(needs: Needs, hardware: Hardware) -> Iterator[str]:
    config = needs.config
    at_once = f"{hardware.micro_batch} of {config.data.batch_size} at once"
    if not hardware.exists and config.data.micro_batch_size == AUTO:
        at_once += "; auto takes what the GPU holds"
    try:
        yield from _table(
            f"a client needs, {_on(hardware)} ({at_once})",
            needs.client(hardware.device, hardware.micro_batch),
        )
    except ValueError as error:
        yield f"the memory of a step cannot be estimated: {error}"
    if hardware.device.type != "cpu":
        yield from _table("and in the host's memory", needs.host_memory())
    yield from _table("the server needs", needs.server())
    clients = config.federation.num_clients * needs.client_disk()
    yield (
        f"on disk: up to {bytes_text(needs.server_disk())} in the run's folder, and "
        f"{bytes_text(clients)} for the state of {config.federation.num_clients} clients"
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
        times = f"{events[stream]} times {bytes_text(needs.wire[stream])}"
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
        timing = timed_step(config, device, needs.sketch.num_params)
    except ValueError as error:
        yield f"the time of a step cannot be estimated: {error}"
        return
    clients, steps = config.federation.num_clients, config.run.steps
    turns = -(-clients // hardware.at_once)
    here = "GPU" if device.type == "cuda" else "CPU"
    yield f"a step takes {seconds_text(timing.seconds)} on this {here} ({timing.of})"
    if not hardware.exists:
        return
    compute = turns * steps * timing.seconds
    yield f"{clients} clients, {hardware.at_once} at a time, compute {seconds_text(compute)}"
    schedule = build_schedule(config)
    windows = list(schedule.windows(steps))
    sent = sum(traffic.uploads(schedule, needs.wire, steps).desloc.values())
    waiting = star_seconds(sent, clients, replace(_LINK, latency=len(windows) * _LINK.latency))
    yield f"between sites, links of 1 Gbit/s would add {seconds_text(waiting)} (see `desloc plan`)"
    longest = turns * timing.seconds * max(w.stop - w.start for w in windows)
    if longest > config.federation.timeout:
        yield (
            f"beware: a window takes {seconds_text(longest)} here, longer than "
            f"federation.timeout={config.federation.timeout:g} s; set a longer one"
        )
