"""The plan's formulas against simulation and the paper's numbers, and `desloc plan`."""

import itertools
import math
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts import load_benchmark
from typer.testing import CliRunner

from flower_desloc import NEVER, PARAMS, SyncSchedule
from flower_desloc.cli import app
from flower_desloc.config import ConfigError, load
from flower_desloc.config.optimizers import OPTIMIZERS
from flower_desloc.core.traffic import method_rates, stream_bytes, uploads, wire_bytes
from flower_desloc.plan.advice import MULTIPLES, can_bound, recommended, warnings
from flower_desloc.plan.evidence import measured, nearest
from flower_desloc.plan.from_config import dtype_bytes, model_size, planned_run, planned_streams
from flower_desloc.plan.planned_run import PlannedRun, PlannedStream
from flower_desloc.plan.theory import (
    averaging_limit,
    drift_bound,
    half_life,
    psi,
    step_size_bound,
)
from flower_desloc.plan.wall_clock import (
    Link,
    Topology,
    communication_seconds,
    compute_seconds,
    crossing,
    ring_seconds,
    star_seconds,
)
from flower_desloc.setup.build import build_optimizer, build_streams, check_streams
from flower_desloc.tasks import build_task

ROOT = Path(__file__).parents[1]
STREAMS = (PARAMS, "exp_avg", "exp_avg_sq")
PERIOD = st.integers(1, 12) | st.just(NEVER)
BETA = st.floats(0, 0.9999)
P = 4 * 1.7e9


def periods_of(*periods):
    return dict(zip(STREAMS, periods, strict=True))


def planned(*periods, betas=(0.95, 0.9999), **changes):
    moments = zip(("exp_avg", "exp_avg_sq"), periods[1:], betas, strict=True)
    run = PlannedRun(
        name="one",
        optimizer="adam",
        num_params=1e6,
        streams=(
            PlannedStream(name=PARAMS, period=periods[0], num_bytes=4e6),
            *(
                PlannedStream(name=s, period=k, num_bytes=4e6, beta=b, ceiling=1)
                for s, k, b in moments
            ),
        ),
        steps=960,
        workers=4,
        tokens=1e5,
        compute=1.0,
        link=Link(bandwidth=125e6, latency=0.01),
    )
    return replace(run, **changes)


# --- Moments -----------------------------------------------------------------------------------


@given(BETA, st.floats(0.01, 0.99))
def test_tau_is_the_step_at_which_a_decaying_weight_reaches_psi(beta, share):
    tau, weight, steps = half_life(beta, share), 1.0, 0
    while weight > share:
        weight *= beta
        steps += 1
    assert steps - 1 - 1e-9 <= tau <= steps + 1e-9


@pytest.mark.parametrize(
    ("beta", "steps"), [(0.95, 13.5), (0.999, 692.8), (0.9999, 6931), (0.99, 69)]
)
def test_the_papers_half_lives(beta, steps):
    assert half_life(beta) == pytest.approx(steps, rel=2e-3)


GRADIENTS = st.lists(st.floats(-9, 9), min_size=1, max_size=40)


@given(BETA, st.floats(0.01, 3), st.floats(-1, 1), GRADIENTS)
def test_clipped_gradients_move_a_moment_by_at_most_the_drift_bound(beta, rho, start, gradients):
    u = first_u = start * rho
    v = first_v = (start * rho) ** 2
    for g in gradients:
        clipped = min(max(g, -rho), rho)
        u = beta * u + (1 - beta) * clipped
        v = beta * v + (1 - beta) * clipped**2
    K = len(gradients)
    assert abs(u - first_u) <= drift_bound(beta, K, rho) + 1e-12
    # The paper's factor of 2 is not needed where nothing is negative.
    assert abs(v - first_v) <= drift_bound(beta, K, rho**2) / 2 + 1e-12


@given(BETA, st.integers(1, 60))
def test_the_drift_bound_of_the_first_moment_is_reached_when_the_gradient_changes_sign(beta, K):
    u = -1.0
    for _ in range(K):
        u = beta * u + (1 - beta)
    assert u + 1 == pytest.approx(drift_bound(beta, K, 1), rel=1e-9)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_states_of_our_optimizers_stay_within_ceiling_and_bound(name):
    torch.manual_seed(3)
    words = ["run.steps=60", f"optimizer.name={name}"]
    config = load("desloc_sgdm" if name == "sgdm" else "quickstart", words)
    config.optimizer.betas, config.optimizer.momentum = (0.8, 0.9), 0.8
    if name == "amsgrad":
        config.sync["max_exp_avg_sq"] = 7
    streams = planned_streams(config)
    x = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    optimizer = build_optimizer(config, [x])
    seen = {stream.name: [] for stream in streams if stream.name != PARAMS}
    for step in range(60):
        x.grad = torch.randn(5, dtype=torch.float64) + 4 * math.cos(step / 5)
        torch.nn.utils.clip_grad_norm_([x], 1.0)
        optimizer.step()
        for stream, values in seen.items():
            values.append(optimizer.state[x][stream].clone())
    for stream in streams:
        for K in (1, 5, 20) if stream.name != PARAMS else ():
            values = torch.stack(seen[stream.name])
            # Adam's own code multiplies in another order; a last bit may differ.
            assert values.abs().max() <= stream.ceiling * (1 + 1e-9)
            drift = (values[K:] - values[:-K]).abs().max()
            assert drift <= drift_bound(stream.beta, K, stream.ceiling) * (1 + 1e-9)


def test_an_unclipped_gradient_or_weight_decay_in_it_leaves_no_ceiling():
    def ceilings(*words):
        return [s.ceiling for s in planned_streams(load("desloc_adam", words))]

    assert ceilings("optimizer.clip_norm=0.5") == [None, 0.5, 0.25]
    assert ceilings("optimizer.clip_value=0.1") == [None, 0.1, pytest.approx(0.01)]
    assert ceilings("optimizer.clip_norm=null") == [None, None, None]
    assert ceilings("optimizer.weight_decay=0.1") == [None, None, None]
    assert ceilings("optimizer.weight_decay=0.1", "optimizer.name=adamw") == [None, 1, 1]


# --- Theorem 1 ---------------------------------------------------------------------------------


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
    exact = psi(p_x, p_u, beta) * (1 + math.sqrt(1 - p_x)) ** 2 / 4
    assert least == pytest.approx(exact, rel=1e-6)
    assert least <= psi(p_x, p_u, beta)
    # The paper's psi, with its factor 1 - p_u, is that of its own order.
    assert spread(best, u_first=True) == pytest.approx((1 - p_u) * exact, rel=1e-6)


def test_psi_at_the_extreme_probabilities():
    assert psi(1, 0, 0.9) == 0  # "recovers standard mini-batch SGDM"
    assert psi(0.5, 1, 0.9) == pytest.approx(8 * 0.1)  # 0 in the paper
    assert psi(0, 0.5, 0.9) == math.inf  # "with vanishing p_x the psi term becomes unbounded"
    assert psi(0, 1, 0.9) == math.inf  # the last gradient of a worker is in its step
    assert psi(1e-3, 0, 0.9) == pytest.approx(4e6, rel=2e-3)  # O(1 / p_x^2), whatever beta


@given(st.floats(0.01, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.99))
def test_averaging_the_momentum_more_often_allows_larger_steps(p_x, p_u, q_u, beta):
    seldom, often = sorted((p_u, q_u))
    assert psi(p_x, often, beta) <= psi(p_x, seldom, beta) * (1 + 1e-12)


@given(st.floats(0.01, 1), st.floats(0, 1), st.floats(0, 0.99), st.floats(0.1, 9), st.floats(1, 9))
def test_the_step_size_satisfies_the_three_conditions_of_the_proof(p_x, p_u, beta, L, B):
    value = psi(p_x, p_u, beta)
    eta = step_size_bound(value, beta, smoothness=L, dissimilarity=B)
    assert 12 * eta**2 * L**2 * (B**2 - 1) * value <= 0.5
    assert eta * L + 2 * eta**2 * beta**2 * L**2 / (1 - beta) ** 2 <= 0.5
    assert 12 * eta**2 * L**2 * value <= 0.5
    assert eta > 0


def test_the_momentum_limits_the_step_size_if_averages_do_not():
    assert averaging_limit(0.0) == math.inf
    assert step_size_bound(0.0, 0.9, smoothness=2) == pytest.approx(0.1 / 8)
    assert step_size_bound(math.inf, 0.9) == 0


# --- Bytes -------------------------------------------------------------------------------------


@given(st.tuples(PERIOD, PERIOD, PERIOD), st.tuples(*[st.integers(0, 99)] * 3))
def test_rates_times_steps_are_the_counted_bytes_over_a_common_multiple_of_all_periods(
    periods, sizes
):
    periods, sizes = periods_of(*periods), periods_of(*sizes)
    schedule = SyncSchedule(periods)
    T = math.lcm(*(k for k in periods.values() if k != NEVER))
    # A run's last average of params, for any period.
    extra = sizes[PARAMS] if periods[PARAMS] == NEVER else 0
    counted = {
        "DES-LOC": sum(uploads(schedule, sizes, T).desloc.values()) - extra,
        "Local Adam": sum(uploads(schedule, sizes, T).local_adam.values()) - extra,
        "DDP": uploads(schedule, sizes, T).ddp,
    }
    for method in method_rates(sizes, periods)[:3]:
        assert method.num_bytes * T == pytest.approx(counted[method.name])


@given(st.tuples(PERIOD, PERIOD, PERIOD), st.tuples(*[st.integers(0, 11)] * 3))
def test_windows_and_exchanges_are_those_of_the_schedule(periods, shifts):
    clocks = [(s, K, p) for s, K, p in zip(STREAMS, periods, shifts, strict=True) if K != NEVER]
    phases = {stream: shift % period for stream, period, shift in clocks}
    schedule = SyncSchedule(periods_of(*periods), phases=phases)
    T = math.lcm(*(k for k in periods if k != NEVER))
    _, _, desloc, _ = method_rates(dict.fromkeys(STREAMS, 1), schedule.periods, phases=phases)
    due = [schedule.due(step) for step in range(1, T + 1)]
    assert desloc.windows * T == pytest.approx(sum(map(bool, due)))
    assert desloc.exchanges * T == pytest.approx(sum(map(len, due)))


def test_with_coins_a_window_is_a_step_at_which_any_coin_falls():
    periods, steps = periods_of(3, 5, 10), 3000
    coins = SyncSchedule(periods, coin_seed=1)
    seen = sum(bool(coins.due(step)) for step in range(1, steps + 1)) / steps
    _, _, desloc, _ = method_rates(dict.fromkeys(STREAMS, 1), periods, coins=True)
    rates = [Fraction(1, 3), Fraction(1, 5), Fraction(1, 10)]
    falls = itertools.product((True, False), repeat=3)
    exact = sum(
        math.prod(p if fell else 1 - p for p, fell in zip(rates, fall, strict=True))
        for fall in falls
        if any(fall)
    )
    assert desloc.windows == pytest.approx(float(exact))
    assert seen == pytest.approx(float(exact), rel=0.05)


def test_the_papers_reductions():
    sizes, periods = dict.fromkeys(STREAMS, P), periods_of(256, 768, 1536)
    sent = {method.name: method.num_bytes for method in method_rates(sizes, periods)}
    assert sent["DDP"] / sent["DES-LOC"] == pytest.approx(170 + 2 / 3)
    assert sent["DDP"] / sent["Local Adam"] == pytest.approx(85 + 1 / 3)
    assert sent["DDP"] / sent["FedAvg"] == pytest.approx(256)
    assert sent["Local Adam"] / sent["DES-LOC"] == pytest.approx(2)
    assert sent["Local Adam"] / sent["FedAvg"] == pytest.approx(3)
    for u, v in ((3, 6), (6, 3), (4, 4)):  # all halve Local Adam
        _, local_adam, desloc, _ = method_rates(sizes, periods_of(16, 16 * u, 16 * v))
        assert local_adam.num_bytes / desloc.num_bytes == pytest.approx(2)


# --- Time --------------------------------------------------------------------------------------

LINK = Link(bandwidth=125e6, latency=0.2)


def test_a_star_sends_every_payload_up_and_then_every_mean_down():
    clock = LINK.latency
    for _ in range(4):  # one after another through the server's link
        clock += 1e9 / LINK.bandwidth
    clock += LINK.latency
    for _ in range(4):
        clock += 1e9 / LINK.bandwidth
    assert star_seconds(1e9, 4, LINK) == pytest.approx(clock)


def test_a_ring_sends_every_slice_of_the_payload_twice_around():
    clock = LINK.latency
    for _ in range(2 * (4 - 1)):  # reduce-scatter, then all-gather, of a quarter each
        clock += 1e9 / 4 / LINK.bandwidth
    assert ring_seconds(1e9, 4, LINK) == pytest.approx(clock)


def test_the_papers_totals_of_each_method_on_a_ring():
    d, D, S, MFU, M, T = 1.7e9, 20480 * 2**21, 989e12, 0.5, 4, 20480
    K_x, K_u, K_v, B, latency = 256, 768, 1536, LINK.bandwidth, LINK.latency
    exchange = 2 * 4 * d / B * (1 - 1 / M) + latency
    t_compute = 6 * d * D / (MFU * S * M)
    papers = {
        "DDP": t_compute + T * exchange,
        "FedAvg": t_compute + T / K_x * exchange,
        "Local Adam": t_compute + 3 * T / K_x * exchange,
        "DES-LOC": t_compute + (T / K_x + T / K_u + T / K_v) * exchange,
    }
    sizes, periods = dict.fromkeys(STREAMS, 4 * d), periods_of(K_x, K_u, K_v)
    compute = compute_seconds(d, D, workers=M, flops=S, mfu=MFU)
    for method in method_rates(sizes, periods):
        total = compute + T * communication_seconds(method, M, LINK, Topology.RING)
        assert total == pytest.approx(papers[method.name])


@given(st.integers(1, 9), st.integers(0, 3), st.integers(0, 3), st.floats(1, 1e12))
def test_on_a_ring_local_adam_is_faster_than_ddp_if_and_only_if_k_is_above_3(K, u, v, bandwidth):
    """The paper asks for 3 K < T, which says nothing of it; its own formulas say 3 T / K < T."""
    run = planned(K, K * 2**u, K * 2**v)
    ddp, local_adam, desloc, fedavg = (
        communication_seconds(m, 4, Link(bandwidth=bandwidth, latency=0.1), Topology.RING)
        for m in run.methods
    )
    assert (local_adam < ddp * (1 - 1e-9)) == (K > 3)
    assert fedavg <= desloc <= local_adam * (1 + 1e-9)


@given(st.sampled_from(Topology), st.floats(0.01, 5), st.floats(0.05, 1))
def test_at_the_stated_bandwidth_waiting_takes_the_stated_share(topology, share, alpha):
    run = planned(16, 48, 96, alpha=alpha)
    for method in run.methods:
        bandwidth = run.bandwidth_for(method, topology, share)
        delay = run.waiting(method, topology, Link(bandwidth=math.inf, latency=0.01))
        if bandwidth is None:
            assert delay >= share * run.compute
        else:
            waiting = run.waiting(method, topology, Link(bandwidth=bandwidth, latency=0.01))
            assert waiting == pytest.approx(share * run.compute)


def test_hidden_communication_costs_nothing_and_needs_no_bandwidth():
    run = planned(16, 48, 96, alpha=0.0)
    assert run.waiting(run.desloc, Topology.STAR) == 0
    assert run.bandwidth_for(run.desloc, Topology.STAR, 0.1) == 0


def test_two_methods_cross_if_one_sends_fewer_bytes_and_the_other_fewer_messages():
    run = planned(2, 4, 4)
    ddp, local_adam, desloc, fedavg = run.methods
    where = crossing(ddp, local_adam, 4, 0.01, Topology.STAR)
    link = Link(bandwidth=where, latency=0.01)
    times = [communication_seconds(m, 4, link, Topology.STAR) for m in (ddp, local_adam)]
    assert times[0] == pytest.approx(times[1])
    # Both sides of it.
    for factor, ddp_is_faster in ((0.5, True), (2.0, False)):
        link = Link(bandwidth=factor * where, latency=0.01)
        times = [communication_seconds(m, 4, link, Topology.STAR) for m in (ddp, local_adam)]
        assert (times[0] < times[1]) == ddp_is_faster
    assert crossing(ddp, fedavg, 4, 0.01, Topology.STAR) is None
    # On the paper's ring bytes and messages go together, so that nothing ever crosses.
    for one, other in itertools.combinations((ddp, local_adam, desloc, fedavg), 2):
        assert crossing(one, other, 4, 0.01, Topology.RING) is None


# --- Advice ------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(
    st.sampled_from(Topology),
    st.floats(4.5, 9),
    st.floats(0, 0.1),
    st.booleans(),
    st.booleans(),
    st.sampled_from([("adam", 1), ("adopt", 3)]),
)
def test_the_recommended_period_is_the_smallest_affordable_one(
    topology, exponent, latency, coins, hidden, optimizer
):
    name, of_u = optimizer
    run = planned(
        16,
        48,
        96,
        optimizer=name,
        link=Link(bandwidth=10**exponent, latency=latency),
        coins=coins,
        alpha=0.5 if hidden else 1.0,
    )

    def affordable(K):
        clocks = run.with_periods({PARAMS: K, "exp_avg": of_u * K, "exp_avg_sq": 6 * K})
        return clocks.waiting(clocks.desloc, topology) <= run.share * run.compute

    smallest = next((K for K in range(1, run.steps + 1) if affordable(K)), None)
    periods = recommended(run, topology)
    if smallest is None:
        assert periods is None
    else:
        K = smallest
        assert periods == {PARAMS: K, "exp_avg": of_u * K, "exp_avg_sq": 6 * K}


@settings(max_examples=20)
@given(st.sampled_from([0.95, 0.99, 0.999]), st.floats(5.5, 9), st.sampled_from(["adam", "adopt"]))
def test_a_slow_momentum_is_averaged_up_to_half_a_half_life_apart(beta1, exponent, name):
    run = planned(
        16,
        48,
        96,
        betas=(beta1, 0.9999),
        optimizer=name,
        mix=0.7,
        link=Link(bandwidth=10**exponent, latency=1e-3),
    )
    most = half_life(beta1) / 2

    def at(K):
        return {PARAMS: K, "exp_avg": max(1, int(most / K)) * K, "exp_avg_sq": 6 * K}

    def affordable(K):
        clocks = run.with_periods(at(K))
        return clocks.waiting(clocks.desloc, Topology.STAR) <= run.share * run.compute

    smallest = next((K for K in range(1, run.steps + 1) if affordable(K)), None)
    assert recommended(run, Topology.STAR) == (smallest and at(smallest))


@pytest.mark.parametrize("name", ["adam", "adopt"])
def test_rare_averages_of_a_slow_momentum_are_no_risk(name):
    run = planned(20, 340, 340, betas=(0.999, 0.9999), optimizer=name, mix=0.7, **GOOD)
    assert [line for line in warnings(run) if "exp_avg" in line] == []
    config = load("desloc_adopt", ["optimizer.betas=[0.999,0.9999]", "optimizer.mix=0.7"])
    assert planned_run(config, LINK, num_params=1e6, flops=1, mfu=1).mix == 0.7


@pytest.mark.parametrize("delay", [1, 4, 99])
def test_advice_for_a_star_counts_what_a_delay_hides(delay):
    link = Link(bandwidth=8e6, latency=0.01)
    in_time = planned(16, 16, 96, bound=True, link=link)
    late = replace(in_time, delay=delay)
    before, after = (recommended(run, Topology.STAR) for run in (in_time, late))
    assert after[PARAMS] < before[PARAMS]
    assert late.with_periods(after).late_waiting() <= late.share * late.compute
    assert recommended(late, Topology.RING) == recommended(in_time, Topology.RING)

    def of_a_star(run):
        return [line for line in warnings(run) if "on a star communication" in line]

    assert len(of_a_star(in_time)) == 1
    waits = late.late_waiting() > late.share * late.compute
    assert [f"sync_delay={delay} does not hide" in line for line in of_a_star(late)] == [
        True
    ] * waits


def test_every_optimizers_states_have_a_multiple():
    for name in OPTIMIZERS:
        config = load("quickstart", f"optimizer.name={name}")
        streams = build_streams(config, torch.nn.Linear(1, 1))
        assert streams.keys() - {PARAMS} <= MULTIPLES.keys()


GOOD = {"link": Link(bandwidth=125e6, latency=1e-3), "share": 0.03}


@pytest.mark.parametrize(
    ("periods", "changes"),
    [((32, 32, 192), {"bound": True}), ((20, 20, 240), {"optimizer": "adopt"})],
)
def test_a_sound_run_has_no_warnings(periods, changes):
    assert list(warnings(planned(*periods, **GOOD, **changes))) == []


@pytest.mark.parametrize("name", ["adam", "adamw", "adopt"])
@pytest.mark.parametrize("betas", ["[0.95,0.95]", "[0.9,0.999]", "[0.99,0.95]"])
def test_a_bound_is_recommended_exactly_where_a_run_accepts_it(name, betas):
    config = load("quickstart", [f"optimizer.name={name}", f"optimizer.betas={betas}"])
    recommends = can_bound(planned_run(config, LINK, num_params=1e6, flops=1, mfu=1))
    config.sync_bound = True
    if recommends:
        check_streams(config)
    else:
        with pytest.raises(ConfigError, match="sync_bound=true"):
            check_streams(config)


@pytest.mark.parametrize(
    ("periods", "changes", "said"),
    [
        ((16, 96, 96), {}, "sync.exp_avg=96: 7.1 half-lives, after which 1% of an average is left"),
        ((16, 48, NEVER), {}, "sync.exp_avg_sq=never: every worker keeps its own"),
        ((16, "reset", 96), {}, "sync.exp_avg=reset: it starts from zero"),
        ((NEVER, 48, 96), {}, "sync.params=never: the parameters are averaged once"),
        ((16, 48, 1920), {}, "sync.exp_avg_sq=1920: longer than the run of 960 steps"),
        ((961, 2883, 5766), {}, "sync.params=961: longer than the run of 960 steps"),
        ((16, 8, 96), {}, "sync.params=16: averaged less often than exp_avg;"),
        ((16, 40, 96), {}, "sync.exp_avg=40: not a multiple of sync.params=16"),
        ((16, 48, 96), {"betas": (0.95, 0.9)}, "optimizer.betas=[0.95,0.9]"),
        ((16, 48, 96), {"workers": 1}, "--workers=1: there is no other worker"),
        ((16, 48, 96), {"link": LINK}, "on a star communication takes 0.049 times"),
        ((16, 48, 96), {"share": 0.004}, "on a ring communication takes 0.00459 times"),
        ((16, 48, 96), {"share": 0.5}, "sync.params=16: the link of a star allows 2"),
        (
            (512, 1536, 3072),
            {"link": Link(bandwidth=125e6, latency=1e-4), "share": 0.001, "steps": 4000},
            "--bandwidth: on a star the link needs sync.params=555",
        ),
        ((16, 48, 96), {"compute": 1e-5}, "--step-seconds: a step computes for less time"),
        ((16, 48, 96), {}, "sync.exp_avg=48: the least loss was measured with exp_avg averaged"),
        ((16, 16, 96), {}, "sync.exp_avg=16: averaged more often than exp_avg_sq, after which"),
    ],
)
def test_each_warning(periods, changes, said):
    found = list(warnings(planned(*periods, **(GOOD | changes))))
    assert [line for line in found if said in line], found


def test_a_run_of_unequal_sites_is_not_like_the_measured_ones():
    unequal = load("quickstart", ["federation.min_steps=0.5"])
    for config, expected in [(load("quickstart"), True), (unequal, False)]:
        assert planned_run(config, LINK, step_seconds=1, flops=1, mfu=1).as_measured == expected


def test_the_order_in_which_streams_are_stated_changes_no_warning():
    run = planned(16, 48, 96, **(GOOD | {"betas": (0.95, 0.9)}))
    turned = replace(run, streams=run.streams[::-1])
    assert set(warnings(turned)) == set(warnings(run)) != set()


def test_a_moment_without_a_bound_is_named():
    run = planned(20, 20, 240, optimizer="adopt", **GOOD)
    unbounded = tuple(replace(stream, ceiling=None) for stream in run.streams)
    (line,) = warnings(replace(run, streams=unbounded))
    assert "nothing bounds exp_avg and exp_avg_sq" in line
    assert "--rho" in line


# --- The command -------------------------------------------------------------------------------


def plan(*arguments):
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, " ".join(result.stdout.split()), result.stderr


SMALL = ("--params", "1e6", "--step-seconds", 0.1)


def test_the_page_shows_what_its_commands_print():
    page = (ROOT / "docs" / "plan.md").read_text()
    shown = re.findall(r"```bash\ndesloc (plan .*?)\n```\n\n```\n(.*?)\n```", page, re.DOTALL)
    assert len(shown) == 2
    for command, output in shown:
        result = CliRunner(env={"COLUMNS": "80"}).invoke(app, command.split())
        lines = [line.rstrip() for line in result.stdout.strip().splitlines()]
        assert lines == output.splitlines(), command


def test_the_authors_clock_on_the_page_is_the_formula_with_their_inputs_and_the_commands_output():
    page = (ROOT / "docs" / "plan.md").read_text()
    command = re.search(r"desloc (plan --params 1\.3e9 .*)", page)[1]
    table = page[page.index("| share of time computing, ring |") :].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    exchanges = {
        "DDP": 20_000,
        "Local Adam": 3 * (20_000 / 256),
        "DES-LOC": 20_000 * (1 / 256 + 1 / 768 + 1 / 1536),
        "FedAvg": 20_000 / 256,
    }
    compute = 6 * 1.3e9 * 40e9 / (0.5 * 312e12 * 4)
    for column, title in enumerate(rows[0][1:], start=1):
        bandwidth = float(title.removesuffix(" Gbit/s"))
        _, printed, _ = plan(*command.split()[1:], "--bandwidth", 1000 * bandwidth)
        ring = printed.partition("Time on a ring")[2]
        for name, *cells in rows[2:6]:
            wait = exchanges[name] * (2 * 1.3e9 * 16 / (bandwidth * 1e9) * 3 / 4 + 0.01)
            share = 100 * compute / (compute + wait)
            assert cells[column - 1] == f"{share:.3g}%"
            assert re.search(rf"{name} .*?{share:.3g}%", ring), (name, bandwidth)


def test_preset_override_and_every_option_take_effect():
    code, said, _ = plan(
        *("desloc_adam", "sync.params=8", "sync.exp_avg=24", "sync.exp_avg_sq=never"),
        *("--params", "1e6", "--workers", 2, "--steps", 4000, "--tokens-per-step", 5000),
        *("--value-bytes", 2, "--bandwidth", 500, "--latency", 20, "--flops", "1e12"),
        *("--mfu", 0.25, "--overlap", 0.5, "--share", 0.2, "--beta1", 0.9, "--beta2", 0.99),
        *("--rho", 0.5, "--psi", 0.25, "--smoothness", 10, "--dissimilarity", 3),
    )
    assert code == 0
    assert "desloc_adam: 1,000,000 parameters, adam on 2 workers" in said
    # 6 * 1e6 * 5000 / (0.25 * 1e12 * 2)
    assert "4,000 steps of 5,000 tokens; a step computes 60 ms" in said
    assert "500 Mbit/s, 20 ms latency; 50% of communication hidden" in said
    assert "tau_0.25" in said
    # ln 0.25 / ln 0.9, 24 of it, 0.9^24, rho, 2 rho (1 - 0.9^24)
    assert "exp_avg every 24 13.2 1.82 0.0798 0.5 0.92 " in said
    assert f"exp_avg_sq never 137.9 29 {0.99**4000:.3g} 0.25 0.5 " in said
    # 1/8 + 1/24 payloads of 2 MB
    assert "DES-LOC 0.167 333 kB" in said
    # alpha (2 M P / B + 2 l) of a window of 4/3 payloads, every 8 steps
    star = 0.5 * (2 * 2 * 2e6 / 62.5e6 * (1 / 8 + 1 / 24) + 2 * 0.02 / 8)
    assert f"DES-LOC {star * 1e3:.3g} ms" in said
    assert "L = 10, B = 3" in said
    value = psi(1 / 8, 1 / 24, 0.9)
    eta = step_size_bound(value, 0.9, smoothness=10, dissimilarity=3)
    assert f"as stated 0.125 0.0417 {value:.0f} {eta:.3g} psi" in said


def test_without_a_preset_the_size_of_the_model_is_enough():
    code, said, _ = plan("sync.params=64", "--params", "7e9")
    assert code == 0
    assert "plan: 7,000,000,000 parameters" in said
    assert "params every 64" in said
    assert "exp_avg_sq every 1536" in said


def test_the_model_of_a_preset_is_measured_without_its_weights():
    config = load("quickstart")
    sizes = stream_bytes(build_streams(config, build_task(config).build_model()))
    size = model_size(config)
    assert sizes == dict.fromkeys(STREAMS, size * dtype_bytes(config))
    assert f"quickstart: {size:,} parameters" in plan("quickstart")[1]


def test_a_plan_counts_compressed_streams_as_they_are_sent():
    config = load("lean")
    sent = wire_bytes(build_streams(config, build_task(config).build_model()), config.wire)
    run = planned_run(config, LINK, step_seconds=1, flops=1, mfu=1)
    # A tensor's last block may not be full.
    assert run.wire == pytest.approx(sent, rel=1e-3)
    bytes_a_step = sum(size / run.periods[name] for name, size in run.wire.items())
    assert run.desloc.num_bytes == pytest.approx(bytes_a_step)
    uncompressed = load("lean", [f"wire.{name}=fp32" for name in STREAMS])
    exact = planned_run(uncompressed, LINK, step_seconds=1, flops=1, mfu=1)
    assert [m for m in run.methods if m is not run.desloc] == [
        m for m in exact.methods if m is not exact.desloc
    ]


def test_coins_are_named():
    said = plan("quickstart", "sync_mode=probabilistic", *SMALL)[1]
    assert "averaged by coins" in said


@pytest.mark.parametrize("preset", sorted(path.stem for path in (ROOT / "configs").glob("*.yaml")))
def test_every_preset_with_periods_has_a_plan(preset):
    code, said, error = plan(preset, *SMALL)
    if PARAMS in load(preset).sync:
        assert (code, error) == (0, "")
        assert "Recommended" in said
    else:
        assert code == 2
        assert "sync.params is not set" in error


def test_it_draws_when_asked_to_and_writes_nothing_otherwise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert plan("quickstart", *SMALL)[0] == 0
    assert not [*tmp_path.iterdir()]
    code, said, _ = plan("quickstart", "sync.exp_avg_sq=never", *SMALL, "--plot", "plan.png")
    assert code == 0
    assert said.endswith("drawn into plan.png")
    assert (tmp_path / "plan.png").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "which preset, or how many --params?"),
        (["1.8b"], "no preset of that name"),
        (["1.7b", "sync.parms=3"], "sync.parms"),
        (["1.7b", "sync.params=0"], "the period of 'params'"),
        (["1.7b", "sync.buffers=3"], "sync.buffers: "),
        (["1.7b", *SMALL, "--plot", "plan.xyz"], "--plot plan.xyz: "),
        (["1.7b", *SMALL, "--plot", "no/such/plan.png"], "--plot no/such/plan.png: "),
    ],
)
def test_bad_input_is_a_sentence_that_names_the_option(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, error = plan(*arguments)
    assert code == 2
    assert error.startswith("error: ")
    assert said in error.splitlines()[0]


@pytest.mark.parametrize(
    ("limits", "values"),
    [
        ("at least 1", "params=0 workers=0 steps=0 tokens-per-step=0 dissimilarity=0.5 flops=inf"),
        ("above 0", "value-bytes=0 bandwidth=0 bandwidth=nan step-seconds=0 share=0 rho=0"),
        ("above 0", "smoothness=0"),
        ("at least 0", "latency=-1"),
        ("at least 0 and at most 1", "overlap=2"),
        ("above 0 and at most 1", "mfu=1.5"),
        ("at least 0 and below 1", "beta1=1 beta2=-0.5"),
        ("above 0 and below 1", "psi=1"),
    ],
)
def test_an_option_outside_its_limits_is_refused(limits, values):
    for value in values.split():
        code, _, error = plan("1.7b", f"--{value}")
        assert (code, error) == (2, f"error: --{value}: must be {limits}\n")


# ----------------------------------------------------------------------------- Measured gaps


def test_the_measured_gaps_are_those_of_the_ladder():
    ladder = load_benchmark("ladder")
    written = ladder.package_data(ladder.gaps(ladder.results()))
    assert written == ladder.MEASURED.read_text()


@pytest.mark.parametrize("gap", measured(), ids=str)
def test_a_measured_run_is_nearest_to_itself(gap):
    streams = ("params", "exp_avg", "exp_avg_sq")
    sent = [name for name, period in zip(streams, gap.periods, strict=True) if period != "never"]
    changes = [f"sync.{name}={p}" for name, p in zip(streams, gap.periods, strict=True)]
    changes += [f"wire.{name}={f}" for name, f in zip(sent, gap.formats, strict=False)]
    changes += [f"sync_bound={gap.bound}".lower(), f"data.partition={gap.partition}"]
    run = planned_run(
        load(f"desloc_{gap.optimizer}", changes),
        LINK,
        num_params=gap.params,
        tokens=4 * gap.tokens,
        step_seconds=1,
        flops=1,
        mfu=1,
    )
    assert run.tokens is not None
    apart, found = nearest(
        run.optimizer,
        run.periods,
        run.num_params,
        run.tokens / run.workers,
        bound=run.bound,
        formats=run.formats,
        partition=run.partition,
    )[0]
    assert apart == 1
    same = ("periods", "formats", "bound", "partition", "params", "tokens")
    assert [getattr(found, name) for name in same] == [getattr(gap, name) for name in same]


@given(st.sampled_from(measured()), st.floats(0.1, 10), st.integers(1, 9), st.integers(1, 9))
def test_the_distance_of_a_measurement_is_the_product_of_factors_on_one_axis(gap, factor, u, v):
    """1 where a run is equal, the factor where one thing differs, and infinite for never."""
    assert gap.distance(gap.params, gap.tokens, gap.periods) == 1
    size = gap.distance(gap.params * factor, gap.tokens, gap.periods)
    batch = gap.distance(gap.params, gap.tokens * factor, gap.periods)
    assert size == pytest.approx(batch) == pytest.approx(max(factor, 1 / factor))
    longer = tuple(p if p == "never" else 3 * p for p in gap.periods)
    assert gap.distance(gap.params, gap.tokens, longer) == pytest.approx(3)
    other = tuple("never" if p != "never" else 16 for p in gap.periods[1:])
    assert gap.distance(gap.params, gap.tokens, (gap.periods[0], *other)) == math.inf


def test_a_plan_shows_what_the_nearest_runs_lost_and_says_if_none_is_near():
    small = ["--params", "41120", "--tokens-per-step", "1024"]
    code, said, _ = plan("desloc_adam", *small)
    assert code == 0
    assert "of DES-LOC above Local: the nearest measurements" in said
    assert "unknown" not in said
    longer = [f"sync.{name}=1600" for name in STREAMS]
    for arguments in (["1.7b"], *(["desloc_adam", *small, each] for each in longer)):
        assert "unknown: no measurement is near" in plan(*arguments)[1], arguments
    late = ["desloc_adam", *small, "sync_delay=8"]
    for arguments in (late, ["desloc_adam", *small, "wire.params=bf16"]):
        assert "unknown: measurements differ in" in plan(*arguments)[1], arguments
    assert "above Local" not in plan("local_adam")[1]
    assert "above Local" not in plan("desloc_sgdm")[1]
    assert "16/16/96 lossy" in plan("lean")[1]


@pytest.mark.parametrize("phases", [{}, {"exp_avg": 16, "exp_avg_sq": 32}], ids=["0", "16"])
@pytest.mark.parametrize("delay", [0, 1, 4, 16, 99])
def test_late_averages_wait_as_long_as_a_worker_that_steps_meanwhile(delay, phases):
    run = planned(16, 48, 96, phases=phases, delay=delay, link=Link(bandwidth=8e6, latency=0.01))
    clock = arrival = 0.0
    due = 0
    schedule = SyncSchedule(run.periods, phases=phases)
    for step in range(run.steps):
        if step == due:
            clock = max(clock, arrival)
        clock += run.compute
        if streams := schedule.due(step + 1):
            clock = max(clock, arrival)  # a short window merges at its end
            arrival = clock + star_seconds(4e6 * len(streams), run.workers, run.link)
            due = step + 1 + delay
    total = max(clock, arrival)
    assert run.steps * (run.compute + run.late_waiting()) == pytest.approx(total)
    if not delay:
        assert run.late_waiting() == pytest.approx(run.waiting(run.desloc, Topology.STAR))


def test_the_plan_shows_the_largest_window_and_late_averages():
    said = plan("quickstart", "sync_delay=4", "--step-seconds", "0.2", "--bandwidth", "100")[1]
    assert "late by 4" in said
    assert "largest window: 13.0 MB, 3 payloads" in said
    apart = plan("quickstart", "sync_phase.exp_avg=16", "sync_phase.exp_avg_sq=32")[1]
    assert "largest window: 8.7 MB, 2 payloads" in apart
    assert "late by" not in apart


def test_the_seconds_of_a_window_and_its_transfer_pass_in_part_together():
    config = load("desloc_adam", "sync.params=16 sync.exp_avg=48 sync.exp_avg_sq=96")
    free = planned_run(config, LINK, step_seconds=1, flops=1, mfu=1)
    transfer = free.waiting(free.desloc, Topology.STAR)
    for window_seconds in (0.0, 8 * transfer, 32 * transfer):  # a window every 16 steps
        run = replace(free, window_seconds=window_seconds)
        waiting = run.waiting(run.desloc, Topology.STAR)
        assert waiting == pytest.approx(math.sqrt(transfer**2 + (window_seconds / 16) ** 2))
        assert run.waiting(run.desloc, Topology.RING) == free.waiting(free.desloc, Topology.RING)
        enough = run.bandwidth_for(run.desloc, Topology.STAR, waiting / run.compute)
        assert enough is not None
        at = Link(bandwidth=enough, latency=LINK.latency)
        assert run.waiting(run.desloc, Topology.STAR, at) == pytest.approx(waiting)
        if window_seconds > 16 * transfer:
            assert run.bandwidth_for(run.desloc, Topology.STAR, transfer / run.compute) is None
    said = plan("quickstart", "--step-seconds", "0.2", "--window-seconds", "5")[1]
    assert "314 ms" in said.partition("Time on a star")[2].partition("Time on a ring")[0]
