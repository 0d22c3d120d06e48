"""Replies added together: what they are one by one, and nothing of those that cannot be."""

import pytest
import torch
from federation import generator

from flower_desloc import Mean
from flower_desloc.core.robust import Gathered
from flower_desloc.flower.records import WindowReply
from flower_desloc.flower.together import add_all, enough, held_together

SIZE = 70_000


def reply(m, **values):
    streams = {
        name: {"w": torch.rand(SIZE, generator=generator(seed, m)), "b": torch.ones(3)}
        for seed, name in enumerate(("params", "exp_avg_sq"))
    }
    for name, value in values.items():
        streams[name]["w"][SIZE // 2] = value
    return WindowReply(metrics={}, streams=streams)


def added_one_by_one(replies, weights):
    mean = Mean()
    for each, weight in zip(replies, weights, strict=True):
        mean.add(each.streams, weight)
    return mean


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("make", [Mean, Gathered])
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"params": float("nan")}, "'w' of stream 'params' has values that are not finite"),
        ({"exp_avg_sq": float("inf")}, "'exp_avg_sq' has values that are not finite"),
        ({"params": -3e38}, "'w' of stream 'params' holds values beyond 1.7e"),
        ({"exp_avg_sq": -1e-30}, "'w' of stream 'exp_avg_sq' has values below zero"),
    ],
)
def test_of_replies_added_together_the_wrong_ones_alone_are_left_out(make, wrong, reason, begun):
    replies = [reply(0), reply(1, **wrong), reply(2), reply(3, **wrong), reply(4)]
    mean = make()
    before = [reply(9)] if begun else []
    add_all(mean, before, [1.0] * len(before))
    errors = add_all(mean, replies, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert [error is None for error in errors] == [True, False, True, False, True]
    assert all(reason in str(errors[m]) for m in (1, 3))
    expected = added_one_by_one(
        [*before, reply(0), reply(2), reply(4)], [*(1.0 for _ in before), 1.0, 3.0, 5.0]
    )
    torch.testing.assert_close(mean.result(), expected.result(), rtol=0, atol=0)


def test_a_weight_or_a_shape_that_is_wrong_is_that_clients_own():
    other = WindowReply(metrics={}, streams={"params": {"w": torch.ones(3)}})
    mean = Mean()
    errors = add_all(mean, [reply(0), reply(1), other, reply(2)], [1.0, 0.0, 1.0, 1.0])
    assert [error is None for error in errors] == [True, False, False, True]
    assert "positive and finite" in str(errors[1])
    assert "expected ['exp_avg_sq', 'params']" in str(errors[2])
    assert mean.count == 2


def test_eight_are_held_if_they_fit_into_a_gibibyte_and_one_whatever_its_size():
    def of(size):
        return WindowReply(metrics={}, streams={"params": {"w": torch.empty(size, device="meta")}})

    mib = 1 << 18  # values of fp32
    empty, begun = Mean(), added_one_by_one([reply(0)], [1.0])
    for mean in (empty, begun):
        assert not enough([], mean)
        assert not enough([of(1)] * 7, mean)
        assert enough([of(1)] * 8, mean)
        assert not enough([of(256 * mib)] * 3, mean)
        assert enough([of(256 * mib)] * 4, mean)
    assert not enough([of(512 * mib)], begun)
    assert enough([of(513 * mib)], begun)
    # The first waits in place of the mean, which is as large.
    assert not enough([of(5000 * mib)], empty)
    assert enough([of(5000 * mib)] * 2, empty)
    sizes = (1, 128, 256, 511, 513, 5000)
    assert [held_together(4 * size * mib) for size in sizes] == [8, 8, 4, 2, 2, 2]
