"""Clients that start at a later step, where some states were never averaged."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from federation import OPTIMIZERS, OneSided, OptimizerCase, Quadratic, assert_close, assert_same
from flower_path import Run, oracle
from flwr.app import ConfigRecord, Message
from reference import Tree
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_desloc import NEVER, Policy, SyncSchedule
from flower_desloc.core.schedule import PARAMS, Period
from flower_desloc.core.states import needs_seed, seed_states, state_decays
from flower_desloc.core.streams import prime, stream_names, take, trained_by
from flower_desloc.flower.arrays import from_record, records_of
from flower_desloc.flower.observer import WindowRecord
from flower_desloc.optim import ADOPT
from flower_desloc.optim import OPTIMIZERS as DESCRIBED

JOINS = 6
SEEDED = [name for name, case in OPTIMIZERS.items() if case.oracle.seeds]


SETTINGS: list[tuple[tuple[Period, ...], bool]] = [  # periods, bounded
    ((2, 2, NEVER), True),
    ((2, 4, 24), False),
    ((2, 4, 24), True),
    ((2, NEVER, 4), False),
    ((2, NEVER, NEVER), True),
]


@pytest.mark.parametrize(
    ("name", "periods", "bound"),  # each optimizer with two settings in turn
    [(n, *SETTINGS[i % len(SETTINGS)]) for k, n in enumerate(SEEDED) for i in (k, k + 2)],
)
def test_a_newcomer_seeds_v_and_fits_u_to_it_whatever_the_runs_settings(
    name, periods, bound, tmp_path
):
    def present(m, t):
        return m != 1 or t >= JOINS

    joined = Run(name, periods, tmp_path, num_steps=20, present=present, sync_bound=bound)
    assert_close(joined.start(), oracle(joined, present=present, bound=bound))


Make = Callable[[Iterable[Tensor]], Optimizer]
MAKES: dict[str, Make] = {
    **{name: case.make for name, case in OPTIMIZERS.items()},
    "Adam without a ratio": lambda p: torch.optim.Adam(p, lr=0.05, betas=(0.99, 0.95)),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.05),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.05, betas=(0.9, 0.95)),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "RMSprop with momentum": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}


@pytest.mark.parametrize("name", ["adam", "adopt"])
def test_a_client_that_was_evaluated_before_its_first_window_is_a_newcomer_too(name, tmp_path):
    """With a share of the clients in every window: evaluations change nothing in training."""

    def final(*, evaluated: bool) -> Tree:
        policy = Policy(fraction_train=0.34, norm_bound=None)
        run = Run(
            name,
            (2, 4, NEVER),
            tmp_path / str(evaluated),
            problem=OneSided(),
            num_clients=6,
            policy=policy,
            evaluate_clients=evaluated,
            eval_every=2,
        )
        run.watch.after.clear()  # not every client has a state at the end
        final = from_record(run.strategy.start(run.grid, run.initial, observer=run.watch).arrays)
        assert not any(e.kind == "state lost" for r in run.watch.records for e in r.events)
        return final

    assert_same(final(evaluated=True), final(evaluated=False))


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_state_that_was_lost_is_recorded_also_if_an_evaluation_comes_first(evaluated, tmp_path):
    periods: tuple[Period, ...] = (3, NEVER, NEVER)
    run = Run("adam", periods, tmp_path, num_steps=9, evaluate_clients=evaluated, eval_every=3)
    first = "evaluate" if evaluated else "train"

    def lose(asked: Message) -> None:
        to, config = asked.metadata, records_of(ConfigRecord, asked.content)["config"]
        if (to.message_type, to.dst_node_id, config["start-step"]) == (first, 2, 3):
            run.files(1).delete()

    run.grid.instead = lose
    run.start()
    events = [(event.kind, event.client) for record in run.watch.records for event in record.events]
    assert events == [("state lost", "client-1")]


FIRST_STEPS = {"RMSprop": 0.5, "RMSprop with momentum": 0.5, "Adagrad": 0.5}
"""How far an optimizer without bias correction moves in its first two steps, wherever it is."""


def states_of(make: Make) -> list[str]:
    module = Quadratic().module()
    optimizer = make(module.parameters())
    prime(optimizer)
    return [name for name in stream_names(module, optimizer) if name != PARAMS]


def cases() -> Iterable[Any]:
    for name, make in MAKES.items():
        marks = () if name in OPTIMIZERS else pytest.mark.soak
        for averaged in states_of(make):
            case = f"{name}: only {averaged} is averaged"
            yield pytest.param(name, averaged, id=case, marks=marks)


@pytest.mark.parametrize(("name", "averaged"), [*cases()])
def test_a_newcomers_steps_are_no_longer_than_they_would_have_been(name, averaged, tmp_path):
    """It sees no gradient of a coordinate in which the federation's first moment is not zero."""
    make = MAKES[name]
    periods: dict[str, Any] = {PARAMS: 2, **dict.fromkeys(states_of(make), NEVER), averaged: 4}
    case = OptimizerCase(make, OPTIMIZERS["sgdm"].oracle, 0.05)

    def update_norm(*, joins: bool = False, lost: bool = False) -> float:
        """Return how far the last client moves in the window that begins at ``JOINS``."""
        run = Run(
            case,
            SyncSchedule(periods),
            tmp_path / f"{joins}-{lost}",
            problem=OneSided(),
            num_steps=JOINS + 2,
            # What it is compared with must not spike; that a newcomer does not is the claim.
            sync_bound=not joins,
            policy=Policy(norm_bound=None),
            present=lambda m, t: m != 2 or not joins or t >= JOINS,
        )

        def forget(record: WindowRecord) -> None:
            if lost and record.step == JOINS:
                run.files(2).delete()

        run.watch.after.append(forget)
        run.start()
        return run.watch.records[-1].clients["client-2"].update_norm

    # An optimizer's first steps are its longest.
    most = 3 * update_norm() + FIRST_STEPS.get(name, 0.0)
    assert update_norm(joins=True) < most
    assert update_norm(lost=True) < most


WITH_DECAY = {
    "radam": torch.optim.RAdam,
    **{
        d.name: d.make
        for d in DESCRIBED.values()
        if d.weight_decay != "none" and d.name in SEEDED and d.others is None
    },
}


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("make", WITH_DECAY.values(), ids=WITH_DECAY)
def test_the_seed_is_the_square_of_what_the_optimizer_calls_the_gradient(make, decay):
    """The v that its first step makes, without the factor 1 - beta2."""

    def primed() -> tuple[nn.Module, Optimizer]:
        module = Quadratic().module()
        optimizer = make(module.parameters(), lr=0.1, weight_decay=decay)
        prime(optimizer)
        for i, p in enumerate(trained_by(optimizer)):
            p.grad = torch.full_like(p, 0.3 + i)
        return module, optimizer

    module, optimizer = primed()
    assert list(needs_seed(module, optimizer, take(module, optimizer, ["exp_avg_sq"]))) == [
        "exp_avg_sq"
    ]
    seed_states(optimizer, ["exp_avg_sq"])
    seeded = take(module, optimizer, ["exp_avg_sq"])["exp_avg_sq"]
    stepped, other = primed()
    other.step()
    # ADOPT's first step is a seed itself.
    (beta2,) = state_decays(optimizer, ["exp_avg_sq"])["exp_avg_sq"].values()
    factor = 1.0 if isinstance(optimizer, ADOPT) else 1 - beta2
    for key, v in take(stepped, other, ["exp_avg_sq"])["exp_avg_sq"].items():
        torch.testing.assert_close(factor * seeded[key], v)
    assert needs_seed(module, optimizer, {"exp_avg_sq": seeded}) == {}
