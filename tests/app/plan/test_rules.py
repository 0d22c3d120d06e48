"""The measured rules, the periods recommended for a link, and the warnings."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planned import LINK, NON_IID, STREAMS, planned, run_of
from scripts import ROOT
from torch import nn

from flower_desloc import NEVER, PARAMS
from flower_desloc.app.config import load
from flower_desloc.app.plan.advice import recommended, warnings
from flower_desloc.app.plan.rules import (
    LEAN,
    NOT_MEASURED,
    PAGE,
    RULES,
    family,
    rule_for,
)
from flower_desloc.app.plan.wall_clock import Link, Topology
from flower_desloc.app.setup.build import build_optimizer
from flower_desloc.core.kinds import Kind, kind_of
from flower_desloc.optim import OPTIMIZERS
from flower_desloc.optim.bounds import moment_ratios

GOOD = {"link": Link(bandwidth=125e6, latency=1e-3), "share": 0.03}


def with_rule(run, K):
    """Return the run with K_x = ``K`` and the other periods by its rule."""
    return run.with_periods(rule_for(run, K).periods(run.streams, K))


# --- Rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.case)
def test_every_number_of_a_rule_is_in_the_research_pages(rule):
    research = ROOT / "research"
    written = [research / "paper.md", research / "ladder.md", *research.glob("tables/*.csv")]
    pages = "".join(path.read_text() for path in written)
    pages = pages.replace("\N{MINUS SIGN}", "-")
    assert (ROOT / PAGE.partition("#")[0]).exists()
    numbers = re.findall(r"[+-]\d\.\d\d", f"{rule.loss} {rule.note}")
    intervals = re.findall(r"\(.*? to .*?\)", f"{rule.loss} {rule.note}")
    assert [each for each in (*numbers, *intervals) if each not in pages] == []
    assert (rule.loss == NOT_MEASURED) or numbers


def test_the_bytes_of_a_rule_are_those_of_its_periods_and_formats():
    exact, formats = load("desloc_adam"), [f"compression.{s}={form}" for s, form in LEAN.items()]
    assert load("lean").compression == LEAN
    lean = run_of(load("desloc_adam", formats)).compressed
    for rule in RULES:
        if rule.bytes_share is not None:
            run = run_of(exact)
            sizes = lean if rule.lean else run.compressed
            sent = sum(size / rule.multiple(kind_of(name)) for name, size in sizes.items())
            assert sent / sum(run.compressed.values()) == pytest.approx(rule.bytes_share, abs=0.005)


@pytest.mark.parametrize(
    ("period", "changes", "expected"),
    [
        (64, {}, (6, 1)),
        (28, {}, (6, 1)),
        (27, {}, (1, 6)),  # two half-lives
        (64, {"partition": "iid"}, (1, 6)),
        (64, {"betas": (0.95, 0.999)}, (1, 6)),  # the second moment's half-life is longer
        (64, {"betas": (0.99, 0.95)}, (3, 6)),  # no bound exists
        (64, {"family": "ADOPT"}, (3, 6)),
        (28, {"family": "ADOPT"}, (3, 6)),
        (27, {"family": "ADOPT"}, (1, 6)),
        (27, {"family": "ADOPT", "partition": "iid"}, (1, 6)),
        (64, {"family": "other"}, (3, 6)),
    ],
)
def test_the_rule_depends_on_optimizer_data_and_half_lives(period, changes, expected):
    run = planned(period, period, period, **(GOOD | NON_IID | changes))
    rule = rule_for(run, period)
    assert (rule.first, rule.second) == expected


def test_every_optimizers_states_have_a_rule():
    kinds = {state.kind for described in OPTIMIZERS.values() for state in described.states}
    assert kinds <= {Kind.FIRST_MOMENT, Kind.SECOND_MOMENT, Kind.MAXIMUM}


@pytest.mark.parametrize("name", ["adam", "adamw", "adopt"])
@pytest.mark.parametrize("betas", ["[0.95,0.95]", "[0.9,0.999]", "[0.99,0.95]"])
def test_a_bound_is_recommended_exactly_where_it_would_bound(name, betas):
    config = load(
        "quickstart", [f"optimizer.name={name}", f"optimizer.betas={betas}", "optimizer.lr=0.1"]
    )
    run = run_of(config, num_params=1e6)
    optimizer = build_optimizer(config, [nn.Parameter(torch.zeros(3, 2))])
    assert (family(run) == "Adam") == (
        moment_ratios(optimizer).get("exp_avg", {0: None}) != {0: None}
    )


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (["optimizer.name=adam"], "Adam"),
        (["optimizer.name=adamw"], "Adam"),
        (["optimizer.name=adopt"], "ADOPT"),
        (["optimizer.name=amsgrad", "sync.max_exp_avg_sq=16"], "other"),
        (["optimizer.name=muon", "sync.momentum_buffer=16"], "other"),
        (["optimizer.name=torch.optim:AdamW"], "other"),
    ],
)
def test_the_description_of_an_optimizer_says_whose_rules_apply(stated, expected):
    run = run_of(load("quickstart", [*stated, "optimizer.lr=0.1"]), num_params=1e6)
    assert run.family == expected


# --- Recommended periods -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{}, {"family": "ADOPT"}, NON_IID],
    ids=["adam", "adopt", "non-IID"],
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
    """The rule changes with K_x, so that a longer period may cost more."""
    run = planned(16, 48, 96, coins=coins, **changes)
    x, u, v = run.streams
    run = replace(run, streams=(x, replace(u, num_bytes=bytes_of_u), v))

    def waiting(K):
        clocks = with_rule(run, K)
        return clocks.waiting(clocks.desloc, topology)

    enough = 1.001 * waiting(affordable)
    smallest = next((K for K in range(1, run.steps + 1) if waiting(K) <= enough), None)
    expected = with_rule(run, smallest).periods if smallest else None
    assert recommended(replace(run, share=enough / run.compute), topology) == expected


@pytest.mark.parametrize("delay", [1, 4, 99])
def test_advice_for_a_star_counts_what_a_delay_hides(delay):
    link = Link(bandwidth=8e6, latency=0.01)
    in_time = planned(16, 16, 96, sync_bound=True, link=link)
    late = replace(in_time, delay=delay)
    before, after = (recommended(run, Topology.STAR) for run in (in_time, late))
    assert before is not None
    assert after is not None
    assert after[PARAMS] < before[PARAMS]
    assert late.with_periods(after).late_waiting() <= late.share * late.compute
    assert recommended(late, Topology.RING) == recommended(in_time, Topology.RING)
    assert "on a star communication takes" in " ".join(warnings(in_time))
    found = " ".join(warnings(late))
    waits = late.late_waiting() > late.share * late.compute
    assert ("on a star communication" in found) == waits
    assert (f"that sync_delay={delay} does not hide" in found) == waits


# --- Warnings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("periods", "changes"),
    [
        ((32, 32, 192), {"sync_bound": True}),
        ((20, 20, 240), {"family": "ADOPT"}),
        ((28, 56, 168), {"family": "ADOPT"}),  # K_x is above two half-lives
        ((32, 192, 32), NON_IID),
    ],
)
def test_a_run_that_follows_its_rule_has_no_warnings(periods, changes):
    assert list(warnings(planned(*periods, **GOOD, **changes))) == []


@pytest.mark.parametrize(
    ("periods", "changes", "said"),
    [
        ((28, 168, 168), {"family": "ADOPT"}, "sync.exp_avg=168: an average of it affects only"),
        ((16, 48, NEVER), {}, "sync.exp_avg_sq=never: every worker keeps its own"),
        ((16, "reset", "reset"), {}, "sync.exp_avg=reset: it starts from zero"),
        ((NEVER, 48, 96), {}, "sync.params=never: the parameters are averaged once"),
        ((16, 48, 1920), {}, "sync.exp_avg_sq=1920: longer than the run of 960 steps"),
        ((961, 2883, 5766), {}, "sync.params=961: longer than the run of 960 steps"),
        ((16, 8, 96), {}, "sync.params=16: averaged less often than exp_avg;"),
        ((16, 40, 96), {}, "sync.exp_avg=40: not a multiple of sync.params=16"),
        ((16, 48, 96), {"workers": 1}, "--workers=1: there is no other worker"),
        ((16, 48, 96), {"link": LINK}, "on a star communication takes 0.049 times"),
        ((16, 48, 96), {"share": 0.004}, "on a ring communication takes 0.00459 times"),
        ((16, 48, 96), {"share": 0.5}, "sync.params=16: the link of a star allows 2"),
        ((16, 48, 96), {"compute": 1e-5}, "--step-seconds: a step computes for less time"),
        ((16, 48, 96), {}, "sync.exp_avg=48: rarely averaged it cost loss where that was"),
        ((16, 48, 96), {}, "measured, with Adam, IID data; set sync.exp_avg=16"),
        ((26, 52, 104), {"family": "ADOPT"}, "sync.exp_avg=52: rarely averaged it cost loss"),
        ((16, 16, 96), {}, "sync.exp_avg=16: averaged more often than exp_avg_sq, after which"),
        ((64, 64, 384), NON_IID, "sync.exp_avg_sq=384: rarely averaged it cost loss where"),
        ((64, 64, 384), NON_IID, "K_x above 2 half-lives; set sync.exp_avg_sq=64"),
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


def test_the_order_in_which_streams_are_stated_changes_no_warning():
    run = planned(16, 48, 96, **(GOOD))
    turned = replace(run, streams=run.streams[::-1])
    assert set(warnings(turned)) == set(warnings(run)) != set()
