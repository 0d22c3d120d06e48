"""What a step of ADOPT and SGDM takes beside PyTorch's Adam in its fastest form.

    python benchmarks/optimizer_step.py [--device cuda] [--threads 1] [--rounds 60] [--json FILE]

Two models: the tensors of a Llama, and 300 small ones, where overhead is all. The optimizers take
turns in one process, each right after the fastest of Adam's three forms (fused, foreach, single);
a ratio is the median of those of the turns. `loop` is ADOPT written one tensor at a time;
`torch-adopt` is the package of ADOPT's authors, where it is installed.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
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
    """The tensors of SmolLM2-135M, or of a smaller one: three heads of nine for keys and values."""
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


def contenders() -> dict[str, Callable[[list[Tensor]], Optimizer]]:
    betas = (BETA1, BETA2)
    found: dict[str, Callable[[list[Tensor]], Optimizer]] = {
        "Adam, fused": lambda p: Adam(p, LR, betas, fused=True),
        "Adam, foreach": lambda p: Adam(p, LR, betas, foreach=True),
        "Adam, single": lambda p: Adam(p, LR, betas, foreach=False, fused=False),
        "ADOPT": lambda p: ADOPT(p, LR, betas, EPS),
        "SGDM": lambda p: SGDM(p, LR, BETA1),
        "ADOPT, loop": Loop,
    }
    try:
        import adopt
    except ImportError:
        return found
    return found | {"torch-adopt": lambda p: adopt.ADOPT(p, LR, betas, EPS)}


def measure(shapes: Shapes, device: torch.device, rounds: int) -> dict[str, Any]:
    """Return what a step of each optimizer took, and its ratios to the fastest Adam's."""
    steps = {}
    for name, make in contenders().items():
        generator = torch.Generator(device).manual_seed(0)
        draw = [torch.randn(s, generator=generator, device=device) for s in shapes + shapes]
        params = [x.requires_grad_() for x in draw[: len(shapes)]]
        for p, g in zip(params, draw[len(shapes) :], strict=True):
            p.grad = g
        steps[name] = make(params).step
        for _ in range(3):
            steps[name]()
    adams = [name for name in steps if name.startswith("Adam")]
    fastest = min(adams, key=lambda name: min(seconds(steps[name], device) for _ in range(9)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    ratios: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            # Right after one another, as a shared machine is not as fast from moment to moment.
            reference, taken = seconds(steps[fastest], device), seconds(step, device)
            times[name].append(taken)
            ratios[name].append(taken / reference)
    return {"fastest_adam": fastest} | {
        "steps": {
            name: {
                "milliseconds": 1e3 * statistics.median(times[name]),
                "ratio": {
                    "median": statistics.median(ratios[name]),
                    "p10": statistics.quantiles(ratios[name], n=10)[0],
                    "p90": statistics.quantiles(ratios[name], n=10)[-1],
                },
            }
            for name in steps
        }
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
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
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
        found = measure(shapes, device, args.rounds)
        result["models"][model] = {"tensors": len(shapes), "parameters": numbers, **found}
        print(f"{model}: {numbers:,} parameters, ratios to {found['fastest_adam']}")
        for name, row in found["steps"].items():
            ratio = row["ratio"]
            print(
                f"  {name:15}{row['milliseconds']:9.3f} ms   {ratio['median']:.2f} "
                f"({ratio['p10']:.2f} to {ratio['p90']:.2f})"
            )
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
