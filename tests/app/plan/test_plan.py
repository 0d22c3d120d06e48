"""The plan's formulas against simulation and the paper's numbers, and `desloc plan`."""

import itertools
import math
import re
from dataclasses import replace

import pytest
import torch
from command import accepted, desloc, refused
from hypothesis import given
from hypothesis import strategies as st
from scripts import ROOT
from torch import nn

from flower_desloc import NEVER, PARAMS, SyncSchedule
from flower_desloc.app.config import load
from flower_desloc.app.config.optimizers import OPTIMIZERS
from flower_desloc.app.plan.advice import MULTIPLES, can_bound, multiples, recommended, warnings
from flower_desloc.app.plan.evidence import MEASURED, nearest
from flower_desloc.app.plan.from_config import dtype_bytes, model_size, planned_run, planned_streams
from flower_desloc.app.plan.planned_run import PlannedRun, PlannedStream
from flower_desloc.app.plan.theory import (
    averaging_limit,
    drift_bound,
    half_life,
    psi,
    step_size_bound,
)
from flower_desloc.app.plan.wall_clock import (
    Link,
    Topology,
    communication_seconds,
    compute_seconds,
    crossing,
    star_seconds,
)
from flower_desloc.app.runs.figures import plan as plan_figure
from flower_desloc.app.runs.figures.style import figure
from flower_desloc.app.setup.build import build_optimizer, build_schedule, build_streams
from flower_desloc.app.tasks import build_task
from flower_desloc.core.traffic import method_rates, rate, stream_bytes, uploads, wire_bytes
from flower_desloc.optim.bounds import moment_ratio

STREAMS = (PARAMS, "exp_avg", "exp_avg_sq")
PERIOD = st.integers(1, 12) | st.just(NEVER)
BETA = st.floats(0, 0.9999)
LINK = Link(bandwidth=125e6, latency=0.2)
GOOD = {"link": Link(bandwidth=125e6, latency=1e-3), "share": 0.03}


def by_stream(*values):
    return dict(zip(STREAMS, values, strict=True))


def planned(
    *periods, betas=(0.95, 0.9999), ceiling=1, coins=False, once_at=(), phases=None, **changes
):
    moments = zip(("exp_avg", "exp_avg_sq"), betas, strict=True)
    run = PlannedRun(
        name="one",
        optimizer="adam",
        num_params=1e6,
        streams=(
            PlannedStream(name=PARAMS, num_bytes=4e6),
            *(PlannedStream(name=s, num_bytes=4e6, beta=b, ceiling=ceiling) for s, b in moments),
        ),
        schedule=SyncSchedule(
            by_stream(*periods), 0 if coins else None, frozenset(once_at), phases or {}
        ),
        steps=960,
        workers=4,
        tokens=1e5,
        compute=1.0,
        link=Link(bandwidth=125e6, latency=0.01),
        topologies=tuple(Topology),
    )
    return replace(run, **changes)


APART = {"betas": (0.95, 0.95), "partition": "by_domain"}
SLOW = {"betas": (0.999, 0.9999), "mix": 0.7}


def run_of(config, **known):
    return planned_run(config, LINK, **{"step_seconds": 1, **known}, flops=1, mfu=1)


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


@given(st.floats(0.01, 1), st.floats(0, 1), st.floats(0, 0.99), st.floats(0.1, 9), st.floats(1, 9))
def test_the_step_size_satisfies_the_three_conditions_of_the_proof(p_x, p_u, beta, L, B):
    value = psi(p_x, p_u, beta)
    eta = step_size_bound(value, beta, smoothness=L, dissimilarity=B)
    assert 12 * eta**2 * L**2 * (B**2 - 1) * value <= 0.5
    assert eta * L + 2 * eta**2 * beta**2 * L**2 / (1 - beta) ** 2 <= 0.5
    assert 12 * eta**2 * L**2 * value <= 0.5
    assert eta > 0


def test_the_step_size_at_the_extreme_probabilities():
    assert psi(1, 0, 0.9) == 0  # "recovers standard mini-batch SGDM"
    assert averaging_limit(0.0) == math.inf
    assert step_size_bound(0.0, 0.9, smoothness=2) == pytest.approx(0.1 / 8)
    assert psi(0.5, 1, 0.9) == pytest.approx(8 * 0.1)  # 0 in the paper
    assert psi(0, 1, 0.9) == math.inf  # the last gradient of a worker is in its step
    assert step_size_bound(math.inf, 0.9) == 0


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
    counted = uploads(build_schedule(config), run.sizes, run.steps)
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
        "DES-LOC": T / 256 + T / 768 + T / 1536,
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


def test_two_methods_cross_if_one_sends_fewer_bytes_and_the_other_fewer_messages():
    run = planned(2, 4, 4)
    ddp, local_adam, desloc, fedavg = run.methods
    where = crossing(ddp, local_adam, 4, 0.01, Topology.STAR)

    def ratio(factor):
        link = Link(bandwidth=factor * where, latency=0.01)
        one, other = (communication_seconds(m, 4, link, Topology.STAR) for m in (ddp, local_adam))
        return one / other

    assert ratio(1) == pytest.approx(1)
    assert ratio(0.5) < 1 < ratio(2)
    assert crossing(ddp, fedavg, 4, 0.01, Topology.STAR) is None
    # On the paper's ring bytes and messages go together, so that nothing ever crosses.
    for one, other in itertools.combinations((ddp, local_adam, desloc, fedavg), 2):
        assert crossing(one, other, 4, 0.01, Topology.RING) is None


# --- Advice ------------------------------------------------------------------------------------


def with_multiples(run, K):
    """Return the run with K_x = ``K`` and the multiples of it that are recommended there."""
    times = multiples(run, K)
    return run.with_periods(by_stream(K, times["exp_avg"] * K, times["exp_avg_sq"] * K))


@pytest.mark.parametrize(
    "changes",
    [{}, {"optimizer": "adopt"}, APART, SLOW],
    ids=["adam", "adopt", "unlike data", "slow momentum"],
)
@given(
    st.sampled_from(Topology),
    st.integers(1, 40) | st.integers(41, 1200),
    st.booleans(),
    st.sampled_from([4e6, 0.5e6]),
)
def test_the_recommended_period_is_the_smallest_affordable_one(
    changes, topology, affordable, coins, bytes_of_u
):
    """The multiples change with K_x, so that a longer period may cost more."""
    run = planned(16, 48, 96, coins=coins, **changes)
    x, u, v = run.streams
    run = replace(run, streams=(x, replace(u, num_bytes=bytes_of_u), v))

    def waiting(K):
        clocks = with_multiples(run, K)
        return clocks.waiting(clocks.desloc, topology)

    enough = 1.001 * waiting(affordable)
    smallest = next((K for K in range(1, run.steps + 1) if waiting(K) <= enough), None)
    expected = with_multiples(run, smallest).periods if smallest else None
    assert recommended(replace(run, share=enough / run.compute), topology) == expected


@pytest.mark.parametrize("delay", [1, 4, 99])
def test_advice_for_a_star_counts_what_a_delay_hides(delay):
    link = Link(bandwidth=8e6, latency=0.01)
    in_time = planned(16, 16, 96, bound=True, link=link)
    late = replace(in_time, delay=delay)
    before, after = (recommended(run, Topology.STAR) for run in (in_time, late))
    assert after[PARAMS] < before[PARAMS]
    assert late.with_periods(after).late_waiting() <= late.share * late.compute
    assert recommended(late, Topology.RING) == recommended(in_time, Topology.RING)
    assert "on a star communication takes" in " ".join(warnings(in_time))
    found = " ".join(warnings(late))
    waits = late.late_waiting() > late.share * late.compute
    assert ("on a star communication" in found) == waits
    assert (f"that sync_delay={delay} does not hide" in found) == waits


def test_every_optimizers_states_have_a_multiple():
    for name in OPTIMIZERS:
        config = load("quickstart", f"optimizer.name={name} optimizer.lr=0.1")
        streams = build_streams(config, torch.nn.Linear(1, 1))
        assert streams.keys() - {PARAMS} <= MULTIPLES.keys()


@pytest.mark.parametrize(
    ("periods", "changes"),
    [
        ((32, 32, 192), {"bound": True}),
        ((20, 20, 240), {"optimizer": "adopt"}),
        ((28, 56, 168), {"optimizer": "adopt"}),  # K_x is above two half-lives
        ((32, 192, 32), APART),
        # Rare averages of a slow momentum are no risk.
        ((20, 340, 340), SLOW),
        ((20, 340, 340), {**SLOW, "optimizer": "adopt"}),
    ],
)
def test_a_sound_run_has_no_warnings(periods, changes):
    assert list(warnings(planned(*periods, **GOOD, **changes))) == []


@pytest.mark.parametrize("name", ["adam", "adamw", "adopt"])
@pytest.mark.parametrize("betas", ["[0.95,0.95]", "[0.9,0.999]", "[0.99,0.95]"])
def test_a_bound_is_recommended_exactly_where_it_would_bound(name, betas):
    config = load(
        "quickstart", [f"optimizer.name={name}", f"optimizer.betas={betas}", "optimizer.lr=0.1"]
    )
    run = run_of(config, num_params=1e6)
    optimizer = build_optimizer(config, [nn.Parameter(torch.zeros(3, 2))])
    assert can_bound(run) == (moment_ratio(optimizer) is not None)


@pytest.mark.parametrize(
    ("periods", "changes", "said"),
    [
        ((16, 96, 96), {}, "sync.exp_avg=96: 7.1 half-lives, after which 1% of an average is left"),
        ((16, 48, NEVER), {}, "sync.exp_avg_sq=never: every worker keeps its own"),
        ((16, "reset", "reset"), {}, "sync.exp_avg=reset: it starts from zero"),
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
        ((26, 52, 104), {"optimizer": "adopt"}, "sync.exp_avg=52: the least loss was measured"),
        ((16, 16, 96), {}, "sync.exp_avg=16: averaged more often than exp_avg_sq, after which"),
        ((64, 64, 384), APART, "sync.exp_avg_sq=384: sync.params=64 is long for the half-lives"),
        ((64, 64, 384), APART, "set sync.exp_avg_sq=64, and sync.exp_avg=384 for fewer bytes"),
        ((16, 48, 96), {"ceiling": None}, "nothing bounds exp_avg and exp_avg_sq: a drift bound"),
        ((16, 48, 96), {"ceiling": None}, "needs a clipped gradient (optimizer.clip_norm or --rho"),
    ],
)
def test_each_warning(periods, changes, said):
    found = list(warnings(planned(*periods, **(GOOD | changes))))
    assert [line for line in found if said in line], found


@pytest.mark.parametrize(
    "changes",
    [
        {"once_at": [96]},
        {"coins": True},
        {"phases": dict.fromkeys(STREAMS, 96)},
    ],
    ids=["once", "coins", "phases"],
)
def test_a_stream_that_may_be_averaged_is_not_said_never_to_be(changes):
    run = planned(961, 961, 961, **GOOD, **changes)
    assert "averaged" not in " ".join(line for line in warnings(run) if "longer than" in line)
    assert not [line for line in warnings(run) if "every worker keeps its own" in line]
    alone = planned(961, 961, 961, **GOOD, once_at=[961])
    assert sum("longer than the run of 960 steps" in line for line in warnings(alone)) == 3


def test_averages_at_single_steps_are_counted_where_a_period_is_never():
    run = planned(NEVER, NEVER, NEVER, **GOOD, once_at=[96])
    (line,) = [line for line in warnings(run) if "never" in line]
    assert line.startswith("sync.params=never: the parameters are averaged 2 times in the run")


@pytest.mark.parametrize(
    ("period", "changes", "expected"),
    [
        (64, {}, (6, 1)),
        (28, {}, (6, 1)),
        (27, {}, (1, 6)),  # two half-lives
        (64, {"partition": "iid"}, (1, 6)),
        (64, {"betas": (0.95, 0.999)}, (1, 6)),  # v lasts longer
        (64, {"optimizer": "adopt"}, (3, 6)),
        (28, {"optimizer": "adopt"}, (3, 6)),
        (27, {"optimizer": "adopt"}, (1, 6)),
        (20, SLOW, (17, 6)),  # up to half a half-life, 346 steps
        (20, {**SLOW, "optimizer": "adopt"}, (17, 6)),
        (173, SLOW, (2, 6)),
        (174, SLOW, (1, 6)),
        (400, SLOW, (1, 6)),
    ],
)
def test_which_moment_stays_with_the_parameters_depends_on_optimizer_data_and_half_lives(
    period, changes, expected
):
    times = multiples(planned(period, period, period, **(GOOD | APART | changes)), period)
    assert (times["exp_avg"], times["exp_avg_sq"]) == expected


def test_the_order_in_which_streams_are_stated_changes_no_warning():
    run = planned(16, 48, 96, **(GOOD | {"betas": (0.95, 0.9)}))
    turned = replace(run, streams=run.streams[::-1])
    assert set(warnings(turned)) == set(warnings(run)) != set()


# --- The command -------------------------------------------------------------------------------


def plan(*arguments):
    return " ".join(accepted("plan", *arguments).split())


SMALL = ("--params", "1e6", "--step-seconds", 0.1)


def test_the_page_shows_what_its_commands_print(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    page = (ROOT / "docs" / "plan.md").read_text()
    shown = re.findall(r"```bash\ndesloc (plan .*?)\n```\n\n```\n(.*?)\n```", page, re.DOTALL)
    assert len(shown) == 2
    for command, output in shown:
        lines = [line.rstrip() for line in accepted(*command.split()).strip().splitlines()]
        assert lines == output.splitlines(), command


def test_preset_override_and_every_option_take_effect():
    said = plan(
        *("desloc_adam", "sync.params=8", "sync.exp_avg=24", "sync.exp_avg_sq=never"),
        *("--params", "1e6", "--workers", 2, "--steps", 4000, "--tokens-per-step", 5000),
        *("--value-bytes", 2, "--bandwidth", 500, "--latency", 20, "--flops", "1e12"),
        *("--mfu", 0.25, "--overlap", 0.5, "--share", 0.2, "--beta1", 0.9, "--beta2", 0.99),
        *("--rho", 0.5, "--psi", 0.25, "--smoothness", 10, "--dissimilarity", 3),
    )
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


def test_the_model_of_a_preset_is_measured_without_its_weights():
    config = load("quickstart")
    sizes = stream_bytes(build_streams(config, build_task(config).build_model()))
    size = model_size(config)
    assert sizes == dict.fromkeys(STREAMS, size * dtype_bytes(config))
    assert f"quickstart: {size:,} parameters" in plan("quickstart")


def test_a_plan_counts_buffers_as_a_run_sends_them():
    config = load("digits", ["model.type=resnet", "sync.buffers=8"])
    streams = build_streams(config, build_task(config).build_model())
    run = run_of(config)
    assert run.sizes == stream_bytes(streams)
    assert recommended(run, Topology.STAR)["buffers"] == recommended(run, Topology.STAR)[PARAMS]


def test_a_plan_counts_compressed_streams_as_they_are_sent():
    config = load("lean")
    sent = wire_bytes(build_streams(config, build_task(config).build_model()), config.wire)
    run = run_of(config)
    # A tensor's last block may not be full.
    assert run.wire == pytest.approx(sent, rel=1e-3)
    bytes_a_step = sum(size / run.periods[name] for name, size in run.wire.items())
    assert run.desloc.num_bytes == pytest.approx(bytes_a_step)
    exact = run_of(load("lean", [f"wire.{name}=fp32" for name in STREAMS]))
    assert [m for m in run.methods if m not in exact.methods] == [run.desloc]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "sync.params=64 --params 7e9",
            ("plan: 7,000,000,000 parameters", "params every 64", "exp_avg_sq every 1536"),
        ),
        ("quickstart sync_mode=probabilistic", ("averaged by coins",)),
        (
            "quickstart sync_delay=4 --step-seconds 0.2 --bandwidth 100",
            ("late by 4", "largest window: 13.0 MB, 3 payloads"),
        ),
        (
            "quickstart sync_phase.exp_avg=16 sync_phase.exp_avg_sq=32",
            ("largest window: 8.7 MB, 2 payloads",),
        ),
    ],
)
def test_a_plan_names_what_was_asked_for(arguments, said):
    output = plan(*arguments.split())
    assert [words for words in said if words not in output] == []
    assert ("late by" in output) == ("sync_delay" in arguments)


@pytest.mark.parametrize(("seconds", "number"), [(1, 1), (0.002, 4)])
def test_a_run_accepts_the_recommended_settings_over_its_own_phases(seconds, number):
    words = ["sync_phase.exp_avg=16", "sync_phase.exp_avg_sq=32"]
    said = plan("quickstart", "--step-seconds", seconds, *words).partition("Recommended")[2]
    found = re.findall(r"(?: sync\S+=\w+)+", said.partition("Warnings")[0])
    assert len(found) == number
    for settings in found:
        config = load("quickstart", [*words, *settings.split()])
        assert not any(build_schedule(config).phases.values())


def test_where_no_period_is_affordable_the_plan_shows_what_long_ones_reach():
    said = plan("digits", "--step-seconds", 0.0025, "--bandwidth", 20)
    shown = said.partition("Recommended")[2].partition("Warnings")[0]
    run = run_of(load("digits"), step_seconds=0.0025)
    run = replace(run, link=Link(bandwidth=2.5e6, latency=0.05))
    assert recommended(run, Topology.STAR) is None
    found = re.findall(r"sync.params=(\d+) .*?takes ([\d.,]+) times as long as compute", shown)
    assert [int(period) for period, _ in found] == [8, 16, 32, 64]
    for period, times in found:
        clocks = with_multiples(run, int(period))
        waiting = clocks.waiting(clocks.desloc, Topology.STAR) / run.compute
        assert float(times) == pytest.approx(waiting, rel=0.01)
    assert "exp_avg_sq never averaged" in shown
    for word in ("sync_mode=probabilistic", "sync_once_at=[8]"):
        assert "never averaged" not in plan(
            "digits", "--step-seconds", 0.0025, "--bandwidth", 20, word
        )


def test_a_recommended_period_beyond_the_run_is_said_to_average_nothing():
    said = plan("desloc_adopt", *SMALL, "--steps", 900, "--share", 0.02)
    period = int(re.search(r"star: .*?sync.exp_avg_sq=(\d+)", said)[1])
    assert period > 900
    assert (
        f"exp_avg_sq every {period}: 6 K_x, the paper's default; longer than the run of 900 steps, "
        "so on this link it is never averaged"
    ) in said
    once = plan("desloc_adopt", *SMALL, "--steps", 900, "--share", 0.02, "sync_once_at=[8]")
    assert int(re.search(r"star: .*?sync.exp_avg_sq=(\d+)", once)[1]) > 900
    assert "never averaged" not in once


def test_a_plan_prints_only_what_applies_to_the_run():
    quickstart, sgdm = plan("quickstart", *SMALL), plan("desloc_sgdm", *SMALL)
    paper = plan("1.7b")
    assert [name in paper for name in ("Time on a ring", "ring: ", "Theorem 1")] == [1, 1, 0]
    assert [name in quickstart for name in ("on a ring", "ring: ", "Theorem 1")] == [0, 0, 0]
    assert "limited by" in sgdm
    assert "Theorem 1" in plan("quickstart", *SMALL, "--smoothness", 1)
    assert "Loss unknown: measured for text only" in plan("digits", "--step-seconds", 1)
    assert plan("quickstart", *SMALL, "--share", 1).count("1x at") == 1


def test_without_the_time_of_a_step_a_plan_has_half_lives_and_bytes():
    said, timed = plan("digits"), plan("digits", "--step-seconds", 1)
    assert "give --step-seconds" in " ".join(said.split())
    for title in ("Moments", "tau_0.5", "Bytes", "Warnings"):
        assert title in said
    for title in ("Time on a", "Recommended", "a step computes", "--share"):
        assert title not in said
        assert title in timed or title == "--share"
    moments = said.partition("Moments")[2].partition("Bytes")[0]
    assert moments == timed.partition("Moments")[2].partition("Bytes")[0]
    assert "nan" not in said.lower()


def test_no_figure_of_times_is_drawn_without_the_time_of_a_step(tmp_path):
    error = refused("plan", "digits", "--plot", tmp_path / "plan.png")
    assert "give --step-seconds" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("preset", sorted(path.stem for path in (ROOT / "configs").glob("*.yaml")))
def test_every_preset_with_periods_has_a_plan(preset):
    result = desloc("plan", preset, *SMALL)
    if PARAMS in load(preset).sync:
        assert (result.exit_code, result.stderr) == (0, "")
        assert "Recommended" in result.stdout
    else:
        assert result.exit_code == 2
        assert "sync.params is not set" in result.stderr


def test_it_draws_when_asked_to_and_writes_nothing_otherwise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan("quickstart", *SMALL)
    assert not [*tmp_path.iterdir()]
    said = plan("quickstart", "sync.exp_avg_sq=never", *SMALL, "--plot", "plan.png")
    assert said.endswith("drawn into plan.png")
    assert (tmp_path / "plan.png").exists()


@pytest.fixture
def figures(monkeypatch):
    """The figures that a plan draws."""
    made = []

    def keep(*arguments):
        made.append(figure(*arguments))
        return made[-1]

    monkeypatch.setattr(plan_figure, "figure", keep)
    return made


@pytest.mark.parametrize("compute", [1e-4, 0.0025, 10, 9000])
def test_the_figure_has_its_times_in_units_that_fit_them(compute, tmp_path, figures):
    run = planned(8, 24, 48, compute=compute, link=Link(bandwidth=2.5e6, latency=0.05))
    for topologies in ((Topology.STAR,), tuple(Topology)):
        plan_figure.draw(replace(run, topologies=topologies), tmp_path / "plan.png")
        _, panels = figures.pop()
        assert len(panels) == len(topologies) + 1
        for panel in panels[:-1]:
            labels = [tick.get_text() for tick in panel.get_yticklabels()]
            assert 2 <= len(labels) <= 8
            assert all(re.fullmatch(r"[\d,]+ (µs|ms|s|min|h|days?)", label) for label in labels)
            assert not any("000 ms" in label for label in labels)


@pytest.mark.parametrize("topologies", [(Topology.STAR,), tuple(Topology)])
@pytest.mark.parametrize("once_at", [(), range(16, 976, 16)])
def test_the_heading_of_the_figure_fits_above_its_panels(topologies, once_at, tmp_path, figures):
    run = planned(160, 480, 960, phases=by_stream(8, 128, 256), once_at=once_at)
    plan_figure.draw(replace(run, topologies=topologies), tmp_path / "plan.png")
    made, panels = figures.pop()
    made.draw_without_rendering()  # at its own resolution
    name, subtitle = (text.get_window_extent() for text in made.texts)
    assert subtitle.x1 <= made.bbox.x1
    assert max(panel.get_tightbbox().y1 for panel in panels) < subtitle.y0 < subtitle.y1 < name.y0


def test_a_ring_that_is_not_drawn_sets_no_bandwidth_of_the_star(tmp_path, figures):
    run = planned(16, 48, 96, window_seconds=8, topologies=(Topology.STAR,))
    plan_figure.draw(run, tmp_path / "plan.png")
    _, (times, _) = figures.pop()
    halves = [b for m in run.methods if (b := run.bandwidth_for(m, Topology.STAR, 1))]
    ends = min(run.link.bandwidth, *halves) / 30, max(run.link.bandwidth, *halves) * 30
    assert times.get_xlim() == pytest.approx(ends)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "which preset, or how many --params?"),
        (["1.8b"], "no preset of that name"),
        (["1.7b", "sync.parms=3"], "sync.parms"),
        (["1.7b", "sync.params=0"], "the period of 'params'"),
        (["1.7b", "sync.buffers=3"], "sync.buffers: the model has none"),
        (["digits", "--tokens-per-step", "9"], "--tokens-per-step: task=image_classification"),
        (["1.7b", *SMALL, "--plot", "plan.xyz"], "--plot plan.xyz: "),
        (["1.7b", *SMALL, "--plot", "no/such/plan.png"], "--plot no/such/plan.png: "),
    ],
)
def test_bad_input_is_a_sentence_that_names_the_option(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = desloc("plan", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert said in result.stderr.splitlines()[0]


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
        assert refused("plan", "1.7b", f"--{value}") == f"error: --{value}: must be {limits}"


# ----------------------------------------------------------------------------- Measured gaps


@pytest.mark.parametrize("gap", MEASURED, ids=str)
def test_a_measured_run_is_nearest_to_itself(gap):
    sent = [name for name, period in zip(STREAMS, gap.periods, strict=True) if period != "never"]
    changes = [f"sync.{name}={p}" for name, p in zip(STREAMS, gap.periods, strict=True)]
    changes += [f"wire.{name}={f}" for name, f in zip(sent, gap.formats, strict=False)]
    changes += [f"sync_bound={gap.bound}".lower(), f"data.partition={gap.partition}"]
    run = run_of(load(f"desloc_{gap.optimizer}", changes), num_params=gap.params)
    apart, found = nearest(
        run.optimizer,
        run.periods,
        run.num_params,
        gap.tokens,
        bound=run.bound,
        formats=run.formats,
        partition=run.partition,
    )[0]
    assert apart == 1
    same = ("periods", "formats", "bound", "partition", "params", "tokens")
    assert [getattr(found, name) for name in same] == [getattr(gap, name) for name in same]


@given(st.sampled_from(MEASURED), st.floats(0.1, 10), st.integers(1, 9), st.integers(1, 9))
def test_the_distance_of_a_measurement_is_the_product_of_factors_on_one_axis(gap, factor, u, v):
    """1 where a run is equal, the factor where one thing differs (its square for K_x)."""
    assert gap.distance(gap.params, gap.tokens, gap.periods) == 1
    size = gap.distance(gap.params * factor, gap.tokens, gap.periods)
    batch = gap.distance(gap.params, gap.tokens * factor, gap.periods)
    assert size == pytest.approx(batch) == pytest.approx(max(factor, 1 / factor))
    longer = tuple(p if p == "never" else 3 * p for p in gap.periods)
    assert gap.distance(gap.params, gap.tokens, longer) == pytest.approx(9)
    other = tuple("never" if p != "never" else 16 for p in gap.periods[1:])
    assert gap.distance(gap.params, gap.tokens, (gap.periods[0], *other)) == math.inf


def test_a_plan_shows_what_the_nearest_runs_lost_and_says_if_none_is_near():
    small = ["--params", "41120", "--tokens-per-step", "1024"]
    said = plan("desloc_adam", *small)
    assert "of DES-LOC above Local: the nearest measurements" in said
    assert "unknown" not in said
    assert "unknown: no measurement is near" in plan("1.7b")
    for name in STREAMS:
        longer = plan("desloc_adam", *small, f"sync.{name}=1600")
        assert "unknown: no measurement is near" in longer, name
    for other in (
        *("sync_delay=8", "sync_mode=probabilistic", "sync_phase={exp_avg: 16}"),
        *("sync_once_at=[8]", "optimizer.mix=0.7", "federation.min_steps=0.5"),
    ):
        key = other.partition("=")[0]
        said = plan("desloc_adam", *small, other)
        assert f"unknown: no measurement has such a setting of {key}" in said, other
    assert "above Local" not in plan("local_adam") + plan("desloc_sgdm")
    assert "16/16/96 lossy" in plan("lean")


def test_measurements_in_fp32_warn_of_lossy_formats():
    small = ["--params", "41120", "--tokens-per-step", "1024", "data.partition=by_domain"]
    rare = [f"sync.{name}={p}" for name, p in zip(STREAMS, (64, 64, 384), strict=True)]
    said = plan("lean", *small, *rare)
    assert "64/64/384 " in said
    assert "64/64/384 lossy" not in said
    assert "not shown to be safe" in said


@given(
    st.sampled_from([gap for gap in MEASURED if gap.optimizer == "adam"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["iid", "by_domain"]),
)
def test_easier_measurements_only_warn_and_harder_ones_only_comfort(gap, lossy, bound, partition):
    formats = dict.fromkeys(STREAMS, "int8") if lossy else {}
    periods = dict(zip(STREAMS, gap.periods, strict=True))
    found = nearest(
        "adam",
        periods,
        gap.params,
        gap.tokens,
        bound=bound,
        formats=formats,
        partition=partition,
    )
    bound = bound and gap.periods[1:] != (NEVER, NEVER)  # then there is nothing to bound
    for apart, other in found:
        if apart == math.inf:
            continue
        if other.is_safe:
            assert other.formats == tuple(formats.values())
            assert other.partition == partition
            assert other.periods[0] >= gap.periods[0]
        assert other.bound == bound or other.bound != other.is_safe
    distances = [apart for apart, _ in found]
    assert distances == sorted(distances)
    exact = [other.high for apart, other in found if apart == 1 and other.partition == partition]
    if exact and not lossy and not bound:
        assert exact[0] == max(exact)


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
    said = plan("quickstart", "--step-seconds", "0.2", "--window-seconds", "5")
    assert "314 ms" in said.partition("Time on a star")[2].partition("Time on a ring")[0]
