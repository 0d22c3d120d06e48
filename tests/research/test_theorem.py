"""research/theorem.py: its steps are the core's, its constants those of its problems."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import reference
import torch
from federation import Federation
from hypothesis import given
from hypothesis import strategies as st
from scripts import load_script
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from flower_desloc import Window
from flower_desloc.optim import SGDM

theorem = load_script("theorem")
PAIR = (theorem.Coins(1 / 3, 1 / 4), theorem.Coins(1 / 5, 0))
PROBLEMS = pytest.mark.parametrize("make", theorem.PROBLEMS.values(), ids=theorem.PROBLEMS)


class Replayed:
    """One setting and seed of ``descend``, as a problem for the core: the same batches."""

    def __init__(self, problem, coins, num_steps, seeds, seed):
        self.problem, self.seed = problem, seed
        rng = np.random.default_rng([num_steps, problem.num_workers])
        self.batches, self.due = [], []
        for _ in range(num_steps):
            self.batches.append(problem.draw(rng, seeds))
            of_x, of_u = rng.random((2, seeds))[:, seed] < coins
            self.due.append({"params"} if of_x else set())
            self.due[-1] |= {"momentum_buffer"} if of_u else set()

    def module(self):
        return nn.ParameterDict({"x": nn.Parameter(torch.tensor(self.problem.start))})

    def loss(self, module, m, t):
        x, batch, problem = module["x"], self.batches[t], self.problem
        if isinstance(problem, theorem.Quadratics):
            b, H, noise = map(torch.tensor, (problem.b[m], problem.H, batch[self.seed, m]))
            return problem.c[m] / 2 * (H * (x - b) ** 2).sum() + noise @ x
        X, y = (torch.tensor(part[self.seed, m]) for part in batch)
        value = binary_cross_entropy_with_logits(X @ x, y, reduction="sum")
        return value + problem.decay / 2 * (x @ x)


@PROBLEMS
def test_the_descent_is_that_of_the_core(make):
    problem, num_steps, etas = make(), 24, (0.3, 0.5)
    means = theorem.descend(problem, PAIR, etas, num_steps, seeds=2)
    for (at, (coins, eta)), seed in itertools.product(
        enumerate(zip(PAIR, etas, strict=True)), range(2)
    ):
        replayed = Replayed(problem, coins, num_steps, 2, seed)
        federation = Federation(
            replayed,
            partial(SGDM, lr=eta, momentum=theorem.BETA),
            problem.num_workers,
        )
        measured = []
        for t, due in enumerate(replayed.due):
            x = np.stack(
                [module.get_parameter("x").detach().numpy() for module, _ in federation.workers]
            )
            gradient = problem.full_gradient(x.mean(0))
            measured.append([gradient @ gradient, x.var(0).sum()])
            federation.run(Window(t, t + 1, frozenset(due)))
        expected = np.mean(measured, 0)
        assert expected[1] > 0
        got = [means.squared_gradient[at, seed], means.spread[at, seed]]
        np.testing.assert_allclose(got, expected, rtol=1e-9)


@PROBLEMS
def test_the_constants_are_those_of_the_problem(make):
    problem, rng = make(), np.random.default_rng(0)
    G2, B2 = problem.heterogeneity
    many = [problem.draw(rng, 2000) for _ in range(4)]
    for scale in (0.1, 1, 10, 100):
        x, y = problem.minimum + scale * rng.normal(size=(2, problem.dim))
        at_x, at_y = (
            np.mean([problem.gradient(p, batch) for batch in many], axis=(0, 1)) for p in (x, y)
        )
        # With the same batches at both points the noise of the quadratics cancels.
        assert np.linalg.norm(at_x - at_y, axis=-1).max() <= 1.1 * theorem.L * np.linalg.norm(x - y)
        mean = problem.full_gradient(x)
        each = np.concatenate([problem.gradient(x, batch) for batch in many])
        noise = ((each - each.mean(0)) ** 2).sum(-1).mean(0)
        assert noise.max() <= problem.variance * 1.1
        error = np.sqrt(problem.variance / len(each))
        assert np.linalg.norm(at_x.mean(0) - mean) <= 4 * error
        slack = 4 * error * (1 + np.linalg.norm(at_x, axis=-1).max())
        assert (at_x**2).sum(-1).mean() <= G2 + B2 * mean @ mean + slack


def test_the_minimum_of_the_logistic_regression_is_scikit_learns():
    problem = theorem.Logistic()
    X, y, weights = problem.all
    fit = LogisticRegression(C=1 / problem.decay, fit_intercept=False, tol=1e-10, max_iter=1000)
    fit.fit(X, y, sample_weight=weights)
    np.testing.assert_allclose(problem.minimum, fit.coef_[0], rtol=1e-4)
    assert problem.gap > 0


@PROBLEMS
@pytest.mark.parametrize("blocks", [2, 3])
def test_the_function_does_not_depend_on_the_number_of_workers(make, blocks):
    one = make()
    more = make(num_workers=blocks * one.num_workers)
    x = np.ones(one.dim)
    np.testing.assert_allclose(more.full_gradient(x), one.full_gradient(x))
    np.testing.assert_allclose(more.heterogeneity, one.heterogeneity)


CURVATURES = (1, 0.5, -0.25)


def test_the_growth_of_second_moments_is_the_mean_over_all_outcomes_of_the_coins():
    coins, maps = theorem.Coins(0.3, 0.2), theorem.step_maps(CURVATURES, 0.3)
    start = np.array([0.7] * 3 + [0.0] * 3)
    expected = np.zeros((6, 6))
    for outcomes in itertools.product(maps, repeat=3):
        due, p = {}, 1.0
        for n, (of_x, of_u) in enumerate(outcomes, start=1):
            due[n] = {"params"} if of_x else set()
            due[n] |= {"momentum_buffer"} if of_u else set()
            p *= (0.3 if of_x else 0.7) * (0.2 if of_u else 0.8)
        workers = reference.run(
            reference.sgdm(theorem.BETA),
            {"x": torch.tensor(0.7, dtype=torch.float64)},
            lambda m, t, x: {"x": CURVATURES[m] * x["x"]},
            num_workers=3,
            num_steps=3,
            due=due,
            lr=lambda t: 0.3,
        )
        state = [float(s[name]["x"]) for name in theorem.STREAMS for s in workers]
        expected += p * np.outer(state, state)
    moments = np.linalg.matrix_power(theorem.second_moments(maps, coins), 3)
    got = (moments @ np.outer(start, start).ravel()).reshape(6, 6)
    np.testing.assert_allclose(got, expected, rtol=1e-10)


def test_one_worker_is_stable_up_to_the_known_limit_of_damped_momentum():
    """2 (1 + beta) / (1 - beta), for curvature 1."""
    rate = theorem.largest_stable_rate((1.0,), theorem.Coins(0.5, 0.5))
    assert rate == pytest.approx(2 * 1.9 / 0.1, rel=1e-3)


def test_the_papers_psi_allows_a_rate_at_which_workers_diverge_here():
    """At p_u = 1 it is 0: eta_0 = (1 - beta) / 4, whatever p_x."""
    team = theorem.TEAMS["one of four curvatures negative"]
    coins = theorem.Coins(1 / 512, 1)
    B = theorem.curvature_dissimilarity(team) ** 0.5
    papers = theorem.step_size_bound(0.0, theorem.BETA, dissimilarity=B)
    ours = theorem.step_size_bound(coins.psi, theorem.BETA, dissimilarity=B)
    assert ours < theorem.largest_stable_rate(team, coins) < papers


@pytest.mark.parametrize("p_x", [0.9, 0.25, 1 / 16])
@pytest.mark.parametrize("p_u", [0.0, 1 / 48, 0.5])
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.95])
def test_psi_bounds_the_two_recursions_of_its_proof(p_x, p_u, beta):
    """Lemma 2: the workers' spread for a unit spread of gradients, at the best s.

    x takes its step along u before u is averaged; Algorithm 5 averages u first.
    """

    def spread(s, *, u_first=False):
        u = x = 0.0
        for _ in range(4000):
            own = beta * u + (1 - beta)
            u = (1 - p_u) * own
            x = (1 - p_x) * ((1 + s) * x + (1 + 1 / s) * (u if u_first else own))
        return x

    best = 1 / math.sqrt(1 - p_x) - 1
    least = spread(best)
    assert all(spread(best * factor) >= least for factor in (0.9, 1.1))
    # The proof ends with (1 + sqrt(1 - p_x))^2 <= 4; that much it gives away and no more.
    exact = theorem.psi(p_x, p_u, beta) * (1 + math.sqrt(1 - p_x)) ** 2 / 4
    assert least == pytest.approx(exact, rel=1e-6)
    assert least <= theorem.psi(p_x, p_u, beta)
    # The paper's psi, with its factor 1 - p_u, is that of its own order.
    assert spread(best, u_first=True) == pytest.approx((1 - p_u) * exact, rel=1e-6)


@given(st.floats(0.01, 1), st.floats(0, 1), st.floats(0, 0.99), st.floats(0.1, 9), st.floats(1, 9))
def test_the_step_size_satisfies_the_three_conditions_of_the_proof(p_x, p_u, beta, L, B):
    value = theorem.psi(p_x, p_u, beta)
    eta = theorem.step_size_bound(value, beta, smoothness=L, dissimilarity=B)
    assert 12 * eta**2 * L**2 * (B**2 - 1) * value <= 0.5
    assert eta * L + 2 * eta**2 * beta**2 * L**2 / (1 - beta) ** 2 <= 0.5
    assert 12 * eta**2 * L**2 * value <= 0.5
    assert eta > 0


def test_the_step_size_at_the_extreme_probabilities():
    assert theorem.psi(1, 0, 0.9) == 0  # "recovers standard mini-batch SGDM"
    assert theorem.step_size_bound(0.0, 0.9, smoothness=2) == pytest.approx(0.1 / 8)
    assert theorem.psi(0.5, 1, 0.9) == pytest.approx(8 * 0.1)  # 0 in the paper
    assert theorem.psi(0, 1, 0.9) == math.inf  # the last gradient of a worker is in its step
    assert theorem.step_size_bound(math.inf, 0.9) == 0
