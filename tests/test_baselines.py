"""Each baseline equals independent code or a closed form."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import reference
import torch
from federation import (
    OPTIMIZERS,
    Quadratic,
    Regression,
    Tensors,
    assert_close,
    initial,
    trained,
)
from flower_path import Run, oracle
from reference import Tree
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from flower_desloc import Clipping, DesLoc, SyncSchedule
from flower_desloc.config import ConfigError, load
from flower_desloc.core.outer import OuterOptimizer
from flower_desloc.core.schedule import GRADIENTS, NEVER, PARAMS, RESET
from flower_desloc.flower.policy import Policy
from flower_desloc.flower.records import from_record
from flower_desloc.optim import SGDM
from flower_desloc.setup.build import build_outer, build_schedule

STATES = ("exp_avg", "exp_avg_sq")


def test_the_presets_have_the_periods_of_their_methods():
    def periods(name: str) -> dict[str, Any]:
        return dict(build_schedule(load(name)).periods)

    k = periods("quickstart")[PARAMS]
    assert periods("quickstart") == {PARAMS: k, "exp_avg": 3 * k, "exp_avg_sq": 6 * k}
    assert periods("local_adopt") == periods("local_adam") == dict.fromkeys((PARAMS, *STATES), k)
    assert periods("favg_keep_opt") == {PARAMS: k, **dict.fromkeys(STATES, NEVER)}
    assert periods("favg_reset_opt") == {PARAMS: k, **dict.fromkeys(STATES, RESET)}
    assert periods("diloco") == {PARAMS: k, **dict.fromkeys(STATES, NEVER)}
    assert periods("ddp") == {GRADIENTS: 1}
    assert build_outer(load("quickstart")) is None
    assert build_outer(load("diloco")) is not None
    assert build_outer(load("ddp")) is not None


# --------------------------------------------------------------------------------------- FAVG-OPT


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_reset_states_equal_a_new_optimizer_every_round(name, tmp_path):
    case = OPTIMIZERS[name]
    schedule = SyncSchedule(case.periods(4, *[RESET] * len(case.oracle.states)))
    run = Run(case, schedule, tmp_path, num_steps=14)
    run.strategy.start(run.grid, run.initial)
    x = initial(Quadratic())
    for start in (0, 4, 8, 12):
        steps = range(start, min(start + 4, 14))
        x = reference.E([trained(Quadratic(), case, m, x, steps) for m in range(3)])
    got = from_record(run.strategy.state.averages[PARAMS])
    torch.testing.assert_close(got, x, rtol=1e-12, atol=1e-12)


def test_reset_states_start_every_window_at_zero_and_are_never_sent(tmp_path):
    schedule = SyncSchedule({PARAMS: 4, "exp_avg": RESET, "exp_avg_sq": RESET})
    optimizers: list[torch.optim.Optimizer] = []

    def make(params: Any) -> torch.optim.Optimizer:
        optimizers.append(OPTIMIZERS["adam"].make(params))
        return optimizers[-1]

    class Watched(Quadratic):
        def loss(self, module: nn.Module, m: int, t: int) -> Tensor:
            states = optimizers[-1].state.values()  # of the client that is at work
            seen.add((t, not any(state[name].any() for state in states for name in STATES)))
            return super().loss(module, m, t)

    seen: set[tuple[int, bool]] = set()
    case = replace(OPTIMIZERS["adam"], make=make)
    run = Run(case, schedule, tmp_path, problem=Watched(), num_clients=2)
    run.strategy.start(run.grid, run.initial, observer=run.watch)
    assert seen == {(t, t % 4 == 0) for t in range(12)}
    for record in run.watch.records:
        assert not {*record.traffic.up, *record.traffic.down} & {*STATES}


def test_a_client_absent_during_a_reset_starts_with_zeros(tmp_path):
    """It holds moments of before the reset; only the equal clients' equal outcome can tell."""
    schedule = SyncSchedule({PARAMS: 4, "exp_avg": RESET, "exp_avg_sq": RESET})

    def present(m: int, t: int) -> bool:
        return m != 1 or not 4 <= t < 8

    runs = [
        Run(
            "adam",
            schedule,
            tmp_path / str(i),
            problem=Quadratic(heterogeneous=False),
            num_clients=2,
            **({"present": present} if i else {}),
        )
        for i in range(2)
    ]
    for run in runs:
        run.start()
    # The clients are equal, so it makes no difference that one was away.
    a, b = (from_record(run.strategy.state.averages[PARAMS]) for run in runs)
    torch.testing.assert_close(a, b, rtol=0, atol=0)


# -------------------------------------------------------------------------------- Data parallelism


def big_batch(problem: Any, name: str, *, num_workers: int, num_steps: int, rho: float) -> Tree:
    """One run on the mean of all workers' losses."""
    module = problem.module()
    optimizer = OPTIMIZERS[name].make(module.parameters())
    rate = optimizer.param_groups[0]["lr"]
    for t in range(num_steps):
        optimizer.zero_grad()
        sum(problem.loss(module, m, t) for m in range(num_workers)).div(num_workers).backward()
        clip_grad_norm_(module.parameters(), rho)
        optimizer.param_groups[0]["lr"] = rate / (1 + t)
        optimizer.step()
    return {key: p.detach() for key, p in module.named_parameters()}


def data_parallel(name: str, folder: Any, num_clients: int) -> Run:
    return Run(
        name,
        SyncSchedule({GRADIENTS: 1}),
        folder,
        problem=Regression(),
        num_clients=num_clients,
        num_steps=9,
        outer=OuterOptimizer(
            OPTIMIZERS[name].make,
            lr_schedule=lambda t: 1 / (1 + t),
            clipping=Clipping(norm=0.5),
        ),
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_averaged_gradients_equal_one_large_batch(name, tmp_path):
    run = data_parallel(name, tmp_path, 4)
    run.strategy.start(run.grid, run.initial)
    expected = big_batch(Regression(), name, num_workers=4, num_steps=9, rho=0.5)
    got = from_record(run.strategy.state.averages[PARAMS])
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_data_parallel_clients_get_the_same_parameters_and_keep_nothing(tmp_path):
    """One set of parameters goes to all, and the only moments are the server's."""
    run = data_parallel("adam", tmp_path, 3)
    run.strategy.start(run.grid, run.initial)
    asked = [m for m in run.grid.sent if m.metadata.message_type == "train"]
    assert len(asked) == 3 * 9
    for step in range(9):
        first, *others = asked[3 * step : 3 * step + 3]
        assert first.content.array_records.keys() == {PARAMS}
        for other in others:
            a, b = (from_record(m.content.array_records[PARAMS]) for m in (first, other))
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert all(run.files(m).held() is None for m in range(3))


def test_data_parallel_clients_send_one_gradient_a_step(tmp_path):
    run = data_parallel("adam", tmp_path, 3)
    run.strategy.start(run.grid, run.initial, observer=run.watch)
    size = sum(t.numel() * t.element_size() for t in initial(Regression()).values())
    for record in run.watch.records[1:]:
        assert record.traffic.up == {GRADIENTS: 3 * size}
        assert record.traffic.down == {PARAMS: 3 * size}


def test_gradients_are_averaged_alone_and_every_step():
    for periods in ({GRADIENTS: 2}, {GRADIENTS: 1, PARAMS: 4}, {GRADIENTS: NEVER}):
        with pytest.raises(ValueError, match="in every step and without other streams"):
            SyncSchedule(periods)
    with pytest.raises(ValueError, match="DataParallel"):
        DesLoc(SyncSchedule({GRADIENTS: 1}), 4)


# ------------------------------------------------------------------------------------------ DiLoCo


@dataclass
class Still:
    """F_m(x) = |x - m|^2 / 2, without noise: K steps of gradient descent have a closed form."""

    def module(self) -> nn.Module:
        return Tensors()

    def loss(self, module: nn.Module, m: int, t: int) -> Tensor:
        return sum((p - m).square().sum() / 2 for p in module.parameters())


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_outer_step_of_a_configuration_is_diloco_in_closed_form(nesterov, tmp_path):
    """x_m = m + (1 - eta)^K (x - m) after K inner steps; then Nesterov's step along x - E[x_m]."""
    eta, k, lr, momentum, rounds, clients = 0.1, 5, 0.7, 0.9, 6, 3
    case = OPTIMIZERS["sgdm"]
    case = replace(case, make=lambda p: SGDM(p, lr=eta, momentum=0.0))
    run = Run(
        case,
        (k, NEVER),
        tmp_path,
        problem=Still(),
        num_clients=clients,
        num_steps=rounds * k,
        outer=build_outer(
            load(
                "quickstart",
                f"outer.name=sgd outer.lr={lr} outer.momentum={momentum} "
                f"outer.nesterov={str(nesterov).lower()}",
            )
        ),
    )
    run.strategy.start(run.grid, run.initial)
    center = sum(range(clients)) / clients
    for key, x in initial(Still()).items():
        velocity = torch.zeros_like(x)
        for _ in range(rounds):
            moved = (1 - (1 - eta) ** k) * (x - center)  # x - E_m[x_m]
            velocity = momentum * velocity + moved
            x = x - lr * (moved + momentum * velocity if nesterov else velocity)
        got = from_record(run.strategy.state.averages[PARAMS])[key]
        torch.testing.assert_close(got, x, rtol=1e-12, atol=1e-12)


def test_an_outer_sgd_of_rate_one_is_plain_averaging(tmp_path):
    results = []
    for outer in (None, OuterOptimizer(lambda p: torch.optim.SGD(p, lr=1.0))):
        run = Run("adam", (3, 6, NEVER), tmp_path / str(len(results)), outer=outer)
        run.start()
        results.append(from_record(run.strategy.state.averages[PARAMS]))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------- Joins, leaves, ad-hoc averages


@pytest.mark.parametrize("attendance", [{8: 2, 16: 3}, {0: 1, 4: 4, 12: 2}], ids=str)
def test_joins_and_leaves_equal_the_oracles_absences(attendance, tmp_path):
    def present(m: int, t: int) -> bool:
        begun = [step for step in attendance if step <= t]
        return m < (attendance[max(begun)] if begun else 4)

    run = Run(
        "adam",
        (4,),  # joiners get all they lack: every stream was averaged
        tmp_path,
        num_clients=4,
        num_steps=20,
        policy=Policy(attendance=attendance),
    )
    run.strategy.start(run.grid, run.initial, observer=run.watch)
    expected = oracle(run, present=present)[0][PARAMS]
    got = from_record(run.strategy.state.averages[PARAMS])
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for record in run.watch.records[1:]:
        assert len(record.clients) == sum(present(m, record.start) for m in range(4))


def test_once_at_averages_every_stream_at_the_named_steps(tmp_path):
    schedule = SyncSchedule(
        {PARAMS: 4, "exp_avg": NEVER, "exp_avg_sq": 5}, once_at=frozenset({7, 12})
    )
    due = {w.stop: w.due for w in schedule.windows(14)}
    assert due[7] == due[12] == {PARAMS, *STATES}
    assert [stop for stop, names in due.items() if "exp_avg" in names] == [7, 12]
    run = Run("adam", schedule, tmp_path, num_steps=14)
    assert_close(run.start(), oracle(run))


# ----------------------------------------------------------------------------- What makes no sense


def test_reset_is_for_all_optimizer_states_or_none():
    """Adam's bias correction has one step count for both moments."""
    with pytest.raises(
        ValueError, match=r"for all optimizer states or for none; .* and not for exp_avg"
    ):
        SyncSchedule({PARAMS: 4, "exp_avg": NEVER, "exp_avg_sq": RESET})
    for stream in (PARAMS, "buffers"):
        with pytest.raises(ValueError, match=f"'{stream}' cannot be 'reset'"):
            SyncSchedule({PARAMS: 4, "exp_avg": RESET, "exp_avg_sq": RESET, stream: RESET})


def test_gradients_exclude_once_at():
    with pytest.raises(ValueError, match="in every step and without other streams"):
        SyncSchedule({GRADIENTS: 1}, once_at=frozenset({3}))


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("federation.attendance.192=2", "before run.steps=192"),
        ("federation.attendance.-1=2", "steps are at least 0"),
        ("federation.attendance.4=5", "federation.num_clients=4"),
        ("sync_once_at=[193]", "at most run.steps=192"),
    ],
)
def test_joins_and_averages_after_the_end_are_refused(override, part):
    with pytest.raises(ConfigError, match=part):
        load("quickstart", override)
