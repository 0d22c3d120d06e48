"""Laws of the descriptions of optimizers: what they say is what the optimizers do."""

from dataclasses import replace

import pytest
import torch
from federation import OPTIMIZERS as CASES
from federation import OptimizerCase, Quadratic, assert_same, generator
from flower_path import Run
from torch import nn

from flower_desloc import NEVER, SyncSchedule
from flower_desloc.core.kinds import Kind, kind_of
from flower_desloc.core.schedule import PARAMS, Period
from flower_desloc.core.states import kinds_of, state_decays, states_of
from flower_desloc.core.streams import prime, stream_names
from flower_desloc.optim import OPTIMIZERS, PaperAdam

DESCRIPTIONS = pytest.mark.parametrize("described", OPTIMIZERS.values(), ids=OPTIMIZERS)


def built(described, parameters, **changed):
    optimizer = described.make(parameters, lr=0.05, **described.settings | changed)
    prime(optimizer)
    return optimizer


def steps(optimizer, parameters, gradient, number=5):
    for t in range(number):
        for i, p in enumerate(parameters):
            p.grad = gradient(generator(i, t), p)
        optimizer.step()


def noise(draw, p):
    return torch.randn(p.shape, dtype=p.dtype, generator=draw)


def zeros(draw, p):
    return torch.zeros_like(p)


def some_parameters():
    return [nn.Parameter(torch.ones(2, n, dtype=torch.float64)) for n in (2, 3)]


def test_every_optimizer_has_a_case_among_the_laws():
    assert CASES.keys() == OPTIMIZERS.keys()


@DESCRIPTIONS
def test_the_states_are_those_of_the_optimizer_and_their_kinds_tell_their_signs(described):
    parameters = some_parameters()
    optimizer = built(described, parameters)
    names = [state.name for state in described.states]
    assert (PARAMS, *names) == stream_names(nn.ParameterList(parameters), optimizer)
    assert {n: states_of(optimizer)[n] for n in names} == {s.name: s for s in described.states}
    steps(optimizer, parameters, noise)
    for state in described.states:
        values = torch.cat([optimizer.state[p][state.name].view(-1) for p in parameters])
        assert (values < 0).any() == state.kind.is_signed


@DESCRIPTIONS
def test_what_is_added_to_a_state_decays_as_it_says(described):
    names = [state.name for state in described.states if state.decay is not None]
    for state in described.states:
        assert state.name in names or state.kind is Kind.MAXIMUM, "no decay is stated"
    for name in names:
        after = []
        for added in (0.0, 1.0):
            parameters = some_parameters()
            optimizer = built(described, parameters)
            steps(optimizer, parameters, noise)
            for p in parameters:
                optimizer.state[p][name] += added
            steps(optimizer, parameters, zeros, number=1)
            after.append([optimizer.state[p][name] for p in parameters])
        [beta] = state_decays(optimizer, [name])[name].values()
        got = [one - zero for zero, one in zip(*after, strict=True)]
        torch.testing.assert_close(got, [torch.full_like(value, beta) for value in got])


@DESCRIPTIONS
def test_weights_decay_as_it_says(described):
    """Into the moments, off the parameters, or not at all."""
    if described.weight_decay == "none":
        assert "weight_decay" not in described.settings
        return
    parameters = some_parameters()
    optimizer = built(described, parameters, weight_decay=0.1)
    steps(optimizer, parameters, zeros)
    entered = any(optimizer.state[p][s.name].any() for p in parameters for s in described.states)
    assert entered == (described.weight_decay == "gradient")
    assert all((p < 1).all() for p in parameters)


@DESCRIPTIONS
def test_an_elementwise_optimizer_takes_the_same_step_on_shards(described):
    assert described.elementwise == (described.name != "muon")
    if not described.elementwise:
        return
    whole = [nn.Parameter(torch.linspace(-1, 1, 10, dtype=torch.float64))]
    shards = [nn.Parameter(part.clone()) for part in whole[0].detach().split([3, 7])]
    values = torch.randn(5, 10, dtype=torch.float64, generator=generator(0))
    optimizers = (built(described, whole), built(described, shards))
    for value in values:
        whole[0].grad = value.clone()
        for p, part in zip(shards, value.split([3, 7]), strict=True):
            p.grad = part.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(torch.cat(tuple(shards)), whole[0], rtol=1e-12, atol=0)


def test_optimizers_that_share_a_rate_say_so_both_ways():
    adam, adamw, adopt = (OPTIMIZERS[name] for name in ("adam", "adamw", "adopt"))
    assert adam.shares_rate(adamw)
    assert adamw.shares_rate(adam)
    assert not adopt.shares_rate(adam)


# ------------------------------------------------------------------- Optimizers of other packages


class Renamed(PaperAdam):
    """The paper's Adam, whose states have names of which nothing follows."""

    states = tuple(
        replace(state, name=name, divided_by=divisor)
        for state, (name, divisor) in zip(
            PaperAdam.states, {"mean": "square", "square": ""}.items(), strict=True
        )
    )


RENAMED = {"exp_avg": "mean", "exp_avg_sq": "square", PARAMS: PARAMS}


@pytest.mark.parametrize(
    ("compression", "options"),
    [
        ({}, {"sync_bound": True}),
        ({PARAMS: "int8", "exp_avg": "int4", "exp_avg_sq": "int8"}, {}),
        ({"exp_avg_sq": "bf16"}, {"sync_delay": 1}),
    ],
    ids=["bounded", "coded", "late"],
)
def test_the_names_of_states_make_no_difference(compression, options, tmp_path):
    """Coded, bounded, merged late, and for a client that joins without an average of v."""

    def ends(cls, names, kinds):
        case = OptimizerCase(
            lambda p: cls(p, lr=0.02, betas=(0.9, 0.95), eps=1e-3), CASES["paper_adam"].oracle, 0.02
        )
        rare: Period = 6 if compression else NEVER
        periods = {PARAMS: 2, names["exp_avg"]: 4, names["exp_avg_sq"]: rare}
        run = Run(
            case,
            SyncSchedule(periods),
            tmp_path / cls.__name__,
            problem=Quadratic(),
            present=lambda m, t: m != 1 or t >= 6,
            compression={names[name]: format_ for name, format_ in compression.items()},
            kinds=kinds,
            **options,
        )
        return [{name: state[names[name]] for name in RENAMED} for state in run.start()]

    kinds = kinds_of(Renamed(some_parameters()))
    assert kinds == {"mean": Kind.FIRST_MOMENT, "square": Kind.SECOND_MOMENT}
    plain = {name: name for name in RENAMED}
    assert_same(ends(Renamed, RENAMED, kinds), ends(PaperAdam, plain, {}))


def test_of_an_optimizer_that_says_nothing_the_kinds_of_pytorchs_names_are_known():
    optimizer = torch.optim.SGD(some_parameters(), lr=0.1, momentum=0.9)
    assert states_of(optimizer) == {}
    assert kind_of("momentum_buffer", kinds_of(optimizer)) is Kind.FIRST_MOMENT
    assert kind_of("square_avg", kinds_of(optimizer)) is Kind.OTHER
