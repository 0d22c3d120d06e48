"""Every optimizer × the laws of the core, against reference.py and closed forms.

Coins, absences and all that is Flower's: test_together.py, on the whole path.
"""

from functools import partial
from typing import Any

import pytest
import reference
import torch
from federation import (
    OPTIMIZERS,
    Federation,
    OptimizerCase,
    Quadratic,
    Regression,
    assert_close,
    assert_same,
    due_table,
    initial,
    largest_gap,
    trained,
)
from reference import E, each

from flower_desloc import NEVER, Clipping, SyncSchedule, Window
from flower_desloc.core.lr_schedule import wsd
from flower_desloc.optim import Adam

T = 30
PERIODS = {
    "coprime": (5, 7, 11),
    "nested": (4, 12, 24),
    "all_equal": (6,),
    "every_step": (1,),
    "some_never": (5, NEVER, 9),
    "params_never": (NEVER, 4, 7),
    "all_never": (NEVER,),
}


@pytest.fixture(params=OPTIMIZERS)
def case(request: pytest.FixtureRequest) -> OptimizerCase:
    return OPTIMIZERS[request.param]


def federated(case: OptimizerCase, problem, schedule: SyncSchedule, num_workers=3, **options):
    federation = Federation(problem, case.make, num_workers)
    for window in schedule.windows(T):
        federation.run(window, **options)
    return federation.states()


def oracle(case: OptimizerCase, problem, schedule: SyncSchedule, **changed):
    """The same run in reference.py."""
    settings: dict[str, Any] = {
        "num_workers": 3,
        "num_steps": T,
        "due": due_table(schedule, T),
        "lr": lambda t: case.lr,
    }
    return reference.run(case.oracle, initial(problem), problem.grad, **(settings | changed))


# ------------------------------------------------------------------------ The core is Algorithm 1


@pytest.mark.parametrize("periods", PERIODS.values(), ids=PERIODS)
def test_a_federation_is_algorithm_1(case, periods):
    problem, periods = Quadratic(), case.periods(*periods)
    due = reference.every({s: None if k == NEVER else k for s, k in periods.items()}, T)
    schedule = SyncSchedule(periods)
    assert_close(federated(case, problem, schedule), oracle(case, problem, schedule, due=due))


@pytest.mark.parametrize(
    ("clipping", "clip"),
    [
        (Clipping(norm=0.5), reference.clip_norm(0.5)),
        (Clipping(value=0.1), reference.clip_coordinates(0.1)),
        (Clipping(), lambda g: g),
    ],
    ids=["norm", "coordinates", "none"],
)
def test_clipping_and_learning_rate_are_those_of_the_global_step(case, clipping, clip):
    problem, schedule = Regression(), SyncSchedule(case.periods(5, 7, 11))
    factor = wsd(T, warmup_steps=8, decay_steps=10)
    got = federated(case, problem, schedule, lr_schedule=factor, clipping=clipping)
    expected = oracle(case, problem, schedule, lr=lambda t: case.lr * factor(t), clip=clip)
    assert_close(got, expected)


# ------------------------------------------------------------------------------------ Closed forms


def centralized(case: OptimizerCase, problem, num_workers: int):
    """Train on the batches of all workers together."""
    return trained(problem, case, range(num_workers), initial(problem), range(T))


def test_one_worker_is_its_local_optimizer_alone(case):
    problem, schedule = Regression(), SyncSchedule(case.periods(5, 7, 11))
    got = federated(case, problem, schedule, num_workers=1)
    assert_same(got, [centralized(case, problem, 1)])


def test_sgdm_with_all_periods_1_is_minibatch_sgdm_on_the_union_batch():
    problem, case = Regression(), OPTIMIZERS["sgdm"]
    got = federated(case, problem, SyncSchedule(case.periods(1)), num_workers=4)
    assert_close(got, [centralized(case, problem, 4)] * 4)


def test_identical_data_on_all_workers_is_one_worker(case):
    # Four: the mean of a power of two of equal numbers is exact.
    problem = Quadratic(heterogeneous=False)
    for periods in ((1,), (2, 3, 5)):
        schedule = SyncSchedule(case.periods(*periods))
        one, four = (federated(case, problem, schedule, num_workers=M) for M in (1, 4))
        assert_same(four, one * 4)


# ----------------------------------------------------------------------- The listings of the paper
#
# Algorithms 3 and 4 average at t mod K = 0 inside step t, after the gradient was taken. Post-step
# averaging does the same one line earlier, before the gradient. Hence, for any periods:
#
#     listing with every synced gradient taken at E[x_t]  =  post-step, up to its last event.
#
# Algorithm 5 averages u before x takes it. Hence, for any coins in which u's implies x's:
#
#     listing  =  post-step;
#
# where u's coin falls alone, x differs by eta (u_m - E[u]), whose mean over workers is 0.
#
# Algorithm 6 averages u and v, and then takes the maximum v~ of v; v~ is never averaged. PyTorch's
# AMSGrad takes the maximum of the worker's own v, which is averaged after the step. Its bias
# correction is a factor of the learning rate. Hence, for lambda = epsilon = 0:
#
#     listing  =  post-step,  for any coins of x, if u and v are never averaged;
#
# where a coin of u or v falls, x differs by the direction, (u_m - E[u]) / sqrt(v~_m) or
# u_m (max(v_m, v~_m)^-1/2 - max(E[v], v~_m)^-1/2), whose mean over workers is not 0.


def listing(algorithm, problem, num_steps=T, *, lr=0.02, **settings):
    """Run a listing, or the oracle, with three workers and a constant rate."""
    return algorithm(
        initial(problem),
        problem.grad,
        num_workers=3,
        num_steps=num_steps,
        lr=lambda t: lr,
        **settings,
    )


listing_3 = partial(listing, reference.listing_adam, beta1=0.9, beta2=0.95, lam=1e-3)
listing_4 = partial(listing, reference.listing_adopt, beta1=0.9, beta2=0.95, eps=0.5)
listing_5 = partial(listing, reference.listing_sgdm, lr=0.2, beta=0.8)
listing_6 = partial(listing, reference.listing_amsgrad, beta1=0.9, beta2=0.95, lam=0.0)
sgdm_post_step = partial(listing, partial(reference.run, reference.sgdm(0.8)), lr=0.2)
ADAM, ADOPT = reference.paper_adam(0.9, 0.95, 1e-3), reference.paper_adopt(0.9, 0.95, 0.5)


def post_step(optimizer, problem, periods, num_steps=T):
    """Post-step averaging without the event at the end, which the listings do not have."""
    due = reference.every(periods, num_steps)
    due.pop(num_steps)
    return listing(partial(reference.run, optimizer), problem, num_steps, due=due)


def ks(params, exp_avg, exp_avg_sq):
    return {"params": params, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def coins_of(periods, coin_seed=None):
    return due_table(SyncSchedule(periods, coin_seed), T)


def stream(states, name):
    return [state[name] for state in states]


def gaps(states, others, name):
    """Return by how much a stream of each worker differs."""
    pairs = zip(stream(states, name), stream(others, name), strict=True)
    return [each(torch.sub, *pair) for pair in pairs]


@pytest.mark.parametrize("periods", [ks(5, 7, 11), ks(4, 12, 24), ks(1, 1, 1), ks(3, None, 2)])
def test_listing_3_is_post_step_averaging_but_for_the_point_of_the_synced_gradient(periods):
    problem = Quadratic()
    expected = post_step(ADAM, problem, periods)
    assert_close(listing_3(problem, periods=periods, gradient_at_mean=True), expected, 1e-13)
    assert largest_gap(listing_3(problem, periods=periods), expected) > 1e-3


def test_listing_3_leaves_post_step_averaging_in_the_first_step_that_averages_params():
    problem, periods = Quadratic(), ks(5, 2, 3)
    theirs, ours = (
        {n: of(problem, periods=periods, num_steps=n) for n in (5, 6)}
        for of in (listing_3, partial(post_step, ADAM))
    )
    assert_close(theirs[5], ours[5], 1e-13)
    # u differs by (1 - beta1) (g(x_m) - g(E[x])), here (1 - beta1) a_m (x_m - E[x]).
    x = stream(theirs[5], "params")
    own = [
        each(lambda x, mean: 0.1 * a * (x - mean), x_m, E(x))  # noqa: B023
        for a, x_m in zip((0.5, 1.5, 2.5), x, strict=True)
    ]
    assert_close(gaps(theirs[6], ours[6], "exp_avg"), own, 1e-13)


def test_listing_4_is_post_step_averaging_but_for_that_point_and_its_own_denominator():
    problem, periods = Quadratic(), ks(5, 7, None)
    expected = post_step(ADOPT, problem, periods)
    assert_close(listing_4(problem, periods=periods, gradient_at_mean=True), expected, 1e-13)
    # With v averaged, n = g / sqrt(v) at a synced step takes the worker's v, not the average.
    periods = ks(5, 7, 11)
    got = listing_4(problem, 11, periods=periods, gradient_at_mean=True)
    assert_close(got, post_step(ADOPT, problem, periods, num_steps=11), 1e-13)
    got = listing_4(problem, 12, periods=periods, gradient_at_mean=True)
    assert largest_gap(got, post_step(ADOPT, problem, periods, num_steps=12)) > 1e-3


@pytest.mark.parametrize(
    "coins",
    [
        coins_of({"params": 3, "momentum_buffer": 9}),  # the paper's K_u = 3 K_x
        coins_of({"params": 1, "momentum_buffer": 4}, coin_seed=0),
        coins_of({"params": 3, "momentum_buffer": NEVER}, coin_seed=1),
    ],
    ids=["periods", "coins", "never"],
)
def test_listing_5_is_post_step_averaging_when_the_coin_of_u_implies_that_of_x(coins):
    problem = Quadratic()
    assert_close(listing_5(problem, coins=coins), sgdm_post_step(problem, due=coins), 1e-13)


def test_listing_5_gives_x_the_average_of_u_where_the_coin_of_u_falls_alone():
    problem, coins = Quadratic(), {3: {"params"}, 5: {"momentum_buffer"}}
    assert_close(listing_5(problem, 4, coins=coins), sgdm_post_step(problem, 4, due=coins), 1e-13)
    theirs, ours = listing_5(problem, 5, coins=coins), sgdm_post_step(problem, 5, due=coins)
    local = sgdm_post_step(problem, 5, due={3: {"params"}})  # the same step, u not yet averaged
    u = stream(local, "momentum_buffer")
    own = [each(lambda u, mean: 0.2 * (u - mean), u_m, E(u)) for u_m in u]
    assert_close(gaps(theirs, ours, "params"), own, 1e-13)
    assert largest_gap(theirs, ours) > 1e-2
    assert_close([E(stream(theirs, "params"))], [E(stream(ours, "params"))], 1e-13)


U_AND_V = ("exp_avg", "exp_avg_sq")


def our_amsgrad(problem, coins, num_steps=T):
    """PyTorch's AMSGrad in a federation; the rate undoes the bias correction."""
    federation = Federation(
        problem, lambda p: Adam(p, lr=0.02, betas=(0.9, 0.95), eps=0.0, amsgrad=True), 3
    )

    def undo(t: int) -> float:
        return (1 - 0.9 ** (t + 1)) / (1 - 0.95 ** (t + 1)) ** 0.5

    for t in range(num_steps):
        federation.run(Window(t, t + 1, frozenset(coins.get(t + 1, ()))), undo)
    return federation.states()


@pytest.mark.parametrize(
    ("heterogeneous", "periods", "coin_seed"),
    [(True, ks(3, NEVER, NEVER), seed) for seed in (None, 0, 1)]
    + [(False, ks(3, 4, 2), seed) for seed in (0, 1)],
)
def test_listing_6_is_our_amsgrad_when_only_params_are_averaged_or_all_workers_are_alike(
    heterogeneous, periods, coin_seed
):
    problem, coins = Quadratic(heterogeneous=heterogeneous), coins_of(periods, coin_seed)
    assert_close(our_amsgrad(problem, coins), listing_6(problem, coins=coins))


@pytest.mark.parametrize("fell", [U_AND_V[:1], U_AND_V[1:], U_AND_V], ids="+".join)
@pytest.mark.parametrize("with_params", [False, True])
def test_listing_6_takes_the_step_of_a_coin_along_the_averages(fell, with_params):
    """The first step in which a coin of u or v falls, in closed form."""
    problem, before = Quadratic(), {2: {"params"}}
    assert_close(our_amsgrad(problem, before, 4), listing_6(problem, 4, coins=before))
    due = {**before, 5: {*fell, "params"} if with_params else {*fell}}
    printed, ours = listing_6(problem, 5, coins=due), our_amsgrad(problem, due, 5)

    # The same step without averages has every worker's own u, v and maximum.
    own, old = our_amsgrad(problem, before, 5), our_amsgrad(problem, before, 4)
    u, v, v_max = (stream(own, name) for name in (*U_AND_V, "max_exp_avg_sq"))
    mean_u = [E(u)] * 3 if "exp_avg" in fell else u
    mean_v = [E(v)] * 3 if "exp_avg_sq" in fell else v
    old_max = stream(old, "max_exp_avg_sq")
    theirs = [each(torch.maximum, *pair) for pair in zip(mean_v, old_max, strict=True)]
    assert_close(stream(printed, "max_exp_avg_sq"), theirs)
    assert_close(stream(ours, "max_exp_avg_sq"), v_max)

    def steps(us, vs):
        pairs = zip(us, vs, strict=True)
        return [each(lambda u, v: 0.02 * u / v.sqrt(), *pair) for pair in pairs]

    pairs = zip(steps(u, v_max), steps(mean_u, theirs), strict=True)
    apart = [each(torch.sub, *pair) for pair in pairs]
    assert_close(gaps(printed, ours, "params"), [E(apart)] * 3 if with_params else apart)
    for name in U_AND_V:
        assert_close(stream(printed, name), stream(ours, name))
    # Unlike Algorithm 5's, the difference remains when x is averaged.
    assert max(float(tensor.abs().max()) for tensor in E(apart).values() if tensor.numel()) > 1e-4
