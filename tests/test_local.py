"""Laws of a worker's local steps."""

import math
import weakref

import pytest
import torch
from federation import Quadratic, Regression, TiedMLP
from torch import nn

from flower_desloc import Clipping, StepMetrics, Worker, prime, put, take
from flower_desloc.core.accumulation import accumulated
from flower_desloc.core.lr_schedule import wsd
from flower_desloc.core.worker import needs_seed
from flower_desloc.optim import SGDM, Adam

PROBLEM = Regression()


def worker(lr=0.05, make=Adam):
    module = TiedMLP()
    optimizer = make(module.parameters(), lr=lr)
    prime(optimizer)
    return module, optimizer


def steps(module, optimizer, start, stop, **changed) -> StepMetrics:
    settings = {"loss_at": lambda t: PROBLEM.loss(module, 0, t), "num_examples": 1} | changed
    return Worker(module=module, optimizer=optimizer, **settings).steps(start, stop)


def assert_same(a: nn.Module, b: nn.Module) -> None:
    torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=0, atol=0)


def test_the_batches_are_those_of_the_steps_in_order():
    module, optimizer = worker()
    asked = []

    def loss_at(t):
        asked.append(t)
        return PROBLEM.loss(module, 0, t)

    steps(module, optimizer, 7, 12, loss_at=loss_at)
    assert asked == [7, 8, 9, 10, 11]


def test_two_windows_are_one():
    (one, a), (two, b) = worker(), worker()
    whole = steps(one, a, 0, 9)
    first, second = steps(two, b, 0, 4), steps(two, b, 4, 9)
    assert_same(one, two)
    assert whole.losses == first.losses + second.losses
    assert whole.grad_norms == first.grad_norms + second.grad_norms


def test_a_window_begins_at_the_federations_step_whatever_the_worker_counted():
    module, optimizer = worker()
    steps(module, optimizer, 0, 3)
    steps(module, optimizer, 40, 42)
    assert {float(state["step"]) for state in optimizer.state.values()} == {42.0}


def test_the_learning_rate_is_each_groups_own_times_the_schedule():
    module = TiedMLP()
    groups = [{"params": [module.a.weight], "lr": 0.5}, {"params": [module.a.bias, module.b.bias]}]
    optimizer = Adam(groups, lr=0.1)
    prime(optimizer)
    factor = wsd(20, warmup_steps=4, decay_steps=10)
    for start, stop in ((0, 3), (3, 15)):
        steps(module, optimizer, start, stop, lr_schedule=factor)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == [0.5 * factor(stop - 1), 0.1 * factor(stop - 1)]


def test_the_window_reports_every_loss_and_norm_as_they_were_before_the_step_and_the_clip():
    module, optimizer = worker()
    metrics = steps(module, optimizer, 3, 9, clipping=Clipping(norm=1e-3))
    twin, twins_optimizer = worker()
    for i, t in enumerate(range(3, 9)):
        loss = PROBLEM.loss(twin, 0, t)
        gradients = torch.autograd.grad(loss, list(twin.parameters()))
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        assert metrics.losses[i] == loss.item()
        assert metrics.grad_norms[i] == pytest.approx(norm, rel=1e-12)
        assert norm > 1e-3
        steps(twin, twins_optimizer, t, t + 1, clipping=Clipping(norm=1e-3))
    assert len(metrics.losses) == len(metrics.grad_norms) == 6


@pytest.mark.parametrize("rho", [1e-3, 0.3])
def test_a_clipped_gradient_has_at_most_the_norm_rho(rho):
    """Plain SGD with a learning rate of 1 walks exactly the gradient."""
    module, optimizer = worker(lr=1.0, make=lambda p, lr: SGDM(p, lr=lr, momentum=0.0))
    before = torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    [norm] = steps(module, optimizer, 0, 1, clipping=Clipping(norm=rho)).grad_norms
    after = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    assert float((after - before).norm()) == pytest.approx(min(rho, norm), rel=1e-5)


def test_a_clipped_coordinate_is_at_most_rho_and_the_others_stay():
    module, optimizer = worker(lr=1.0, make=lambda p, lr: SGDM(p, lr=lr, momentum=0.0))
    before = {key: p.detach().clone() for key, p in module.named_parameters()}
    steps(module, optimizer, 0, 1, clipping=Clipping(value=0.1))
    moved = {key: before[key] - p.detach() for key, p in module.named_parameters()}
    gradient = PROBLEM.grad(0, 0, before)
    assert any((g.abs() > 0.1).any() for g in gradient.values())
    for key, g in gradient.items():
        torch.testing.assert_close(moved[key], g.clamp(-0.1, 0.1), rtol=1e-12, atol=1e-12)


def test_afterwards_no_gradient_is_kept_and_the_module_trains():
    module, optimizer = worker()
    module.eval()
    steps(module, optimizer, 0, 2)
    assert module.training
    assert all(p.grad is None for p in module.parameters())


def test_a_gradient_left_over_from_elsewhere_is_not_added():
    (one, a), (two, b) = worker(), worker()
    for p in one.parameters():
        p.grad = torch.full_like(p, 1e6)
    steps(one, a, 0, 2)
    steps(two, b, 0, 2)
    assert_same(one, two)


def test_a_parameter_the_loss_does_not_use_stays():
    module = nn.ParameterDict(
        {**dict(Quadratic().module().named_parameters()), "unused": nn.Parameter(torch.ones(3))}
    )
    optimizer = Adam(module.parameters(), lr=0.1)
    prime(optimizer)
    loss_at = lambda t: module["vector"].square().sum()  # noqa: E731
    steps(module, optimizer, 0, 3, loss_at=loss_at, clipping=Clipping(norm=1.0))
    assert torch.equal(module["unused"], torch.ones(3))
    assert torch.equal(module["matrix"], Quadratic().module().matrix)
    assert not torch.equal(module["vector"], Quadratic().module().vector)


# ------------------------------------------------------------------------------ Losses in parts


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def batch_of(size):
    draw = torch.Generator().manual_seed(1)
    return torch.randn(size, 4, dtype=torch.float64, generator=draw)


@pytest.mark.parametrize("parts", [1, 2, 6])
def test_accumulated_losses_have_the_gradients_of_their_sum(parts):
    module, batch = network(), batch_of(12)
    params = list(module.parameters())
    whole = module(batch).square().mean()
    expected = torch.autograd.grad(3 * whole, params)
    loss = accumulated((module(b).square().mean() / parts for b in batch.chunk(parts)), params)
    (3 * loss).backward()
    torch.testing.assert_close(loss, whole.detach(), rtol=1e-14, atol=0, check_stride=False)
    got = [p.grad for p in params]
    torch.testing.assert_close(got, list(expected), rtol=1e-13, atol=1e-15)


def test_accumulated_gradients_are_added_to_those_there_are():
    module, batch = network(), batch_of(4)
    params = [*module.parameters(), nn.Parameter(torch.ones(2))]
    for p in params[:-1]:
        p.grad = torch.ones_like(p)
    expected = torch.autograd.grad(module(batch).sum(), params[:-1])
    accumulated((module(b).sum() for b in batch.split(2)), params).backward()
    got = [p.grad - 1 for p in params[:-1]]
    torch.testing.assert_close(got, list(expected), rtol=1e-13, atol=1e-14)
    assert params[-1].grad is None


def test_one_graph_at_a_time_is_held():
    module, graphs = network(), []

    def losses():
        for part in batch_of(12).split(2):
            assert all(graph() is None for graph in graphs)
            hidden = module[0](part)
            graphs.append(weakref.ref(hidden))
            yield module[1:](hidden).square().mean()
            del hidden

    accumulated(losses(), list(module.parameters())).backward()
    assert len(graphs) == 6


def test_a_step_in_parts_is_a_step():
    finals = []
    for parts in (1, 3):
        module, batch = network(), batch_of(12)
        adam = Adam(module.parameters(), lr=0.1)
        prime(adam)
        params = list(module.parameters())

        def loss_at(t, parts=parts, module=module, batch=batch, params=params):
            losses = (module(b + t).square().mean() / parts for b in batch.chunk(parts))
            return accumulated(losses, params)

        metrics = steps(module, adam, 0, 4, loss_at=loss_at, clipping=Clipping(norm=0.1))
        finals.append([torch.tensor(metrics.losses), torch.tensor(metrics.grad_norms), *params])
    torch.testing.assert_close(*finals, rtol=1e-6, atol=1e-9)


class SeedsBoth(Adam):
    """Adam whose two moments start from the first gradient, where they are zero."""

    seeded = ("exp_avg", "exp_avg_sq")

    @torch.no_grad()
    def seed_states(self, names):
        for p, state in self.state.items():
            for name in names:
                state[name].copy_(p.grad if name == "exp_avg" else p.grad.square())


@pytest.mark.parametrize("averaged", ["exp_avg", "exp_avg_sq"])
def test_only_the_states_that_are_zero_are_seeded_and_an_average_is_kept(averaged):
    module, optimizer = worker(make=SeedsBoth)
    put(module, optimizer, {averaged: {k: t + 0.5 for k, t in moment(module, optimizer, averaged)}})
    names = needs_seed(optimizer, take(module, optimizer, SeedsBoth.seeded))
    assert names == [name for name in SeedsBoth.seeded if name != averaged]
    loss_at = lambda t: PROBLEM.loss(module, 0, t)  # noqa: E731
    Worker(module=module, optimizer=optimizer, loss_at=loss_at, num_examples=1).seed(names, 4)
    assert all((t == 0.5).all() for _, t in moment(module, optimizer, averaged))
    assert needs_seed(optimizer, take(module, optimizer, SeedsBoth.seeded)) == []


def moment(module, optimizer, name):
    return take(module, optimizer, [name])[name].items()
