"""An average of Adam's u is bounded by what a worker's own v allows (`sync_bound`)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import BOUNDED, LINEAR, OPTIMIZERS, OneSided, Tensors, assert_close, assert_same
from flower_path import Run, oracle
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny import TINY, train
from torch import Tensor, nn

from flower_desloc import SyncSchedule
from flower_desloc.app.config import load
from flower_desloc.flower.policy import Policy
from flower_desloc.optim import ADOPT, Adam
from flower_desloc.optim.bounds import WidestRatios, moment_ratios


def after(gradients: Tensor, betas: tuple[float, float]) -> tuple[Tensor, Tensor, float]:
    """Return u and v of PyTorch's Adam after these gradients, and the ratio they keep to."""
    p = nn.Parameter(torch.zeros(gradients.shape[1:], dtype=torch.float64))
    adam = torch.optim.Adam([p], betas=betas)
    for gradient in gradients:
        p.grad = gradient.clone()
        adam.step()
    state = adam.state[p]
    [ratio] = moment_ratios(adam)["exp_avg"].values()
    assert ratio is not None
    return state["exp_avg"], state["exp_avg_sq"], ratio


@given(st.integers(1, 60), st.floats(0, 0.99), st.floats(0.5, 0.9999), st.integers(0, 2**31))
def test_no_gradients_exceed_the_ratio(steps, beta1, beta2, seed):
    assume(beta1**2 < 0.999 * beta2)
    draw = torch.Generator().manual_seed(seed)
    gradients = torch.randn(steps, 7, generator=draw, dtype=torch.float64)
    u, v, ratio = after(gradients, (beta1, beta2))
    assert (u.abs() <= ratio * v.sqrt() * (1 + 1e-9)).all()


beta_pairs = st.tuples(st.floats(0, 0.99), st.floats(0.5, 0.9999)).filter(
    lambda betas: betas[0] ** 2 < 0.999 * betas[1]
)


@given(st.lists(beta_pairs, min_size=1, max_size=30), beta_pairs, st.integers(0, 2**31))
def test_no_gradients_exceed_the_widest_of_ratios_that_vary(pairs, constant, seed):
    """In each group its own; and it is kept over a break."""
    params = [nn.Parameter(torch.zeros(7, dtype=torch.float64)) for _ in range(2)]
    adam = torch.optim.Adam([{"params": [p]} for p in params], betas=constant)
    [ratio] = {*moment_ratios(adam)["exp_avg"].values()}
    draw = torch.Generator().manual_seed(seed)
    seen = WidestRatios(adam)
    for betas in pairs:
        adam.param_groups[0]["betas"] = betas
        params[0].grad = torch.randn(7, generator=draw, dtype=torch.float64)
        params[1].grad = params[0].grad.clone()
        with seen.of_steps():
            adam.step()
        adam.param_groups[0]["betas"] = constant
        seen = WidestRatios(adam, seen.to_json())
        seen.widen()
        for p, c in zip(params, seen.now["exp_avg"].values(), strict=True):
            u, v = adam.state[p]["exp_avg"], adam.state[p]["exp_avg_sq"]
            assert c is not None
            assert (u.abs() <= c * v.sqrt() * (1 + 1e-9)).all()
    assert seen.now["exp_avg"][1] == ratio


class OnceZero(torch.optim.Adam):
    """Has a beta1 of zero in its fifth step alone."""

    def step(self, closure: Any = None) -> Any:
        counts = {int(state["step"]) for state in self.state.values()}
        for group in self.param_groups:
            group["betas"] = (0.0 if counts == {4} else 0.9, 0.95)
        return super().step(closure)


@pytest.mark.parametrize(("period", "delay"), [(1, 0), (2, 0), (4, 2)])
def test_betas_that_vary_do_not_bound_a_client_on_its_own(period, delay, tmp_path):
    """Each message has a new optimizer; or the fifth step is taken while the streams travel."""
    case = replace(OPTIMIZERS["adam"], make=lambda p: OnceZero(p, lr=0.05, betas=(0.9, 0.95)))

    def states(folder: Path, bound: bool) -> Any:
        run = Run(case, (period,), folder, num_clients=1, sync_delay=delay, sync_bound=bound)
        if delay:

            def take_steps(_: Any, reply: Any) -> Any:
                run.app.take_steps_ahead()
                return reply

            run.grid.meddle, run.keep_workers = take_steps, True
        return run.start()

    assert_same(states(tmp_path / "a", bound=True), states(tmp_path / "b", bound=False))


@pytest.mark.parametrize("betas", [(0.95, 0.95), (0.9, 0.999), (0.95, 0.99)])
def test_some_gradients_reach_the_ratio(betas):
    """Equality in Cauchy and Schwarz: gradients that shrink by beta1 / beta2, backwards in time."""
    beta1, beta2 = betas
    ages = torch.arange(400, dtype=torch.float64)
    u, v, ratio = after(((beta1 / beta2) ** ages.flip(0))[:, None], betas)
    assert (u / v.sqrt()).item() == pytest.approx(ratio, rel=1e-5)


def run(folder, name="adam", schedule=(2, 4, 9), **options):
    return Run(name, schedule, folder, **{"num_steps": 26, "sync_bound": True, **options})


# v leaves steps after u: 16/48/96 with phases of 16 and 32, at a quarter of the length. The mean of
# v can be below what the worker's own u was made with.
APART = SyncSchedule(OPTIMIZERS["adam"].periods(4, 12, 24), phases={"exp_avg": 4, "exp_avg_sq": 8})


@pytest.mark.parametrize(
    ("name", "schedule", "delay"),
    [
        *((name, (2, 4, 9), 0) for name in BOUNDED),
        *((name, (2, 4, 9), 1) for name in BOUNDED if name in LINEAR),
        *(("adam", APART, delay) for delay in (0, 1)),
    ],
)
def test_bounded_averages_equal_the_oracle(name, schedule, delay, tmp_path):
    bounding = run(tmp_path, name, schedule, problem=OneSided(), sync_delay=delay)
    assert_close(bounding.start(), oracle(bounding, bound=True))


def test_a_worker_without_gradients_of_a_coordinate_does_not_throw_it_away(tmp_path):
    """It has v = 0 there; an average of u alone would be divided by epsilon."""

    def scalar(**options) -> float:
        policy = Policy(norm_bound=None)  # which would leave this worker out
        trained = run(tmp_path / str(options), problem=OneSided(), policy=policy, **options)
        return max(abs(state["params"]["scalar"].item()) for state in trained.start())

    assert scalar() < 10
    assert scalar(sync_bound=False) > 1e3


def test_nothing_changes_where_moments_are_averaged_together(tmp_path):
    runs = (run(tmp_path / str(i), schedule=(2, 4, 4), sync_bound=i > 0) for i in range(2))
    assert_same(*(each.start() for each in runs))


@pytest.mark.parametrize(
    "optimizer",
    [ADOPT(Tensors().parameters()), Adam(Tensors().parameters(), betas=(0.99, 0.9))],
    ids=["ADOPT", "beta1^2 >= beta2"],
)
def test_there_may_be_no_ratio(optimizer):
    assert moment_ratios(optimizer).get("exp_avg", {0: None}) == {0: None}


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in BOUNDED])
def test_an_optimizer_without_a_ratio_is_left_as_it_is(name, tmp_path):
    runs = (Run(name, (2, 4, 9), tmp_path / str(i), sync_bound=i > 0) for i in range(2))
    assert_same(*(each.start() for each in runs))


@pytest.mark.parametrize("preset", ["desloc_adam", "smollm2_135m_niid"])
def test_the_papers_presets_of_adam_have_no_bound_and_the_others_do(preset):
    assert not load(preset, []).sync_bound
    assert load("quickstart", []).sync_bound


@pytest.mark.parametrize(("betas", "warned"), [("[0.9,0.95]", False), ("[0.99,0.9]", True)])
def test_a_run_whose_betas_have_no_bound_is_warned(betas, warned, tmp_path, caplog):
    train(tmp_path, *TINY, f"optimizer.betas={betas}", "run.steps=1")
    assert ("sync_bound does nothing" in caplog.text) == warned


def test_averages_of_v_alone_can_be_bounded():
    assert load("quickstart", ["sync.exp_avg=never"]).sync_bound
