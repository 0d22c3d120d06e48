"""Laws of the learning rate as a function of the global step."""

import math

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from flower_desloc.core.lr_schedule import constant, cosine, wsd

T, W, D = 100, 10, 20
SCHEDULES = {"constant": constant(W), "wsd": wsd(T, W, D), "cosine": cosine(T, W, final=0.1)}


@pytest.mark.parametrize("factor", SCHEDULES.values(), ids=SCHEDULES)
def test_the_warm_up_is_linear_and_its_first_step_moves(factor):
    assert [factor(t) for t in range(W)] == [(t + 1) / W for t in range(W)]
    assert factor(W) == 1


@pytest.mark.parametrize("factor", SCHEDULES.values(), ids=SCHEDULES)
def test_a_learning_rate_has_no_memory(factor):
    forwards = [factor(t) for t in range(T)]
    assert [factor(t) for t in reversed(range(T))] == forwards[::-1]


@pytest.mark.parametrize("factor", [constant(), wsd(T, 0, 0), cosine(T, T, final=0.5)])
def test_nothing_to_warm_up_or_decay_is_1_at_the_end(factor):
    assert factor(T - 1) == 1


def test_constant_stays():
    assert {constant()(t) for t in range(T)} == {1.0}
    assert {constant(W)(t) for t in range(W, T)} == {1.0}


def test_wsd_is_stable_then_decays_by_1_minus_sqrt():
    factor = wsd(T, W, D)
    assert {factor(t) for t in range(W, T - D + 1)} == {1.0}
    for t in range(T - D, T):
        assert factor(t) == 1 - math.sqrt((t - (T - D)) / D)
    assert factor(T) == 0


def test_wsd_decays_over_the_last_step_alone():
    assert [wsd(5, 0, 1)(t) for t in range(6)] == [1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("final", [0.0, 0.25])
def test_cosine_is_that_of_pytorch(final):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = CosineAnnealingLR(optimizer, T_max=T - W, eta_min=final)
    factor = cosine(T, W, final)
    for t in range(W, T + 1):
        assert factor(t) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("factor", [wsd(T, W, D), cosine(T, W)], ids=["wsd", "cosine"])
def test_after_the_end_the_learning_rate_stays_at_its_last_value(factor):
    assert factor(T) == factor(T + 50) == 0


def test_what_does_not_fit_is_refused():
    wsd(T, T - D, D)
    with pytest.raises(ValueError, match=r"warm-up of 81 and a decay of 20 .* 100 steps"):
        wsd(T, T - D + 1, D)
    with pytest.raises(ValueError, match=r"warm-up of 101 .* 100 steps"):
        cosine(T, T + 1)
