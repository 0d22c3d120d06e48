"""A client's local steps, compared with a hand-written PyTorch loop on the same model and batches.

    python benchmarks/client_step.py [--device cuda] [--compile] [--windows 20] [--json FILE]

`desloc` is a client's worker as the app builds it, including ADOPT. `loop` is written by hand:
batches in the device's memory, clipping, PyTorch's fused Adam, and no value read before the end.
With --compile both are also measured with a compiled loss. They alternate window by window in one
process; a ratio is the median over the windows of the throughput relative to the plain loop's.

With --device cuda the model is that of the preset smollm2_135m, in bf16 with 16 sequences of 2048
bytes; on the CPU it is the quickstart's, and waits and memory are zero. A profiler counts how often
the host synchronises with the device in a window, and in one with twice as many steps; the counts
are equal if it does so only at the end of a window. Four clients are built on the device, and the
memory that the last three add is measured: all share one model.

FLOPs utilization counts 6 FLOPs per parameter and token, and 12 per layer, position and unit of
width for attention, relative to the device's dense bf16 peak; null if that is unknown.
"""

import logging
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import torch
import typer
from common import Overrides, Times, ratios, report, spread
from flwr.app import Context, RecordDict
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.profiler import ProfilerActivity, profile

from client_app.client import build_worker
from flower_desloc.app.config import dump, load
from flower_desloc.app.config.schema import Config
from flower_desloc.app.tasks import Site, build_task
from flower_desloc.app.tasks.compute import autocast
from flower_desloc.core.streams import prime
from flower_desloc.core.worker import Worker

BF16_PEAK = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
}
"""Dense FLOP/s by part of the device's name, from NVIDIA's data sheets; the first match counts."""

LLAMA_135M = (
    "smollm2_135m",
    [
        *("data.source=builtin", "data.domains=[]", "data.weights=[]", "data.streaming=false"),
        *("data.max_bytes=4000000", "data.tokenizer=bytes", "data.seq_len=2048"),
        *("data.batch_size=16", "data.micro_batch_size=null", "model.precision=bf16"),
    ],
)
"""The preset and what differs from it: text and tokenizer without a network, and the batch."""

CLIENTS = 4
COMPILED = "compiled"
FORMS = ("eager", COMPILED)
Window = Callable[[int, int], object]
"""Takes the steps from start to stop, and waits for them."""


def client(config: Config, device: torch.device, number: int) -> Worker:
    node: dict[str, Any] = {
        "partition-id": number,
        "num-partitions": CLIENTS,
        "device": str(device),
    }
    context = Context(run_id=0, node_id=0, node_config=node, state=RecordDict(), run_config={})
    return build_worker({"settings": dump(config)}, context)


def desloc(config: Config, device: torch.device) -> Window:
    worker = client(config, device, 0)
    prime(worker.optimizer)
    return lambda start, stop: worker.steps(start, stop, origin=0)


def loop(config: Config, device: torch.device, batches: list[Tensor]) -> Window:
    model = build_task(config).build_model().to(device).train()
    params = list(model.parameters())
    adam = torch.optim.Adam(params, lr=config.optimizer.lr, fused=True)

    def mean_loss(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    forward = torch.compile(mean_loss) if config.model.compile else mean_loss

    def window(start: int, stop: int) -> object:
        losses = []
        for step in range(start, stop):
            adam.zero_grad(set_to_none=True)
            with autocast(config.model.precision, device):
                loss = forward(model, batches[step % len(batches)])
            loss.backward()
            clip_grad_norm_(params, 1.0)
            adam.step()
            losses.append(loss.detach())
        return torch.stack(losses).tolist()

    return window


def measure(
    contenders: dict[str, Window], steps: int, windows: int
) -> tuple[Times, dict[str, float]]:
    """Return the seconds of each window, and of each first window, which includes compilation."""
    first: dict[str, float] = {}
    times: Times = {name: [] for name in contenders}
    for number in range(windows + 2):
        for name, window in contenders.items():
            began = time.perf_counter()
            window(number * steps, (number + 1) * steps)  # ends by reading values
            taken = time.perf_counter() - began
            first.setdefault(name, taken)
            if number >= 2:
                times[name].append(taken)
    return times, first


def waits(window: Window, steps: int) -> int:
    """Return how often the host synchronises with the device in a window of ``steps``."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        window(0, steps)
    return sum(event.count for event in seen.key_averages() if "Synchronize" in event.key)


def allocated(device: torch.device) -> int:
    """Return the bytes allocated on a GPU; 0 on the CPU, which does not count them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak(window: Window, steps: int, device: torch.device) -> float:
    """Return by how many gigabytes a GPU's allocated memory rises in a window, at most."""
    if device.type != "cuda":
        window(0, steps)
        return 0.0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = allocated(device)
    window(0, steps)
    return (torch.cuda.max_memory_allocated(device) - before) / 1e9


def shared(config: Config, device: torch.device) -> dict[str, float]:
    """Return how many models four clients have, and the memory that the last three add."""
    first = client(config, device, 0)
    before = allocated(device)
    others = [client(config, device, number) for number in range(1, CLIENTS)]
    return {
        "models": len({id(worker.module) for worker in (first, *others)}),
        "megabytes_of_three_more": (allocated(device) - before) / 1e6,
    }


def flops_a_token(config: Config, num_parameters: int) -> float:
    model = config.model
    attention = 12 * model.num_hidden_layers * model.hidden_size * config.data.seq_len
    return 6 * num_parameters + attention


def compare(
    preset: str,
    settings: list[str],
    where: torch.device,
    *,
    forms: Sequence[str] = FORMS,
    windows: int = 20,
    steps: int = 8,
) -> dict[str, Any]:
    """Return the speed of a client and of the plain loop in each form, and on a GPU the counts."""
    cuda = where.type == "cuda"
    settings = [*settings, "lr_schedule.name=constant"]
    config = load(preset, settings)
    shard = build_task(config).client_data(Site(0, CLIENTS))
    batches = [shard.train_batch(step).tokens.to(where) for step in range(64)]
    num_parameters = sum(p.numel() for p in build_task(config).build_model().parameters())
    tokens = config.data.batch_size * config.data.seq_len
    result: dict[str, Any] = {"parameters": num_parameters, "preset": preset, "settings": settings}
    result |= {"windows": windows, "steps_a_window": steps, "tokens_a_step": tokens}
    # Of the package, such as that a loss could not be compiled; Python's own are dropped.
    warned = MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL)
    warned.setLevel(logging.WARNING)
    logging.getLogger("flower_desloc").addHandler(warned)
    with warnings.catch_warnings(action="ignore"):
        contenders: dict[str, Window] = {}
        for form in forms:
            of_form = load(preset, [*settings, f"model.compile={str(form == COMPILED).lower()}"])
            suffix = f", {form}" if form == COMPILED else ""
            contenders[f"loop{suffix}"] = loop(of_form, where, batches)
            contenders[f"desloc{suffix}"] = desloc(of_form, where)
        times, first = measure(contenders, steps, windows)
        ours = {name: window for name, window in contenders.items() if "desloc" in name}
        result["waits_by_steps_a_window"] = {
            name: {n: waits(window, n) for n in (steps, 2 * steps)} for name, window in ours.items()
        }
        result["gigabytes_added_by_a_window"] = {
            name: peak(window, steps, where) for name, window in contenders.items()
        }
        result["four_clients"] = shared(config, where)
    result["warnings"] = [record.getMessage() for record in warned.buffer]
    speeds = {name: steps * tokens / statistics.median(took) for name, took in times.items()}
    name = torch.cuda.get_device_name(where) if cuda else ""
    most = next((flops for part, flops in BF16_PEAK.items() if part in name), None)
    flops = flops_a_token(config, num_parameters)
    result["contenders"] = {
        name: {
            "tokens_a_second": speeds[name],
            "flops_utilization": speeds[name] * flops / most if most else None,
            "seconds_of_the_first_window": first[name],
            "speed_to": {
                other: spread(ratios(times[other], to=took))
                for other in times
                if other.startswith("loop") and other != name
            },
        }
        for name, took in times.items()
    }
    return result


def main(
    overrides: Overrides = None,
    device: str = "cpu",
    threads: int = 1,
    compile: bool = False,  # noqa: A002
    windows: int = 20,
    steps: int = 8,
    json: Path | None = None,
) -> None:
    """A client's local steps, compared with a hand-written PyTorch loop."""
    torch.set_num_threads(threads)
    where = torch.device(device)
    preset, settings = LLAMA_135M if where.type == "cuda" else ("quickstart", [])
    forms = FORMS if compile else FORMS[:1]
    settings = [*settings, *(overrides or [])]
    found = compare(preset, settings, where, forms=forms, windows=windows, steps=steps)
    report(found, json, where)


if __name__ == "__main__":
    typer.run(main)
