"""Formulas of the plan against simulation and the paper's numbers: moments, bytes, time."""

import math
from dataclasses import replace

import pytest
import torch
from command import accepted
from configurations import with_values
from hypothesis import given
from hypothesis import strategies as st
from planned import LINK, STREAMS, by_stream, planned, run_of

from flower_desloc import NEVER, PARAMS, SyncSchedule
from flower_desloc.app.config import load
from flower_desloc.app.plan.advice import recommended
from flower_desloc.app.plan.from_config import dtype_bytes, model_size, planned_streams
from flower_desloc.app.plan.theory import drift_bound, half_life
from flower_desloc.app.plan.wall_clock import (
    Link,
    Topology,
    communication_seconds,
    compute_seconds,
    star_seconds,
)
from flower_desloc.app.setup.build import build_optimizer
from flower_desloc.app.setup.meta_model import meta_model
from flower_desloc.app.setup.preflight import Needs
from flower_desloc.app.setup.streams import RunStreams
from flower_desloc.app.tasks import build_task
from flower_desloc.core.traffic import compressed_bytes, method_rates, rate, stream_bytes, uploads
from flower_desloc.optim import OPTIMIZERS

PERIOD = st.integers(1, 12) | st.just(NEVER)
BETA = st.floats(0, 0.9999)


# --- Moments -----------------------------------------------------------------------------------


@given(BETA, st.floats(0.01, 0.99))
def test_tau_is_the_step_at_which_a_decaying_weight_reaches_psi(beta, share):
    tau, weight, steps = half_life(beta, share), 1.0, 0
    while weight > share:
        weight *= beta
        steps += 1
    assert steps - 1 - 1e-9 <= tau <= steps + 1e-9


@given(BETA, st.integers(1, 60))
def test_the_drift_bound_of_the_first_moment_is_reached_when_the_gradient_changes_sign(beta, K):
    u = -1.0
    for _ in range(K):
        u = beta * u + (1 - beta)
    assert u + 1 == pytest.approx(drift_bound(beta, K, 1), rel=1e-9)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_states_of_our_optimizers_stay_within_ceiling_and_bound(name):
    torch.manual_seed(3)
    words = ["run.steps=60", f"optimizer.name={name}", "optimizer.lr=0.1"]
    config = load("quickstart", words)
    betas = (0.8, 0.9, 0.95)[: len(config.optimizer.betas)]
    sync = {PARAMS: 8, **{state.name: 7 for state in OPTIMIZERS[name].all_states}}
    changed = {"optimizer.betas": betas, "optimizer.momentum": 0.8, "sync": sync}
    config = with_values(config, changed)
    streams = planned_streams(RunStreams(config))
    x = torch.nn.Parameter(torch.randn(5, 1, dtype=torch.float64))
    optimizer = build_optimizer(config, [x])
    seen: dict[str, list[torch.Tensor]] = {state.name: [] for state in OPTIMIZERS[name].states}
    for step in range(60):
        x.grad = torch.randn(5, 1, dtype=torch.float64) + 4 * math.cos(step / 5)
        torch.nn.utils.clip_grad_norm_([x], 1.0)
        optimizer.step()
        for name, values in seen.items():
            values.append(optimizer.state[x][name].clone())
    for stream in streams:
        for K in (1, 5, 20) if stream.name in seen else ():
            taken = torch.stack(seen[stream.name])
            # Adam's own code multiplies in another order; a last bit may differ.
            assert stream.ceiling is not None
            assert stream.beta is not None
            assert taken.abs().max() <= stream.ceiling * (1 + 1e-9)
            drift = (taken[K:] - taken[:-K]).abs().max()
            assert drift <= drift_bound(stream.beta, K, stream.ceiling) * (1 + 1e-9)


def test_an_unclipped_gradient_or_weight_decay_in_it_leaves_no_ceiling():
    def ceilings(*words):
        return [s.ceiling for s in planned_streams(RunStreams(load("desloc_adam", words)))]

    assert ceilings("optimizer.clip_norm=0.5") == [None, 0.5, 0.25]
    assert ceilings("optimizer.clip_value=0.1") == [None, 0.1, pytest.approx(0.01)]
    assert ceilings("optimizer.clip_norm=null") == [None, None, None]
    assert ceilings("optimizer.weight_decay=0.1") == [None, None, None]
    assert ceilings("optimizer.weight_decay=0.1", "optimizer.name=adamw") == [None, 1, 1]


# --- Bytes -------------------------------------------------------------------------------------


@given(
    st.tuples(PERIOD, PERIOD, PERIOD),
    st.tuples(*[st.integers(0, 11)] * 3),
    st.tuples(*[st.integers(0, 99)] * 3),
    st.frozensets(st.integers(1, 12)),
)
def test_rates_are_what_the_schedule_counts_over_a_common_multiple_of_all_periods(
    periods, shifts, sizes, once_at
):
    clocks = [(s, K, p) for s, K, p in zip(STREAMS, periods, shifts, strict=True) if K != NEVER]
    phases = {stream: shift % period for stream, period, shift in clocks}
    periods, sizes = by_stream(*periods), by_stream(*sizes)
    T = math.lcm(12, *(K for _, K, _ in clocks))
    schedule = SyncSchedule(periods, once_at=once_at, phases=phases)
    due = [schedule.due(step) for step in range(1, T + 1)]
    ddp, local_adam, desloc, _ = method_rates(schedule, sizes, T)
    assert desloc.windows * T == pytest.approx(sum(map(bool, due)))
    assert desloc.exchanges * T == pytest.approx(sum(map(len, due)))
    counted = uploads(schedule, sizes, T)
    # A run ends with an average of params, even where none is due.
    extra = 0 if PARAMS in due[-1] else sizes[PARAMS]
    assert desloc.num_bytes * T == pytest.approx(sum(counted.desloc.values()) - extra)
    assert local_adam.num_bytes * T == pytest.approx(sum(counted.local_adam.values()) - extra)
    assert ddp.num_bytes * T == pytest.approx(counted.ddp)


@given(
    st.tuples(PERIOD, PERIOD, PERIOD),
    st.tuples(*[st.integers(0, 99)] * 3),
    st.frozensets(st.integers(1, 12)),
)
def test_with_coins_rates_are_the_mean_of_what_all_seeds_count(periods, sizes, once_at):
    T = 12
    periods, sizes = by_stream(*periods), by_stream(*sizes)
    chances = [
        {s: 1.0 if t in once_at else rate(K) for s, K in periods.items()} for t in range(1, T + 1)
    ]
    schedule = SyncSchedule(periods, coin_seed=0, once_at=once_at)
    _, local_adam, desloc, fedavg = method_rates(schedule, sizes, T)
    none = [math.prod(1 - chance for chance in step.values()) for step in chances]
    assert desloc.windows * T == pytest.approx(T - sum(none))
    assert desloc.exchanges * T == pytest.approx(sum(sum(step.values()) for step in chances))
    sent = sum(sizes[s] * chance for step in chances for s, chance in step.items())
    assert desloc.num_bytes * T == pytest.approx(sent)
    of_params = sum(step[PARAMS] for step in chances)
    assert [m.windows * T for m in (local_adam, fedavg)] == pytest.approx([of_params] * 2)
    assert [m.exchanges * T for m in (local_adam, fedavg)] == pytest.approx(
        [3 * of_params, of_params]
    )
    assert local_adam.num_bytes * T == pytest.approx(of_params * sum(sizes.values()))
    assert fedavg.num_bytes * T == pytest.approx(of_params * sizes[PARAMS])


def test_averages_that_a_configuration_adds_once_are_planned_as_a_run_counts_them():
    config = load("quickstart", "sync_once_at=[1,2,3,4,5,6,7,8]")
    run = run_of(config)
    counted = uploads(RunStreams(config).schedule, run.sizes, run.steps)
    sent = [run.steps * method.num_bytes for method in run.methods[:3]]
    totals = (counted.ddp, sum(counted.local_adam.values()), sum(counted.desloc.values()))
    assert sent == pytest.approx(totals)


def test_with_coins_a_window_is_a_step_at_which_any_coin_falls():
    periods, steps = by_stream(3, 5, 10), 3000
    coins = SyncSchedule(periods, coin_seed=1)
    seen = sum(bool(coins.due(step)) for step in range(1, steps + 1)) / steps
    _, _, desloc, _ = method_rates(coins, dict.fromkeys(STREAMS, 1), steps)
    exact = 1 - (2 / 3) * (4 / 5) * (9 / 10)
    assert desloc.windows == pytest.approx(exact)
    assert seen == pytest.approx(exact, rel=0.05)


def test_the_model_of_a_preset_is_measured_without_its_weights():
    config = load("quickstart")
    sizes = stream_bytes(RunStreams(config).initial(build_task(config).build_model()))
    size = model_size(meta_model(config))
    assert sizes == dict.fromkeys(STREAMS, size * dtype_bytes(config))
    assert f"quickstart: {size:,} parameters" in accepted("plan", "quickstart")


def test_a_plan_counts_buffers_as_a_run_sends_them():
    config = load("digits", ["model.type=resnet", "sync.buffers=8"])
    streams = RunStreams(config).initial(build_task(config).build_model())
    run = run_of(config)
    assert run.sizes == stream_bytes(streams)
    periods = recommended(run, Topology.STAR)
    assert periods is not None
    assert periods["buffers"] == periods[PARAMS]


def test_a_plan_counts_masked_codes_as_the_memory_needs_do():
    config = load("quickstart", "privacy.secure_aggregation=true federation.norm_bound=null")
    needs, run = Needs(config), run_of(config)
    assert run.compressed == needs.sent_up
    assert run.compressed["exp_avg_sq"] > run.sizes["exp_avg_sq"] == needs.sizes["exp_avg_sq"]


def test_a_plan_counts_compressed_streams_as_they_are_sent():
    config = load("lean")
    sent = compressed_bytes(
        RunStreams(config).initial(build_task(config).build_model()), config.compression, {}
    )
    run = run_of(config)
    # A tensor's last block may not be full.
    assert run.compressed == pytest.approx(sent, rel=1e-3)
    bytes_a_step = sum(size / run.periods[name] for name, size in run.compressed.items())
    assert run.desloc.num_bytes == pytest.approx(bytes_a_step)
    exact = run_of(load("lean", [f"compression.{name}=fp32" for name in STREAMS]))
    assert [m for m in run.methods if m not in exact.methods] == [run.desloc]


# --- Time --------------------------------------------------------------------------------------


def test_a_star_sends_every_payload_up_and_then_every_mean_down():
    clock = LINK.latency
    for _ in range(4):  # one after another through the server's link
        clock += 1e9 / LINK.bandwidth
    clock += LINK.latency
    for _ in range(4):
        clock += 1e9 / LINK.bandwidth
    assert star_seconds(1e9, 4, LINK) == pytest.approx(clock)


def test_the_papers_totals_of_each_method_on_a_ring():
    d, D, S, MFU, M, T = 1.7e9, 20480 * 2**21, 989e12, 0.5, 4, 20480
    compute = 6 * d * D / (MFU * S * M)
    exchange = 2 * 4 * d / LINK.bandwidth * (1 - 1 / M) + LINK.latency
    exchanges = {
        "DDP": T,
        "FedAvg": T / 256,
        "Local Adam": 3 * T / 256,
        "this run": T / 256 + T / 768 + T / 1536,
    }
    schedule = SyncSchedule(by_stream(256, 768, 1536))
    for method in method_rates(schedule, dict.fromkeys(STREAMS, 4 * d), T):
        total = compute_seconds(d, D, workers=M, flops=S, mfu=MFU)
        total += T * communication_seconds(method, M, LINK, Topology.RING)
        assert total == pytest.approx(compute + exchanges[method.name] * exchange)


@given(
    st.sampled_from(Topology), st.floats(0.01, 5), st.floats(0.05, 1), st.sampled_from([0, 0.5, 9])
)
def test_at_the_stated_bandwidth_waiting_takes_the_stated_share(topology, share, alpha, window):
    run = planned(16, 48, 96, alpha=alpha, window_seconds=window)
    for method in run.methods:
        bandwidth = run.bandwidth_for(method, topology, share)
        link = Link(bandwidth=bandwidth or math.inf, latency=0.01)
        waiting = run.waiting(method, topology, link)
        if bandwidth is None:
            assert waiting >= share * run.compute
        else:
            assert waiting == pytest.approx(share * run.compute)


def test_hidden_communication_costs_nothing_and_needs_no_bandwidth():
    run = planned(16, 48, 96, alpha=0.0)
    assert run.waiting(run.desloc, Topology.STAR) == 0
    assert run.bandwidth_for(run.desloc, Topology.STAR, 0.1) == 0


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


def test_the_seconds_of_a_window_and_its_transfer_pass_in_part_together():
    free = planned(16, 48, 96)
    transfer = free.waiting(free.desloc, Topology.STAR)
    for window_seconds in (0.0, 8 * transfer, 32 * transfer):  # a window every 16 steps
        run = replace(free, window_seconds=window_seconds)
        waiting = run.waiting(run.desloc, Topology.STAR)
        assert waiting == pytest.approx(math.hypot(transfer, window_seconds / 16))
        assert run.waiting(run.desloc, Topology.RING) == free.waiting(free.desloc, Topology.RING)
    said = accepted("plan", "quickstart", "--step-seconds", "0.2", "--window-seconds", "5")
    assert "314 ms" in said.partition("Time on a star")[2].partition("Time on a ring")[0]
