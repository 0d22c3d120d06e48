"""Laws of a worker's local steps."""

import math
import weakref
from typing import Any

import pytest
import torch
from federation import Quadratic, Regression, TiedMLP, assert_same, initial
from torch import nn
from torch.nn.utils import clip_grad_norm_

from flower_desloc import Clipping, StepMetrics, Worker, prime, put, take
from flower_desloc.core.accumulation import accumulated
from flower_desloc.core.kinds import Kind
from flower_desloc.core.lr_schedule import wsd
from flower_desloc.core.states import State, needs_seed
from flower_desloc.optim import Adam

PROBLEM = Regression()


def model(make=Adam):
    module = TiedMLP()
    optimizer = make(module.parameters(), lr=0.05)
    prime(optimizer)
    return module, optimizer


def worker(module, optimizer, **changed) -> Worker:
    settings: dict[str, Any] = {
        "loss_at": lambda t: PROBLEM.loss(module, 0, t),
        "num_examples": 1,
    } | changed
    return Worker(module=module, optimizer=optimizer, **settings)


def steps(module, optimizer, start, stop, **changed) -> StepMetrics:
    return worker(module, optimizer, **changed).steps(start, stop)


def test_two_windows_are_one():
    (one, a), (two, b) = model(), model()
    whole = steps(one, a, 0, 9)
    first, second = steps(two, b, 0, 4), steps(two, b, 4, 9)
    assert_same(one.state_dict(), two.state_dict())
    assert whole == first + second


def test_a_frozen_parameter_stays_as_it_is_whatever_gradient_is_left_of_it():
    module = TiedMLP()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    prime(optimizer)
    bias = module.b.bias.requires_grad_(False)
    before, bias.grad = bias.clone(), torch.ones_like(bias)
    steps(module, optimizer, 0, 2)
    assert torch.equal(bias, before)


def test_the_learning_rate_is_each_groups_own_times_the_schedule():
    module = TiedMLP()
    groups: list[dict[str, Any]] = [
        {"params": [module.a.weight], "lr": 0.5},
        {"params": [module.a.bias, module.b.bias]},
    ]
    optimizer = Adam(groups, lr=0.1)
    prime(optimizer)
    factor = wsd(20, warmup_steps=4, decay_steps=10)
    for start, stop in ((0, 3), (3, 15)):
        steps(module, optimizer, start, stop, lr_schedule=factor)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == [0.5 * factor(stop - 1), 0.1 * factor(stop - 1)]


def test_the_window_reports_every_loss_and_norm_as_they_were_before_the_step_and_the_clip():
    module, optimizer = model()
    metrics = steps(module, optimizer, 3, 9, clipping=Clipping(norm=1e-3))
    twin, twins_optimizer = model()
    for i, t in enumerate(range(3, 9)):
        loss = PROBLEM.loss(twin, 0, t)
        gradients = torch.autograd.grad(loss, list(twin.parameters()))
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        assert metrics.losses[i] == loss.item()
        assert metrics.grad_norms[i] == pytest.approx(norm, rel=1e-12)
        assert norm > 1e-3
        steps(twin, twins_optimizer, t, t + 1, clipping=Clipping(norm=1e-3))
    assert len(metrics.losses) == len(metrics.grad_norms) == 6


def test_gradients_are_not_added_to_those_of_elsewhere_and_none_is_kept():
    (one, a), (two, b) = model(), model()
    one.eval()
    for p in one.parameters():
        p.grad = torch.full_like(p, 1e6)
    steps(one, a, 0, 2)
    steps(two, b, 0, 2)
    assert_same(one.state_dict(), two.state_dict())
    assert one.training
    assert all(p.grad is None for p in one.parameters())


def test_a_parameter_the_loss_does_not_use_stays():
    module = nn.ParameterDict(
        {**dict(Quadratic().module().named_parameters()), "unused": nn.Parameter(torch.ones(3))}
    )
    optimizer = Adam(module.parameters(), lr=0.1)
    prime(optimizer)
    loss_at = lambda t: module["vector"].square().sum()  # noqa: E731
    steps(module, optimizer, 0, 3, loss_at=loss_at, clipping=Clipping(norm=1.0))
    assert torch.equal(module["unused"], torch.ones(3))
    assert torch.equal(module["matrix"], initial(Quadratic())["matrix"])
    assert not torch.equal(module["vector"], initial(Quadratic())["vector"])


@pytest.mark.parametrize("norm", [None, 0.1])
def test_an_optimizer_of_some_parameters_trains_and_clips_these_alone(norm):
    def some(module):
        return [module.b.bias, module.a.weight]

    module, plain = TiedMLP(), TiedMLP()
    optimizer, its = Adam(some(module), lr=0.05), Adam(some(plain), lr=0.05)
    prime(optimizer)
    worked = worker(module, optimizer, clipping=Clipping(norm=norm))
    grad_norms = [value for t in range(0, 8, 4) for value in worked.steps(t, t + 4).grad_norms]
    for t in range(8):
        its.zero_grad()
        PROBLEM.loss(plain, 0, t).backward()
        in_its_order = [p for p in plain.parameters() if any(p is each for each in some(plain))]
        assert grad_norms[t] == clip_grad_norm_(in_its_order, norm or math.inf)
        its.step()
    assert_same(module.state_dict(), plain.state_dict())
    assert torch.equal(module.a.bias, TiedMLP().a.bias)
    assert all(p.grad is None for p in module.parameters())
    assert worked.gradient(8)[0].keys() == {"a.weight", "b.bias"}


def test_a_sparse_gradient_is_refused_by_name_before_a_step():
    table, head = nn.Embedding(5, 2), nn.Linear(2, 1)
    module = nn.ModuleDict({"table": table, "head": head})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    prime(optimizer)
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}

    def loss_at(t):  # the module does not state that this gradient is sparse
        rows = nn.functional.embedding(torch.tensor([1]), table.weight, sparse=t != 1)
        return head(rows).sum()

    refused = pytest.raises(ValueError, match=r"'table.weight' has sparse gradients.*sparse=True")
    for train in (lambda it: it.steps(0, 2), lambda it: it.gradient(0), lambda it: it.seed([], 0)):
        with refused:
            train(worker(module, optimizer, loss_at=loss_at))
    assert_same(module.state_dict(), before)
    with refused:  # a later step of a window
        worker(module, optimizer, loss_at=loss_at).steps(1, 3)


# ------------------------------------------------------------------------------ Losses in parts


def batch_of(size):
    draw = torch.Generator().manual_seed(1)
    return torch.randn(size, 4, dtype=torch.float64, generator=draw)


@pytest.mark.parametrize("parts", [1, 2, 6])
def test_accumulated_losses_have_the_gradients_of_their_sum(parts):
    module, batch = TiedMLP(), batch_of(12)
    params = list(module.parameters())
    whole = module(batch).square().mean()
    expected = torch.autograd.grad(3 * whole, params)
    loss = accumulated((module(b).square().mean() / parts for b in batch.chunk(parts)), params)
    (3 * loss).backward()
    torch.testing.assert_close(loss, whole.detach(), rtol=1e-14, atol=0, check_stride=False)
    got = [p.grad for p in params]
    torch.testing.assert_close(got, list(expected), rtol=1e-13, atol=1e-15)


def test_accumulated_gradients_are_added_to_those_there_are():
    module, batch = TiedMLP(), batch_of(4)
    params = [*module.parameters(), nn.Parameter(torch.ones(2))]
    for p in params[:-1]:
        p.grad = torch.ones_like(p)
    expected = torch.autograd.grad(module(batch).sum(), params[:-1])
    accumulated((module(b).sum() for b in batch.split(2)), params).backward()
    got = [gradient(p) - 1 for p in params[:-1]]
    torch.testing.assert_close(got, list(expected), rtol=1e-13, atol=1e-14)
    assert params[-1].grad is None


def test_one_graph_at_a_time_is_held():
    module = TiedMLP()
    graphs: list[weakref.ref[torch.Tensor]] = []

    def losses():
        for part in batch_of(12).split(2):
            assert all(graph() is None for graph in graphs)
            hidden = module.a(part)
            graphs.append(weakref.ref(hidden))
            yield module.b(torch.tanh(hidden)).square().mean()
            del hidden

    accumulated(losses(), list(module.parameters())).backward()
    assert len(graphs) == 6


def gradient(p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None
    return p.grad


class SeedsBoth(Adam):
    """Adam whose two moments start from the first gradient, where they are zero."""

    states = (
        State("exp_avg", Kind.FIRST_MOMENT, seed=lambda p, group: gradient(p)),
        State("exp_avg_sq", Kind.SECOND_MOMENT, seed=lambda p, group: gradient(p).square()),
    )


SEEDED = [state.name for state in SeedsBoth.states]


@pytest.mark.parametrize("averaged", ["exp_avg", "exp_avg_sq"])
def test_only_the_states_that_are_zero_are_seeded_and_an_average_is_kept(averaged):
    module, optimizer = model(make=SeedsBoth)
    put(module, optimizer, {averaged: {k: t + 0.5 for k, t in moment(module, optimizer, averaged)}})
    names = list(needs_seed(module, optimizer, take(module, optimizer, SEEDED)))
    assert names == [name for name in SEEDED if name != averaged]
    worker(module, optimizer).seed(names, 4)
    assert all((t == 0.5).all() for _, t in moment(module, optimizer, averaged))
    assert needs_seed(module, optimizer, take(module, optimizer, SEEDED)) == {}


def moment(module, optimizer, name):
    return take(module, optimizer, [name])[name].items()
