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
    assert_same,
    falling,
    initial,
    size_of,
    trained,
)
from flower_path import Run, oracle
from reference import Tree
from torch import Tensor, nn

from flower_desloc import Clipping, DesLoc, MultiOptimizer, SyncSchedule
from flower_desloc.app.config import ConfigError, load
from flower_desloc.app.setup.build import build_outer
from flower_desloc.app.setup.streams import RunStreams
from flower_desloc.core.outer import OuterOptimizer
from flower_desloc.core.schedule import GRADIENTS, NEVER, PARAMS, RESET, Period
from flower_desloc.core.streams import check_optimizer
from flower_desloc.flower.arrays import from_record
from flower_desloc.flower.policy import Policy
from flower_desloc.optim import SGDM
from flower_desloc.optim.scaffold import Scaffold

STATES = ("exp_avg", "exp_avg_sq")


def test_the_presets_have_the_periods_of_their_methods():
    def periods(name: str) -> dict[str, Any]:
        return dict(RunStreams(load(name)).schedule.periods)

    k = periods("quickstart")[PARAMS]
    assert periods("quickstart") == {PARAMS: k, "exp_avg": 3 * k, "exp_avg_sq": 6 * k}
    assert periods("local_adopt") == periods("local_adam") == dict.fromkeys((PARAMS, *STATES), k)
    assert periods("favg_keep_opt") == {PARAMS: k, **dict.fromkeys(STATES, NEVER)}
    assert periods("favg_reset_opt") == {PARAMS: k, **dict.fromkeys(STATES, RESET)}
    assert periods("diloco") == {PARAMS: k, **dict.fromkeys(STATES, NEVER)}
    assert periods("ddp") == {GRADIENTS: 1}
    model = Still().module()
    assert build_outer(load("quickstart"), model) is None
    assert build_outer(load("diloco"), model) is not None
    assert build_outer(load("ddp"), model) is not None


# --------------------------------------------------------------------------------------- FAVG-OPT


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_reset_states_equal_a_new_optimizer_every_round_and_are_never_sent(name, tmp_path):
    case = OPTIMIZERS[name]
    resets: list[Period] = [RESET] * len(case.oracle.states)
    schedule = SyncSchedule(case.periods(4, *resets))
    run = Run(case, schedule, tmp_path, num_steps=14)
    got = run.final()
    x = initial(Quadratic())
    for start in (0, 4, 8, 12):
        steps = range(start, min(start + 4, 14))
        x = reference.E([trained(Quadratic(), case, [m], x, steps)[PARAMS] for m in range(3)])
    assert_close(got, x)
    for record in run.watch.records[1:]:
        assert {*record.traffic.up} == {*record.traffic.down} == {PARAMS}


def test_a_client_absent_during_a_reset_starts_with_zeros(tmp_path):
    """It holds moments of before the reset; equal clients make no difference by absence."""
    schedule = SyncSchedule({PARAMS: 4, "exp_avg": RESET, "exp_avg_sq": RESET})

    def final(name: str, **options: Any) -> Tree:
        problem = Quadratic(heterogeneous=False)
        folder = tmp_path / name
        return Run("adam", schedule, folder, problem=problem, num_clients=2, **options).final()

    away = final("away", present=lambda m, t: m != 1 or not 4 <= t < 8)
    assert_same(away, final("present"))


# -------------------------------------------------------------------------------- Data parallelism


def data_parallel(name: str, folder: Any, num_clients: int) -> Run:
    return Run(
        name,
        SyncSchedule({GRADIENTS: 1}),
        folder,
        problem=Regression(),
        num_clients=num_clients,
        num_steps=9,
        outer=OuterOptimizer(
            OPTIMIZERS[name].make, lr_schedule=falling, clipping=Clipping(norm=0.5)
        ),
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_averaged_gradients_equal_one_large_batch(name, tmp_path):
    problem, case = Regression(), OPTIMIZERS[name]
    together = trained(problem, case, range(4), initial(problem), range(9), falling, norm=0.5)
    assert_close(data_parallel(name, tmp_path, 4).final(), together[PARAMS])


def test_data_parallel_clients_get_the_same_parameters_send_a_gradient_and_keep_nothing(tmp_path):
    run = data_parallel("adam", tmp_path, 3)
    run.start()
    asked = [m for m in run.grid.sent if m.metadata.message_type == "train"]
    assert len(asked) == 3 * 9
    for step in range(9):
        first, *others = asked[3 * step : 3 * step + 3]
        assert first.content.array_records.keys() == {PARAMS}
        for other in others:
            assert_same(*(from_record(m.content.array_records[PARAMS]) for m in (first, other)))
    assert all(run.files(m).last() is None for m in range(3))
    size = size_of(run.problem)
    for record in run.watch.records[1:]:
        assert record.traffic.up == {GRADIENTS: 3 * size}
        assert record.traffic.down == {PARAMS: 3 * size}


# ------------------------------------------------------------------------------------------ DiLoCo


@dataclass
class Still:
    """F_m(x) = |x - m|^2 / 2, without noise: K steps of gradient descent have a closed form."""

    def module(self) -> nn.Module:
        return Tensors()

    def loss(self, module: nn.Module, m: int, t: int) -> Tensor:
        zero = torch.zeros((), dtype=torch.float64)
        return sum(((p - m).square().sum() / 2 for p in module.parameters()), start=zero)


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_outer_step_of_a_configuration_is_diloco_in_closed_form(nesterov, tmp_path):
    """x_m = m + (1 - eta)^K (x - m) after K inner steps; then Nesterov's step along x - E[x_m]."""
    eta, k, lr, momentum, rounds, clients = 0.1, 5, 0.7, 0.9, 6, 3
    words = f"outer.lr={lr} outer.momentum={momentum} outer.nesterov={nesterov}"
    got = Run(
        replace(OPTIMIZERS["sgdm"], make=lambda p: SGDM(p, lr=eta, momentum=0.0)),
        (k, NEVER),
        tmp_path,
        problem=Still(),
        num_clients=clients,
        num_steps=rounds * k,
        outer=build_outer(load("quickstart", f"outer.name=sgd {words}"), Still().module()),
    ).final()
    center = sum(range(clients)) / clients
    for key, x in initial(Still()).items():
        velocity = torch.zeros_like(x)
        for _ in range(rounds):
            moved = (1 - (1 - eta) ** k) * (x - center)  # x - E_m[x_m]
            velocity = momentum * velocity + moved
            x = x - lr * (moved + momentum * velocity if nesterov else velocity)
        assert_close(got[key], x)


def test_an_outer_sgd_of_rate_one_is_plain_averaging(tmp_path):
    outer = OuterOptimizer(lambda p: torch.optim.SGD(p, lr=1.0))
    got = Run("adam", (3, 6, NEVER), tmp_path / "outer", outer=outer).final()
    assert_close(got, Run("adam", (3, 6, NEVER), tmp_path / "plain").final())


# ---------------------------------------------------------------------------------------- SCAFFOLD


def scaffold(problem: Quadratic, lr: float, k: int, steps: int, clients: int) -> Tree:
    """Algorithm 1 of Karimireddy et al. (2020), option II, with a global rate of 1."""

    def gradient(y: Tree, m: int, t: int) -> Tree:
        module = problem.module()
        names, tensors = zip(*module.named_parameters(), strict=True)
        with torch.no_grad():
            for name, tensor in zip(names, tensors, strict=True):
                tensor.copy_(y[name])
        return dict(
            zip(names, torch.autograd.grad(problem.loss(module, m, t), tensors), strict=True)
        )

    x = initial(problem)
    c = {key: torch.zeros_like(p) for key, p in x.items()}
    own = [c] * clients
    for start in range(0, steps, k):
        ys = [x] * clients
        taken = min(k, steps - start)
        for m in range(clients):
            for t in range(start, start + taken):
                g = gradient(ys[m], m, t)
                ys[m] = {n: ys[m][n] - lr * (g[n] - own[m][n] + c[n]) for n in x}
            own[m] = {n: own[m][n] - c[n] + (x[n] - ys[m][n]) / (taken * lr) for n in x}
        x, c = reference.E(ys), reference.E(own)
    return x


SCAFFOLD: dict[str, Period] = {PARAMS: 4, "control": 4, "own_control": NEVER, "correction": NEVER}


def test_scaffold_equals_its_paper_and_sends_the_parameters_and_the_control_variate(tmp_path):
    case = replace(OPTIMIZERS["sgdm"], make=lambda p: Scaffold(p, lr=0.1), lr=0.1)
    run = Run(case, SyncSchedule(SCAFFOLD), tmp_path, num_steps=14)
    assert_close(run.final(), scaffold(Quadratic(), 0.1, 4, 14, 3))
    sent = [set(record.traffic.up) for record in run.watch.records[1:]]
    assert sent == [{PARAMS, "control"}] * 3 + [{PARAMS}]


def test_scaffold_beside_another_optimizer_is_scaffold_for_its_parameters(tmp_path):
    """The objective has a term for each tensor, so that the two do not meet."""

    def make(params: Any) -> MultiOptimizer:
        first, *others = params
        return MultiOptimizer([torch.optim.Adam(others, lr=0.1), Scaffold([first], lr=0.1)])

    periods: dict[str, Period] = {**SCAFFOLD, "exp_avg": 8, "exp_avg_sq": NEVER}
    case = replace(OPTIMIZERS["sgdm"], make=make, lr=0.1)
    run = Run(case, SyncSchedule(periods), tmp_path, num_steps=14)
    key = next(iter(initial(Quadratic())))
    assert_close(run.final()[key], scaffold(Quadratic(), 0.1, 4, 14, 3)[key])


def test_scaffold_has_no_drift_where_fedavg_has(tmp_path):
    """Of quadratics with other curvatures FedAvg's fixed point is not the optimum."""
    problem, lr, k, clients = Bowls(), 0.1, 4, 3
    case = replace(OPTIMIZERS["sgdm"], make=lambda p: Scaffold(p, lr=lr), lr=lr)
    steps: dict[str, Any] = {"problem": problem, "num_steps": 12 * k, "num_clients": clients}
    periods: dict[str, Period] = {
        PARAMS: k,
        "control": k,
        "own_control": NEVER,
        "correction": NEVER,
    }
    ours = Run(case, SyncSchedule(periods), tmp_path / "scaffold", **steps).final()
    plain = replace(case, make=lambda p: SGDM(p, lr=lr, momentum=0.0))
    theirs = Run(plain, (k, NEVER), tmp_path / "fedavg", **steps).final()
    optimum = sum(m * (m + 1) for m in range(clients)) / sum(m + 1 for m in range(clients))
    off = [(x["vector"] - optimum).abs().max() for x in (ours, theirs)]
    assert off[0] < 0.001 < 0.05 < off[1]


@dataclass
class Bowls(Still):
    """F_m(x) = (m + 1) |x - m|^2 / 2."""

    def loss(self, module: nn.Module, m: int, t: int) -> Tensor:
        return (m + 1) * super().loss(module, m, t)


def test_scaffold_keeps_no_state_that_a_window_would_lose():
    names = check_optimizer(lambda params: Scaffold(params, lr=0.1), 3, 2)
    assert names == (PARAMS, "control", "own_control", "correction")
    RunStreams(load("scaffold")).check()


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
    assert_close(run.final(), oracle(run, present=present)[0][PARAMS])
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


ALONE = "in every step and without other streams"
OF_ALL_STATES = r"for all optimizer states or for none; .* and not for exp_avg"


@pytest.mark.parametrize(
    ("periods", "once_at", "words"),
    [
        ({GRADIENTS: 2}, set(), ALONE),
        ({GRADIENTS: 1, PARAMS: 4}, set(), ALONE),
        ({GRADIENTS: NEVER}, set(), ALONE),
        ({GRADIENTS: 1}, {3}, ALONE),
        # Adam's bias correction has one step count for both moments.
        ({PARAMS: 4, "exp_avg": NEVER, "exp_avg_sq": RESET}, set(), OF_ALL_STATES),
        ({PARAMS: RESET, "exp_avg": RESET}, set(), "'params' cannot be 'reset'"),
        ({PARAMS: 4, "exp_avg": RESET, "buffers": RESET}, set(), "'buffers' cannot be 'reset'"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(periods, once_at, words):
    with pytest.raises(ValueError, match=words):
        SyncSchedule(periods, once_at=frozenset(once_at))


def test_desloc_refuses_gradients_and_names_what_averages_them():
    with pytest.raises(ValueError, match="DataParallel"):
        DesLoc(SyncSchedule({GRADIENTS: 1}), 4)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("federation.attendance.192=2", "before run.steps=192"),
        ("sync_once_at=[193]", "at most run.steps=192"),
    ],
)
def test_joins_and_averages_after_the_end_are_refused(override, part):
    with pytest.raises(ConfigError, match=part):
        load("quickstart", override)
