"""A client whose training is not finite says why: a batch, or the learning rate."""

import math

import pytest
import torch

from flower_desloc.core.streams import check_finite, prime
from flower_desloc.core.worker import Worker
from flower_desloc.flower.not_finite import cause
from flower_desloc.flower.replies import ClientEvaluation

OF_THE_BATCH, OF_THE_RATE = "look for NaN and infinity in the data", "lower optimizer.lr"


def message(*, start=0, stop=8, lr=0.1, bad=(), weight=0.5, dtype=torch.float32, **options):
    """Train from ``weight`` on batches of which some are ``bad``; return what is said."""
    module = torch.nn.Linear(1, 1, bias=False).to(dtype)
    optimizer = torch.optim.Adam(module.parameters(), lr=lr, **options)
    prime(optimizer)

    def loss_at(step):
        row = torch.tensor([[math.nan if step in bad else 1.0]], dtype=dtype)
        return (module(row) - 1).square().square().sum()

    worker = Worker(module=module, optimizer=optimizer, loss_at=loss_at, num_examples=1)
    names = ("params", "exp_avg", "exp_avg_sq")
    begin = {
        name: {key: torch.zeros_like(t) for key, t in stream.items()}
        for name, stream in worker.take(names).items()
    }
    begin["params"]["weight"].fill_(weight)

    def steps(first, last):
        worker.put(begin)
        return worker.steps(first, last)

    taken = steps(start, stop)
    with pytest.raises(ValueError, match="not finite") as found:
        check_finite("params", worker.take(names)["params"])
    return str(
        cause(found.value, optimizer, start, taken, again=lambda step: steps(step, step + 1))
    )


@pytest.mark.parametrize(
    ("start", "bad"), [(0, {0}), (0, {5}), (16, {20}), (16, {16}), (0, set(range(8)))]
)
def test_a_batch_with_nan_is_named_and_no_rate(start, bad):
    said = message(start=start, stop=start + 8, bad=bad)
    assert f"step {min(bad) + 1} is NaN or infinite, also with the parameters" in said
    assert OF_THE_BATCH in said
    assert OF_THE_RATE not in said
    assert "diverged" not in said


@pytest.mark.parametrize(
    "diverging",
    [{"lr": 1e30}, {"start": 16, "stop": 24, "lr": 1e30}, {"start": 16, "weight": 1e30}],
)
def test_a_rate_that_is_too_high_is_to_be_lowered(diverging):
    said = message(**({"stop": 24} | diverging))
    assert said.endswith(OF_THE_RATE)
    assert "has values that are not finite" in said


def test_an_eps_of_zero_is_named():
    assert message(eps=0.0, weight=1.0).endswith("or set optimizer.eps above 0")


@pytest.mark.parametrize(("eps", "is_worth"), [(1e-8, "0"), (1e-7, "1.19209e-07")])
def test_an_eps_too_small_for_float16_is_named_before_the_rate(eps, is_worth):
    # The gradient is 1e-4, its square 0 in float16; in float32 the same training converges.
    said = message(eps=eps, weight=0.971, dtype=torch.float16)
    assert f"in float16 optimizer.eps={eps:g} is {is_worth}, and" in said
    assert "torch.autocast, or set optimizer.eps=0.0002; otherwise lower optimizer.lr" in said


@pytest.mark.parametrize("options", [{"eps": 2e-4}, {"eps": 1e-8, "dtype": torch.float32}])
def test_an_eps_that_is_large_enough_does_not_diverge(options):
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        message(**({"weight": 0.971, "dtype": torch.float16} | options))


def test_an_evaluation_with_nan_names_where_to_look():
    with pytest.raises(ValueError, match="its total of nats is nan; look for NaN in the param"):
        ClientEvaluation.measured({"num-examples": 1, "totals/nats": float("nan")}, None)
