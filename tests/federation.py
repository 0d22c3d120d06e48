"""A federation in memory, from functions of the core alone, and problems small enough to check.

Everything here has its twin in reference.py: the optimizers of ``OPTIMIZERS``, the gradients of
the problems, and ``Federation``, which is ``reference.run`` made of modules.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle
from typing import Any, Protocol

import pytest
import reference
import torch
from reference import State, Tree
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_

from flower_desloc import Clipping, Mean, SyncSchedule, Window, Worker, prime, put, take
from flower_desloc.core.lr_schedule import LRSchedule, constant
from flower_desloc.core.schedule import PARAMS, Period
from flower_desloc.core.streams import stream_names
from flower_desloc.optim import ADOPT, SGDM, Adam, AdamW, MultiOptimizer, PaperAdam

# ------------------------------------------------------------------------------------- Optimizers


@dataclass(frozen=True)
class OptimizerCase:
    """An optimizer, and the same one in the oracle."""

    make: Callable[[Iterable[Tensor]], torch.optim.Optimizer]
    oracle: reference.Optimizer
    lr: float

    def periods(self, *some: Period) -> dict[str, Period]:
        """``some`` for params and each state in turn, from the first again when they run out."""
        return dict(zip((PARAMS, *self.oracle.states), cycle(some), strict=False))


def muon(params: Iterable[Any]) -> torch.optim.Optimizer:
    """Return PyTorch's Muon of the matrices among parameters or groups, and AdamW of the rest."""
    params = list(params)
    groups = params if isinstance(params[0], dict) else [{"params": params}]
    parts: list[torch.optim.Optimizer] = []
    for make, is_hidden, settings in (
        (torch.optim.Muon, True, {"momentum": 0.8, "adjust_lr_fn": "match_rms_adamw"}),
        (AdamW, False, {"betas": (0.9, 0.95)}),
    ):
        own = [
            {key: value for key, value in group.items() if key in ("lr", "weight_decay", *settings)}
            | {"params": tensors}
            for group in groups
            if (tensors := [p for p in group["params"] if (p.ndim == 2) == is_hidden])
        ]
        parts += [make(own, lr=0.05, weight_decay=0.1, **settings)] if own else []
    return MultiOptimizer(parts)


OPTIMIZERS = {
    "adopt": OptimizerCase(
        lambda p: ADOPT(p, lr=0.05, betas=(0.95, 0.99)), reference.adopt(0.95, 0.99, 1e-6), 0.05
    ),
    "adam": OptimizerCase(
        lambda p: Adam(p, lr=0.05, betas=(0.9, 0.95)), reference.adam(0.9, 0.95, 1e-8), 0.05
    ),
    "adamw": OptimizerCase(
        lambda p: AdamW(p, lr=0.05, betas=(0.9, 0.95), weight_decay=0.1),
        reference.adam(0.9, 0.95, 1e-8, decay=0.1, decoupled=True),
        0.05,
    ),
    "amsgrad": OptimizerCase(
        lambda p: Adam(p, lr=0.05, betas=(0.9, 0.95), amsgrad=True),
        reference.amsgrad(0.9, 0.95, 1e-8),
        0.05,
    ),
    "sgdm": OptimizerCase(lambda p: SGDM(p, lr=0.2, momentum=0.8), reference.sgdm(0.8), 0.2),
    "paper_adam": OptimizerCase(
        lambda p: PaperAdam(p, lr=0.02, betas=(0.9, 0.95), eps=1e-3),
        reference.paper_adam(0.9, 0.95, 1e-3),
        0.02,
    ),
    "muon": OptimizerCase(
        muon,
        reference.muon(0.8, 0.1, reference.adam(0.9, 0.95, 1e-8, decay=0.1, decoupled=True)),
        0.05,
    ),
}
LINEAR = [
    name for name, case in OPTIMIZERS.items() if {*case.oracle.states} == {*case.oracle.decays}
]
"""Those whose states all decay, as late averages and unequal speeds need."""
BOUNDED = [name for name, case in OPTIMIZERS.items() if case.oracle.ratios]
"""Those that divide a moment by the root of another."""

# --------------------------------------------------------------------------------------- Problems


class Objective(Protocol):
    """A model and every worker's loss at every step."""

    def module(self) -> nn.Module: ...

    def loss(self, module: nn.Module, m: int, t: int) -> Tensor: ...


class Problem(Objective, Protocol):
    """``grad`` is the loss's, for the oracle."""

    def grad(self, m: int, t: int, x: Tree) -> Tree: ...


def initial(problem: Objective) -> Tree:
    """Return x0."""
    return {key: p.detach().clone() for key, p in problem.module().named_parameters()}


compiled = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler here"
)


def size_of(problem: Objective) -> int:
    """Return the bytes of a problem's parameters, and of each of their states."""
    return sum(tensor.nbytes for tensor in initial(problem).values())


def generator(*seeds: int) -> torch.Generator:
    """Return a generator that is a function of ``seeds``."""
    seed = 0
    for part in seeds:
        seed = 1_000_003 * seed + part + 1
    return torch.Generator().manual_seed(seed % 2**63)


# The shapes that break things: odd ones, a scalar, an empty one.
SHAPES = {"matrix": (3, 5), "vector": (7,), "scalar": (), "empty": (0, 2)}


def draw(*seeds: int) -> Tree:
    """Return normal tensors of ``SHAPES``, a function of ``seeds``."""
    noise = generator(*seeds)
    return {
        key: torch.randn(shape, dtype=torch.float64, generator=noise)
        for key, shape in SHAPES.items()
    }


class Tensors(nn.Module):
    """Bare parameters of ``SHAPES``."""

    def __init__(self) -> None:
        super().__init__()
        for key, x in draw(0).items():
            self.register_parameter(key, nn.Parameter(x))


@dataclass(frozen=True)
class Quadratic:
    """F_m(x; xi_t) = a_m/2 |x - b_m,t|^2: workers differ in curvature, optimum and noise."""

    seed: int = 1
    heterogeneous: bool = True

    def module(self) -> nn.Module:
        return Tensors()

    def loss(self, module: nn.Module, m: int, t: int) -> Tensor:
        a, b = self._curvature(m), self._optimum(m, t)
        return sum(
            (a / 2 * (p - b[key]).square().sum() for key, p in module.named_parameters()),
            start=torch.zeros((), dtype=torch.float64),
        )

    def grad(self, m: int, t: int, x: Tree) -> Tree:
        a, b = self._curvature(m), self._optimum(m, t)
        return {key: a * (x[key] - b[key]) for key in x}

    def _curvature(self, m: int) -> float:
        return 0.5 + (m % 3 if self.heterogeneous else 0)

    @cache  # noqa: B019
    def _optimum(self, m: int, t: int) -> Tree:
        m = m if self.heterogeneous else 0
        return {key: (m + 1) / 2 + noise for key, noise in draw(self.seed, m, t).items()}


class TiedMLP(nn.Module):
    """Two tanh layers of one weight; the second layer's bias is a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
        noise = generator(2)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(0.5 * torch.randn(p.shape, dtype=torch.float64, generator=noise))
        self.b.weight = self.a.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(inputs)))


_SKELETON = TiedMLP()


@dataclass(frozen=True)
class Regression:
    """Least squares of a ``TiedMLP``, every worker towards a target map of its own."""

    seed: int = 3

    def module(self) -> nn.Module:
        return TiedMLP()

    def loss(self, module: nn.Module, m: int, t: int) -> Tensor:
        inputs, targets = self._batch(m, t)
        return (module(inputs) - targets).square().mean()

    def grad(self, m: int, t: int, x: Tree) -> Tree:
        leaves = {key: tensor.detach().clone().requires_grad_() for key, tensor in x.items()}
        inputs, targets = self._batch(m, t)
        outputs = functional_call(_SKELETON, leaves, (inputs,))
        loss = (outputs - targets).square().mean()
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    @cache  # noqa: B019
    def _batch(self, m: int, t: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(8, 4, dtype=torch.float64, generator=generator(self.seed, m, t))
        target = torch.randn(4, 4, dtype=torch.float64, generator=generator(self.seed, m))
        return inputs, torch.sin(inputs @ target)


# ------------------------------------------------------------------------------------- Federation


CONSTANT, UNCLIPPED = constant(), Clipping()


class Federation:
    """Workers in one process; each has a module and a primed optimizer of its own."""

    def __init__(
        self,
        problem: Objective,
        make: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
        num_workers: int,
    ) -> None:
        self.problem = problem
        modules = [problem.module() for _ in range(num_workers)]
        self.workers = [(module, make(module.parameters())) for module in modules]
        for _, optimizer in self.workers:
            prime(optimizer)

    def run(
        self,
        window: Window,
        lr_schedule: LRSchedule = CONSTANT,
        clipping: Clipping = UNCLIPPED,
    ) -> None:
        """Take every worker's local steps of the window, then average what is due."""
        mean = Mean()
        for m, (module, optimizer) in enumerate(self.workers):
            worker = Worker(
                module=module,
                optimizer=optimizer,
                loss_at=partial(self.problem.loss, module, m),
                num_examples=1,
                lr_schedule=lr_schedule,
                clipping=clipping,
            )
            worker.steps(window.start, window.stop)
            mean.add(worker.take(window.due))
        for module, optimizer in self.workers:
            put(module, optimizer, mean.result())

    def states(self) -> list[State]:
        """Return a copy of every stream of every worker."""
        return [
            {
                name: {key: tensor.clone() for key, tensor in stream.items()}
                for name, stream in take(*worker, stream_names(*worker)).items()
            }
            for worker in self.workers
        ]


def falling(step: int) -> float:
    """Return a factor of the learning rate that differs in every step."""
    return 1 / (1 + step)


def trained(
    problem: Objective,
    case: OptimizerCase,
    workers: Sequence[int],
    x: Tree,
    steps: Iterable[int],
    rate: LRSchedule = CONSTANT,
    norm: float | None = None,
) -> State:
    """Train from ``x`` as one would without any of this: a new optimizer and a loop.

    A batch is those of ``workers`` together; its gradient is clipped to ``norm``.
    """
    module = problem.module()
    with torch.no_grad():
        for key, p in module.named_parameters():
            p.copy_(x[key])
    optimizer = case.make(module.parameters())
    for t in steps:
        optimizer.zero_grad()
        loss: Any = sum(problem.loss(module, m, t) for m in workers) / len(workers)
        loss.backward()
        if norm is not None:
            clip_grad_norm_(module.parameters(), norm)
        for group in optimizer.param_groups:
            group["lr"] = case.lr * rate(t)
        optimizer.step()
    return take(module, optimizer, stream_names(module, optimizer))


def due_table(schedule: SyncSchedule, num_steps: int) -> dict[int, frozenset[str]]:
    """Return what falls due when, for the oracle: coins it cannot throw itself."""
    table = {n: schedule.due(n) for n in range(1, num_steps + 1)}
    table[num_steps] |= {PARAMS}
    return table


# ------------------------------------------------------------------------------------ Comparisons


Nested = Tensor | Mapping[str, "Nested"] | Sequence["Nested"]


def assert_close(got: Nested, expected: Nested, tolerance: float = 1e-12) -> None:
    """Every tensor of every stream of every worker agrees to ``tolerance``, relative and absolute.

    Names, shapes and types agree exactly.
    """
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def assert_same(got: Nested, expected: Nested) -> None:
    """Every tensor of every stream of every worker agrees bit for bit."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def largest_gap(got: list[State], expected: list[State]) -> float:
    """Return the largest difference between two tensors, over everything."""
    return max(
        float((a[stream][key] - b[stream][key]).abs().max())
        for a, b in zip(got, expected, strict=True)
        for stream in a
        for key in a[stream]
        if a[stream][key].numel()
    )


@dataclass(frozen=True)
class OneSided(Quadratic):
    """Only the first worker's loss depends on ``scalar``, and the others' on it in some steps."""

    def loss(self, module: nn.Module, m: int, t: int) -> Tensor:
        loss = super().loss(module, m, t)
        scalar = dict(module.named_parameters())["scalar"]
        return loss if self.sees(m, t) else loss - self.of_scalar(scalar, m, t) + 0 * scalar

    def of_scalar(self, scalar: Tensor, m: int, t: int) -> Tensor:
        return self._curvature(m) / 2 * (scalar - self._optimum(m, t)["scalar"]).square()

    def grad(self, m, t, x):
        g = super().grad(m, t, x)
        return g if self.sees(m, t) else {**g, "scalar": torch.zeros_like(g["scalar"])}

    def sees(self, m: int, t: int) -> bool:
        return m == 0 or (m == 1 and t % 7 == 0)
