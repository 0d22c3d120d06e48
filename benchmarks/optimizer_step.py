"""Time of a step of ADOPT and SGDM, relative to PyTorch's Adam in the same form.

    python benchmarks/optimizer_step.py [--device cuda] [--threads 2] [--rounds 15] [--compile]

Eager optimizers are compared with Adam's foreach form; with --compile, compiled ones with Adam's
compiled. Two models: the tensors of a Llama, and 300 small ones, where overhead dominates. The
optimizers alternate in one process, each right after the Adam it is compared with, and each after
five untimed steps of its own; a ratio is the median over rounds. --small, for rehearsals, takes
smaller models. On a GPU a timing is ten steps between two synchronisations, divided by ten. `one
list` is ADOPT's step called once for all tensors, `loop` once for each tensor; `torch-adopt` is the
package of ADOPT's authors, if it is installed.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import typer
from common import Times, ratios, report, spread
from torch import Tensor
from torch.optim import Adam, Optimizer

from flower_desloc.optim import ADOPT, SGDM

Shapes = list[tuple[int, ...]]
Make = Callable[[list[Tensor]], Optimizer]
LR, EPS = 1e-4, 1e-6
BETAS = (0.9, 0.9999)
FOREACH, FUSED, COMPILED = "Adam, foreach", "Adam, fused", "Adam, compiled"


def llama(width: int, hidden: int, layers: int, vocabulary: int) -> Shapes:
    """Return the shapes of SmolLM2-135M or a smaller one: 3 of 9 heads for keys and values."""
    third = width // 3
    block: Shapes = [(width, width), (third, width), (third, width), (width, width)]
    block += [(hidden, width), (hidden, width), (width, hidden), (width,), (width,)]
    return [(vocabulary, width), *block * layers, (width,)]


LLAMA_135M = llama(576, 1536, 30, 49152)
SMALL_TENSORS: Shapes = [(64, 64), (64,), (32, 64)] * 100


class OneList(ADOPT):
    """ADOPT's step in one call for all tensors, on every device."""

    def _parts(self, _params: list[Tensor]) -> Iterator[slice]:
        yield slice(None)


class Loop(ADOPT):
    """ADOPT's step in one call for each tensor."""

    def _parts(self, params: list[Tensor]) -> Iterator[slice]:
        yield from (slice(i, i + 1) for i in range(len(params)))


def contenders(*, compiled: bool) -> dict[str, tuple[Make, str]]:
    """Return what makes each optimizer, and the Adam it is compared with."""
    found: dict[str, tuple[Make, str]] = {
        FOREACH: (lambda p: Adam(p, LR, BETAS, foreach=True), FOREACH),
        "Adam, single": (lambda p: Adam(p, LR, BETAS, foreach=False, fused=False), FOREACH),
        FUSED: (lambda p: Adam(p, LR, BETAS, fused=True), FOREACH),
        "ADOPT": (lambda p: ADOPT(p, LR, BETAS, EPS), FOREACH),
        "ADOPT, one list": (lambda p: OneList(p, LR, BETAS, EPS), FOREACH),
        "ADOPT, loop": (lambda p: Loop(p, LR, BETAS, EPS), FOREACH),
        "SGDM": (lambda p: SGDM(p, LR, BETAS[0]), FOREACH),
    }
    if compiled:
        found[COMPILED] = (lambda p: compiled_step(Adam(p, LR, BETAS, foreach=True)), COMPILED)
        found["ADOPT, compiled"] = (lambda p: compiled_step(ADOPT(p, LR, BETAS, EPS)), COMPILED)
        found["SGDM, compiled"] = (lambda p: compiled_step(SGDM(p, LR, BETAS[0])), COMPILED)
    with suppress(ImportError):
        import adopt

        found["torch-adopt"] = (lambda p: adopt.ADOPT(p, LR, BETAS, EPS), FOREACH)
    return found


def compiled_step(optimizer: ADOPT | SGDM | Adam) -> Optimizer:
    if isinstance(optimizer, Adam):
        optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]  # as PyTorch's pages do
    else:
        optimizer.compile()
    return optimizer


def measure(
    shapes: Shapes, device: torch.device, rounds: int, found: dict[str, tuple[Make, str]]
) -> dict[str, Any]:
    """Return the time of a step of each optimizer, and its ratio to that of its reference."""
    cuda = device.type == "cuda"
    timed = 10 if cuda else 1  # beside a GPU's step, one synchronisation is not short

    def clock() -> float:
        if cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def seconds(name: str) -> float:
        for _ in range(5):  # untimed: another optimizer has filled the caches with its own tensors
            steps[name]()
        began = clock()
        for _ in range(timed):
            steps[name]()
        return (clock() - began) / timed

    steps: dict[str, Callable[[], object]] = {}
    for name, (make, _) in found.items():
        generator = torch.Generator(device).manual_seed(0)
        draw = [torch.randn(s, generator=generator, device=device) for s in shapes + shapes]
        params = [x.requires_grad_() for x in draw[: len(shapes)]]
        for p, g in zip(params, draw[len(shapes) :], strict=True):
            p.grad = g
        steps[name] = make(params).step
        for _ in range(3):
            steps[name]()
    times: Times = {name: [] for name in steps}
    references: Times = {name: [] for name in steps}
    for _ in range(rounds):
        for name, (_, reference) in found.items():
            # One right after the other, because the speed of a shared machine varies.
            references[name].append(seconds(reference))
            times[name].append(seconds(name))
    return {
        name: {
            "compared_with": reference,
            "milliseconds": 1e3 * statistics.median(times[name]),
            "ratio": spread(ratios(times[name], to=references[name])),
        }
        for name, (_, reference) in found.items()
    }


def main(
    device: str = "cpu",
    threads: int = 2,
    rounds: int = 15,
    compile: bool = False,  # noqa: A002
    small: bool = False,
    json: Path | None = None,
) -> None:
    """Time of a step of ADOPT and SGDM, relative to PyTorch's Adam in the same form."""
    torch.set_num_threads(threads)
    where = torch.device(device)
    large = LLAMA_135M if device != "cpu" else llama(576, 1536, 6, 8192)
    models = {
        "llama": llama(48, 128, 2, 256) if small else large,
        "300 small": SMALL_TENSORS[: 30 if small else None],
    }
    found = {
        model: {
            "tensors": len(shapes),
            "parameters": sum(torch.Size(s).numel() for s in shapes),
            "steps": measure(shapes, where, rounds, contenders(compiled=compile)),
        }
        for model, shapes in models.items()
    }
    report({"rounds": rounds, "models": found}, json, where)


if __name__ == "__main__":
    typer.run(main)
