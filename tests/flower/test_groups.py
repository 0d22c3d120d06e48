"""Parameter groups: every parameter trains by the settings of its own group."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import OPTIMIZERS, SHAPES, OneSided, OptimizerCase, Regression, assert_same
from flower_path import Run
from reference import State, Tree
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from flower_desloc import NEVER, Clipping, OuterOptimizer, Policy, SyncSchedule, stream_names, take
from flower_desloc.core.lr_schedule import wsd
from flower_desloc.core.schedule import GRADIENTS, PARAMS

Settings = dict[str, Any]
UNBOUNDED = {"betas": (0.99, 0.9)}


def of_a_group(case: OptimizerCase) -> Settings:
    """Return other settings than those of a case, for a parameter group."""
    stated: Settings = {}
    for shape in ((1,), (1, 1)):
        stated |= case.make([nn.Parameter(torch.zeros(shape))]).param_groups[0]
    first, *rest = stated.get("betas", (1.0,))
    changed = {
        "lr": stated["lr"] / 2,
        "betas": (first - 0.1, *((1 + beta) / 2 for beta in rest)),
        "momentum": stated.get("momentum", 0.0) - 0.3,
        "eps": 10 * stated.get("eps", 0.0),
        "weight_decay": stated.get("weight_decay", 0.0) + 0.1,
    }
    return {name: value for name, value in changed.items() if name in stated}


def makes(case: OptimizerCase, changed: Settings) -> dict[str, Callable[[Iterable[Tensor]], Any]]:
    """Return how to make the optimizer without groups, of either settings, and with both.

    In that every second tensor is in a group of its own, which comes first.
    """

    def grouped(params: Iterable[Tensor]) -> torch.optim.Optimizer:
        params = list(params)
        groups: Any = [{"params": params[1::2], **changed}, {"params": params[::2]}]
        return case.make(groups)

    def changed_for_all(params: Iterable[Tensor]) -> torch.optim.Optimizer:
        groups: Any = [{"params": list(params), **changed}]
        return case.make(groups)

    return {"base": case.make, "other": changed_for_all, "grouped": grouped}


def joins(m: int, t: int) -> bool:
    return m != 1 or t >= 6


LOSSY = {PARAMS: "int4", "exp_avg": "int8", "exp_avg_sq": "int8"}
SITUATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bounded": {"sync_bound": True},
    "late": {"sync_delay": 1, "sync_bound": True},
    "joiner": {"present": joins},
    "joiner, no v": {"present": joins, "periods": (2, 4, NEVER)},
    "joiner, no u": {"present": joins, "periods": (2, NEVER, 4)},
    "unequal": {"policy": {"min_steps": 0.3, "step_seconds": {"client-0": 1.0, "client-1": 4.0}}},
    "lossy": {"compression": LOSSY},
}


def cases() -> Iterable[Any]:
    for name in OPTIMIZERS:
        yield pytest.param(name, {}, "plain", id=f"{name}, plain")
    some = {"adam": [*SITUATIONS][1:], "adopt": ["late", "joiner, no v"], "sgdm": ["unequal"]}
    for name, situations in some.items():
        for situation in situations:
            yield pytest.param(name, {}, situation, id=f"{name}, {situation}")
    for situation in ("bounded", "joiner, no v", "joiner, no u"):
        yield pytest.param("adam", UNBOUNDED, situation, id=f"unbounded, {situation}")


@pytest.mark.parametrize(("name", "more", "situation"), [*cases()])
def test_a_parameter_trains_as_if_all_had_the_settings_of_its_group(
    name, more, situation, tmp_path
):
    """Of a loss in which no parameter depends on another, to the bit."""
    options = {"periods": (2, 4, 6), **SITUATIONS[situation]}
    policy = Policy(norm_bound=None, **options.pop("policy", {}))
    case = OPTIMIZERS[name]
    schedule = SyncSchedule(case.periods(*options.pop("periods")))
    if "compression" in options:
        options["compression"] = {s: f for s, f in LOSSY.items() if s in schedule.periods}

    def ends(kind: str) -> list[State]:
        made = replace(case, make=makes(case, of_a_group(case) | more)[kind])
        size = {"num_clients": 2, "num_steps": 8}
        small = {**size, "problem": OneSided(), "policy": policy, **options}
        return Run(made, schedule, tmp_path / kind, **small).start()

    base, other, grouped = (ends(kind) for kind in ("base", "other", "grouped"))
    others = [*SHAPES][1::2]
    expected = [
        {n: {key: (b if key in others else a)[n][key] for key in a[n]} for n in a}
        for a, b in zip(base, other, strict=True)
    ]
    assert_same(grouped, expected)
    assert any(
        not torch.equal(a[PARAMS]["matrix"], b[PARAMS]["matrix"])
        for a, b in zip(base, other, strict=True)
    )


STEPS = 9
FALLING = wsd(STEPS, 3, 4)


def in_a_plain_loop(module: nn.Module, optimizer: torch.optim.Optimizer, problem: Any) -> State:
    """Train as one would without any of this: PyTorch's scheduler and clipping."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, FALLING)
    for t in range(STEPS):
        optimizer.zero_grad()
        problem.loss(module, 0, t).backward()
        clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
    return take(module, optimizer, stream_names(module, optimizer))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_client_whose_periods_are_1_equals_the_plain_loop_with_the_same_groups(name, tmp_path):
    """To the bit, with a norm over all groups and a schedule of each group's own rate."""
    problem, case = Regression(), OPTIMIZERS[name]
    make = makes(case, of_a_group(case))["grouped"]
    run = Run(
        replace(case, make=make),
        (1,),
        tmp_path,
        problem=problem,
        num_clients=1,
        num_steps=STEPS,
        lr_schedule=FALLING,
        clipping=Clipping(norm=0.1),
    )
    module = problem.module()
    assert_same(run.start(), [in_a_plain_loop(module, make(module.parameters()), problem)])
    rates = run.watch.records[-1].clients["client-0"].learning_rates
    first = make(problem.module().parameters()).param_groups[0]
    assert rates == [first["lr"] * FALLING(STEPS - 1)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_of_equal_settings_are_as_one(name, tmp_path):
    case = OPTIMIZERS[name]

    def ends(kind: str) -> list[State]:
        made = replace(case, make=makes(case, {})[kind])
        options: dict[str, Any] = {"problem": Regression(), "clipping": Clipping(norm=0.1)}
        options |= {"num_clients": 2, "num_steps": 6}
        return Run(made, (2, 3, 5), tmp_path / kind, **options).start()

    assert_same(ends("grouped"), ends("base"))


def test_the_servers_optimizer_of_averaged_gradients_can_have_groups_and_resumes(tmp_path):
    problem = Regression()
    case = OPTIMIZERS["adamw"]

    def groups(params: Mapping[str, nn.Parameter]) -> list[Any]:
        named = {name: params[name] for name in sorted(params)}
        biases = [p for name, p in named.items() if name.endswith("bias")]
        rest = [p for name, p in named.items() if not name.endswith("bias")]
        return [{"params": biases, **of_a_group(case)}, {"params": rest}]

    def outer() -> OuterOptimizer:
        clipping = Clipping(norm=0.1)
        return OuterOptimizer(case.make, lr_schedule=FALLING, clipping=clipping, groups=groups)

    def run(folder: Path) -> Run:
        schedule = SyncSchedule({GRADIENTS: 1})
        options: dict[str, Any] = {"num_clients": 1, "num_steps": STEPS, "outer": outer()}
        return Run("adamw", schedule, folder, problem=problem, **options)

    module = problem.module()
    optimizer = case.make(groups(dict(module.named_parameters())))
    expected = in_a_plain_loop(module, optimizer, problem)[PARAMS]
    assert_same(run(tmp_path).final(), dict(expected))

    first, second = outer(), outer()
    first.begin(expected)

    def step(outer: OuterOptimizer, t: int) -> Tree:
        return outer.step({key: p + t for key, p in expected.items()}, t)

    for t in range(2):
        step(first, t)
    second.begin(first.params)
    second.restore(first.state)
    for t in range(2, 4):
        assert_same(step(second, t), step(first, t))
