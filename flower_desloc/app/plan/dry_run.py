"""The report of a dry run: parameters, memory, disk, traffic, and one measured step."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from flower_desloc.app.config.check import why_not_evaluated
from flower_desloc.app.config.schema import AUTO
from flower_desloc.app.config.units import (
    TEXT,
    bytes_text,
    count_text,
    precision_text,
    seconds_text,
)
from flower_desloc.app.plan.wall_clock import Link, star_seconds
from flower_desloc.app.setup.machine import cores, device_memory, memory
from flower_desloc.app.setup.measured_step import measured_step, with_micro_batch_size
from flower_desloc.app.setup.preflight import ByPurpose, Hardware, Needs
from flower_desloc.core import traffic
from flower_desloc.core.schedule import GRADIENTS
from flower_desloc.flower.inprocess import num_threads

_LINK = Link()  # as in `desloc plan`
_WORK = 5e9  # parameters times tokens: on one core they take seconds
_EXAMPLES = 8  # on a CPU, if the data are not text


def full_report(needs: Needs, hardware: Hardware) -> Iterator[str]:
    """Yield the lines of the report; one local step is measured."""
    yield from _model(needs)
    total, free = memory()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield (
        f"this machine: {cores()} CPU cores, {bytes_text(total)} of memory, {bytes_text(free)} "
        f"free, {', '.join(gpus) or 'no GPU'}"
    )
    yield from _memory(needs, hardware)
    yield from _bytes(needs)
    try:
        yield from _step(needs, hardware)
    except ValueError as error:
        yield f"no step is measured: {error}"


def memory_line(needs: Needs, hardware: Hardware) -> str:
    """Return the one line that is printed before a run starts."""
    return (
        f"{needs.num_params:,} parameters, computed in {precision_text(needs.config.model)}; "
        f"without activations a client needs {_total(needs.client_bytes(hardware.device))} "
        f"{_on(hardware)}, the server {_total(needs.server_bytes())}"
    )


def _on(hardware: Hardware) -> str:
    return "on the CPU" if hardware.device.type == "cpu" else "on a GPU"


def _total(parts: ByPurpose) -> str:
    return bytes_text(sum(parts.values()))


def _model(needs: Needs) -> Iterator[str]:
    config = needs.config
    tables = [m.weight for m in needs.model.modules() if isinstance(m, nn.Embedding)]
    embeddings = sum({id(table): table.numel() for table in tables}.values())
    yield (
        f"{needs.num_params:,} parameters: {embeddings:,} in embeddings, "
        f"{needs.num_params - embeddings:,} in the rest"
    )
    if config.task == TEXT:
        keys = ["source"] + ["tokenizer"] * (config.model.vocab_size is not None)
        named = {key: str(getattr(config.data, key)) for key in keys}
        hidden = [f"data.{k}={v}" for k, v in named.items() if v not in ("builtin", "bytes")]
        if hidden:
            yield f"not read: {', '.join(hidden)}"


def _memory(needs: Needs, hardware: Hardware) -> Iterator[str]:
    yield from _table(f"a client needs, {_on(hardware)}", needs.client_bytes(hardware.device))
    if hardware.device.type != "cpu":
        yield from _table("and in the host's memory", needs.host_bytes())
    yield from _table("the server needs", needs.server_bytes())
    yield (
        "not counted: activations, which data.micro_batch_size bounds; auto takes as many examples "
        "at once as fit on a GPU, and 1 on a CPU"
    )
    config = needs.config
    clients = config.simulation.num_clients * needs.client_disk_bytes()
    yield (
        f"on disk: up to {bytes_text(needs.server_disk_bytes())} in the run's folder, and "
        f"{bytes_text(clients)} for the state of {config.simulation.num_clients} clients"
    )


def _table(title: str, parts: ByPurpose) -> Iterator[str]:
    yield f"{title}: {_total(parts)}"
    for what, count in parts.items():
        if count:
            yield f"  {what:<40} {bytes_text(count):>10}"


def _bytes(needs: Needs) -> Iterator[str]:
    config = needs.config
    schedule, steps = needs.schedule, config.run.steps
    events = schedule.num_events(steps)
    uploads = traffic.uploads(schedule, needs.sizes, steps, needs.sent_up)
    sent = uploads.desloc
    yield f"each client will send, in {steps} steps:"
    for stream, count in sent.items():
        times = f"{count_text(events[stream], 'time')} {bytes_text(needs.sent_up[stream])}"
        yield f"  {stream:<16} {times:>24} {bytes_text(count):>10}"
    total = sum(sent.values())
    yield f"  {'total':<16} {'':>24} {bytes_text(total):>10}"
    windows = traffic.window_bytes(schedule, needs.sent_up, steps)
    yield (
        f"in {len(windows)} windows, each from {bytes_text(min(windows))} to "
        f"{bytes_text(max(windows))}"
    )
    if config.is_desloc:
        sizes = {name: size for name, size in needs.sizes.items() if name != GRADIENTS}
        federated = why_not_evaluated(config, "federated") is None
        down = traffic.download_bytes(schedule, sizes, needs.compressed, steps, federated=federated)
        yield f"and will receive {bytes_text(sum(down.values()))}"
    others = {"Local Adam": sum(uploads.local_adam.values()), "DDP": uploads.ddp}
    for name, other in others.items():
        if other and total:
            yield f"{name} would send {bytes_text(other)}, {other / total:.2f} times as much"


def _step(needs: Needs, hardware: Hardware) -> Iterator[str]:
    """Yield the memory and time of a step that is taken here, on the device of the run.

    Its time is scaled to the batch; that of the optimizer, short compared with it, is left out.

    Raises ``ValueError`` if no step can be measured.
    """
    if not hardware.exists:
        raise ValueError("this machine has no GPU that PyTorch can use")
    needed = sum(needs.client_bytes(hardware.device).values())
    free = device_memory(hardware.device)[1]
    if needed > free:
        raise ValueError(
            f"a client needs {bytes_text(needed)} without activations, and {bytes_text(free)} are "
            "free"
        )
    config = with_micro_batch_size(needs.config, hardware.device)
    data, on_gpu = config.data, hardware.device.type == "cuda"
    size = int(data.micro_batch_size or data.batch_size)
    rows = size if on_gpu else min(size, _most_on_a_cpu(needs))
    if not rows:
        raise ValueError("one example would take long on this CPU; `desloc plan` estimates times")
    try:
        with num_threads(config.simulation.client_cpus):
            step = measured_step(config, hardware.device, rows)
    except torch.OutOfMemoryError:
        yield (
            f"this GPU is too small for a step with {rows} examples at once; set "
            "data.micro_batch_size=auto, or a smaller model"
        )
        return
    seconds = step.seconds * data.batch_size / rows
    of = f"{data.batch_size} examples, measured here with {rows} at once"
    of += f"; auto is {size}" if needs.config.data.micro_batch_size == AUTO else ""
    yield f"a step takes {seconds_text(seconds)} on this {'GPU' if on_gpu else 'CPU'} ({of})"
    filled = "a client fills {} of the GPU" if on_gpu else "this process has filled {}"
    yield f"  with activations, {filled.format(bytes_text(step.peak))} at most"
    yield from _time(needs, hardware, seconds)


def _most_on_a_cpu(needs: Needs) -> int:
    """Return how many examples at once take seconds; 0 if one takes longer."""
    if needs.config.task != TEXT:
        return _EXAMPLES
    return int(_WORK / (needs.num_params * needs.config.data.seq_len))


def _time(needs: Needs, hardware: Hardware, seconds: float) -> Iterator[str]:
    """Yield the time of the run, given that of a step."""
    config = needs.config
    clients, steps = config.simulation.num_clients, config.run.steps
    turns = -(-clients // hardware.at_once)
    compute = turns * steps * seconds
    yield f"{clients} clients, {hardware.at_once} at a time, compute {seconds_text(compute)}"
    schedule = needs.schedule
    windows = list(schedule.windows(steps))
    sent = sum(traffic.uploads(schedule, needs.sent_up, steps).desloc.values())
    waiting = star_seconds(sent, clients, replace(_LINK, latency=len(windows) * _LINK.latency))
    yield f"between sites, links of 1 Gbit/s would add {seconds_text(waiting)} (see `desloc plan`)"
    longest = turns * seconds * max(w.stop - w.start for w in windows)
    if longest > config.federation.timeout:
        yield (
            f"beware: a window takes {seconds_text(longest)} here, longer than "
            f"federation.timeout={config.federation.timeout:g} s; set a longer one"
        )
