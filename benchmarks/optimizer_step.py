"""Time of a step of ADOPT and SGDM, relative to PyTorch's Adam in the same form.

    python benchmarks/optimizer_step.py [--device cuda] [--threads 2] [--rounds 60] [--compile]

Eager optimizers are compared with Adam's foreach form; with --compile, compiled ones with Adam's
compiled. Two models: the tensors of a Llama, and 300 small ones, where overhead dominates. The
optimizers alternate in one process, each right after the Adam it is compared with; a ratio is the
median over rounds. `one list` is ADOPT's step called once for all tensors; `loop` is ADOPT written
one tensor at a time; `torch-adopt` is the package of ADOPT's authors, if it is installed.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from flower_desloc.optim import ADOPT, SGDM

Shapes = list[tuple[int, ...]]
LR, EPS = 1e-4, 1e-6
BETA1, BETA2 = 0.9, 0.9999


def llama(width: int, hidden: int, layers: int, vocabulary: int) -> Shapes:
    """Return the shapes of SmolLM2-135M or a smaller one: 3 of 9 heads for keys and values."""
    third = width // 3
    block = [(width, width), (third, width), (third, width), (width, width)]
    block += [(hidden, width), (hidden, width), (width, hidden), (width,), (width,)]
    return [(vocabulary, width), *block * layers, (width,)]


class Loop(Optimizer):
    """ADOPT as a formula, one tensor at a time."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {})
        self._steps = 0

    @torch.no_grad()
    def step(self, _closure: None = None) -> None:  # type: ignore[override]
        for x in self.param_groups[0]["params"]:
            g, state = x.grad, self.state[x]
            if not state:
                state["u"], state["v"] = torch.zeros_like(x), g * g
                continue
            u, v = state["u"], state["v"]
            clip = self._steps**0.25
            n = torch.div(g, v.sqrt().clamp_(min=EPS)).clamp_(-clip, clip)
            u.lerp_(n, 1 - BETA1)
            x.add_(u, alpha=-LR)
            v.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
        self._steps += 1


Make = Callable[[list[Tensor]], Optimizer]
FOREACH, COMPILED = "Adam, foreach", "Adam, compiled"


def contenders(*, compiled: bool) -> dict[str, tuple[Make, str]]:
    """Return what makes each optimizer, and the Adam it is compared with."""
    betas = (BETA1, BETA2)
    found: dict[str, tuple[Make, str]] = {
        FOREACH: (lambda p: Adam(p, LR, betas, foreach=True), FOREACH),
        "Adam, single": (lambda p: Adam(p, LR, betas, foreach=False, fused=False), FOREACH),
        "Adam, fused": (lambda p: Adam(p, LR, betas, fused=True), FOREACH),
        "ADOPT": (lambda p: ADOPT(p, LR, betas, EPS), FOREACH),
        "ADOPT, one list": (lambda p: OneList(p, LR, betas, EPS), FOREACH),
        "ADOPT, loop": (Loop, FOREACH),
        "SGDM": (lambda p: SGDM(p, LR, BETA1), FOREACH),
    }
    if compiled:
        found[COMPILED] = (compiled_adam, COMPILED)
        found["ADOPT, compiled"] = (lambda p: compiled_step(ADOPT(p, LR, betas, EPS)), COMPILED)
        found["SGDM, compiled"] = (lambda p: compiled_step(SGDM(p, LR, BETA1)), COMPILED)
    with suppress(ImportError):
        import adopt

        found["torch-adopt"] = (lambda p: adopt.ADOPT(p, LR, betas, EPS), FOREACH)
    return found


class OneList(ADOPT):
    """ADOPT's step in one call for all tensors, on every device."""

    def _parts(self, _params: list[Tensor]) -> Iterator[slice]:
        yield slice(None)


def compiled_adam(params: list[Tensor]) -> Optimizer:
    adam = Adam(params, LR, (BETA1, BETA2), foreach=True)
    adam.step = torch.compile(adam.step)  # type: ignore[method-assign]
    return adam


def compiled_step(optimizer: ADOPT | SGDM) -> Optimizer:
    optimizer.compile()
    return optimizer


def measure(shapes: Shapes, device: torch.device, rounds: int, *, compiled: bool) -> dict[str, Any]:
    """Return the time of a step of each optimizer, and its ratio to Adam's in the same form."""
    found = contenders(compiled=compiled)
    steps = {}
    for name, (make, _) in found.items():
        generator = torch.Generator(device).manual_seed(0)
        draw = [torch.randn(s, generator=generator, device=device) for s in shapes + shapes]
        params = [x.requires_grad_() for x in draw[: len(shapes)]]
        for p, g in zip(params, draw[len(shapes) :], strict=True):
            p.grad = g
        steps[name] = make(params).step
        for _ in range(3):
            steps[name]()
    times: dict[str, list[float]] = {name: [] for name in steps}
    ratios: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            # One right after the other, because the speed of a shared machine varies.
            reference, taken = seconds(steps[found[name][1]], device), seconds(step, device)
            times[name].append(taken)
            ratios[name].append(taken / reference)
    return {
        name: {
            "compared_with": found[name][1],
            "milliseconds": 1e3 * statistics.median(times[name]),
            "ratio": {
                "median": statistics.median(ratios[name]),
                "p10": statistics.quantiles(ratios[name], n=10)[0],
                "p90": statistics.quantiles(ratios[name], n=10)[-1],
            },
        }
        for name in steps
    }


def seconds(step: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--compile", action="store_true", help="compiled optimizers as well")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    models = {
        "llama": llama(576, 1536, 30, 49152) if cuda else llama(576, 1536, 6, 8192),
        "300 small": [(64, 64), (64,), (32, 64)] * 100,
    }
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": torch.cuda.get_device_name(device)
        if cuda
        else f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"torch": torch.__version__},
        "threads": args.threads,
        "rounds": args.rounds,
        "models": {},
    }
    for model, shapes in models.items():
        numbers = sum(torch.Size(s).numel() for s in shapes)
        found = measure(shapes, device, args.rounds, compiled=args.compile)
        result["models"][model] = {"tensors": len(shapes), "parameters": numbers, "steps": found}
        print(f"{model}: {numbers:,} parameters")
        for name, row in found.items():
            ratio = row["ratio"]
            print(
                f"  {name:16}{row['milliseconds']:9.3f} ms   {ratio['median']:.2f} "
                f"({ratio['p10']:.2f} to {ratio['p90']:.2f}) of {row['compared_with']}"
            )
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
