"""A private worker: its gradients, its queries, and what it says of its data."""

import math
import random
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("opacus")

from private_workers import Open, X, Y, gradient, guarded, loss, plain, weights

from flower_desloc.core.client_info import ClientInfo
from flower_desloc.core.worker import Clipping
from flower_desloc.optim.adam_bc import AdamBC
from flower_desloc.privacy import accounting
from flower_desloc.privacy import worker as private_worker
from flower_desloc.privacy.account import Account, BudgetSpentError
from flower_desloc.privacy.accounting import Budget, Step
from flower_desloc.privacy.ledger import Ledger
from flower_desloc.privacy.worker import Examples, private

pytestmark = pytest.mark.usefixtures("unspoiled")


def test_without_noise_and_bound_it_trains_as_a_worker_without_privacy():
    ours, theirs = guarded(Open(noise=0.0), max_grad_norm=math.inf), plain()
    for worker in (ours, theirs):
        worker.steps(0, 8)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-5, atol=1e-6)
    assert not torch.equal(weights(theirs), weights(plain()))


def test_without_noise_and_bound_the_gradient_of_one_record_is_that_without_privacy():
    """Bit for bit; that of several is summed in another order."""
    worker = guarded(Open(noise=0.0), max_grad_norm=math.inf, size=1)
    sizes = {}
    for step in range(60):
        drawn: list[int] = []
        of = lambda rows, drawn=drawn: drawn.extend(rows) or (X[rows], Y[rows])  # noqa: E731
        object.__setattr__(worker.loss_at.examples, "of", of)
        ours = gradient(worker, step)
        drawn = sorted(set(drawn))  # one is read again
        sizes[len(drawn)] = True
        if len(drawn) == 1:
            loss(worker.module, (X[drawn], Y[drawn])).backward()
            theirs = torch.cat([p.grad.flatten() for p in worker.module.parameters()])
            assert torch.equal(ours, theirs)
            worker.module.zero_grad()
    assert 1 in sizes


def test_the_noise_has_the_stated_deviation():
    exact = gradient(guarded(Open(noise=0.0), max_grad_norm=0.5))
    worker = guarded(Open(noise=3.0), max_grad_norm=0.5)
    drawn = torch.stack([gradient(worker, step) for step in range(25)])
    scaled = (drawn - exact) / (3.0 * 0.5 / len(X))
    assert scaled.mean().item() == pytest.approx(0, abs=0.12)
    assert scaled.std().item() == pytest.approx(1, abs=0.09)


def test_an_optimizer_may_be_told_the_deviation_of_the_noise():
    worker = guarded(Open(noise=3.0), max_grad_norm=0.5)
    optimizer = AdamBC(worker.module.parameters())
    told = replace(worker.loss_at, optimizer=optimizer)
    private(replace(worker, optimizer=optimizer, clipping=Clipping()), told).steps(0, 1)
    assert [group["noise_std"] for group in optimizer.param_groups] == [3.0 * 0.5 / 12]
    with pytest.raises(ValueError, match=r"optimizer\.clip_norm=null"):
        private(replace(worker, optimizer=optimizer), told)


def test_each_record_is_drawn_by_a_coin_of_its_own():
    drawn: list[list[int]] = []

    def of(rows):
        drawn[-1].extend(rows)
        return X[rows], Y[rows]

    worker = guarded(of=of, size=3)
    for step in range(60):
        drawn.append([])
        worker.loss_at(step)
        drawn[-1] = sorted(set(drawn[-1]))  # one is read again
    sizes, seen = [len(each) for each in drawn], {row for each in drawn for row in each}
    mean = sum(sizes) / 60
    assert mean == pytest.approx(3, abs=0.5)
    assert sum((s - 3) ** 2 for s in sizes) / 60 == pytest.approx(12 * 0.25 * 0.75, rel=0.5)
    assert seen == set(range(len(X)))
    assert all(step.sample_rate == 0.25 for _, step in worker.loss_at.account.charged)


def test_a_batch_without_records_is_noise_alone():
    read: list[list[int]] = []

    def of(rows):
        read.append(rows)
        return X[rows], Y[rows]

    worker = guarded(of=of, size=1e-9)
    assert gradient(worker).std() > 1
    assert not read
    assert len(worker.loss_at.account.charged) == 1


def test_the_same_query_has_the_same_answer_and_is_charged_once():
    first = guarded()
    once = gradient(first)
    again = guarded(first.loss_at.account)
    assert torch.equal(gradient(again), once)
    again.stream_names()
    again.seed(["exp_avg_sq"], 0)
    first.steps(0, 4)
    guarded(first.loss_at.account).steps(0, 4)
    assert len(first.loss_at.account.charged) == 4


def moved(account):
    """Return a worker whose parameters differ a little."""
    worker = guarded(account)
    with torch.no_grad():
        worker.module[0].bias[0] += 1e-6
    return worker


def with_fewer_trained(account):
    worker = guarded(account)
    del worker.optimizer.param_groups[0]["params"][0]
    return worker


@dataclass(frozen=True)
class Told:
    """A record with a number, which its gradient depends on."""

    x: torch.Tensor
    y: torch.Tensor
    weight: float


def weighted(account, weight):
    worker = guarded(account, of=lambda rows: Told(X[rows], Y[rows], weight))
    told = lambda module, batch: batch.weight * loss(module, (batch.x, batch.y))  # noqa: E731
    return replace(worker, loss_at=replace(worker.loss_at, loss=told))


OTHER = {
    "secret": lambda account: guarded(replace(account, secret=bytes(31) + b"1")),
    "run": lambda account: guarded(account, context="another"),
    "record": lambda account: guarded(account, of=lambda rows: (X[rows], Y[rows] + 1e-6)),
    "parameters": moved,
    "trained": with_fewer_trained,
}


@pytest.mark.parametrize("other", OTHER.values(), ids=OTHER)
def test_any_other_query_has_other_noise_and_is_charged(other):
    account = Open(noise=100.0)
    once, again = gradient(guarded(account)), gradient(other(account))
    assert torch.isclose(once[-len(again) :], again, rtol=1e-3).sum() <= 1
    assert len(account.charged) == 2


def test_a_site_without_examples_is_refused():
    with pytest.raises(ValueError, match="this site has no training examples"):
        Examples(number=0, of=lambda rows: X[rows], batch_size=4)


def test_numbers_of_a_record_are_a_part_of_the_query():
    account = Open(noise=100.0)
    once, same, other = (gradient(weighted(account, weight)) for weight in (1.0, 1.0, 2.0))
    assert torch.equal(once, same)
    assert torch.isclose(once, other, rtol=1e-3).sum() <= 1
    assert len(account.charged) == 2


def test_a_record_of_what_cannot_be_told_apart_is_refused():
    worker = guarded(of=lambda rows: (X[rows], object()))
    with pytest.raises(
        ValueError, match=r"examples of tensors, numbers and texts, .* got a object"
    ):
        gradient(worker)


def test_noise_differs_between_steps_and_parameters_and_not_by_the_runs_seed():
    worker = guarded(Open(noise=100.0), size=1e-9)
    steps = torch.stack([gradient(worker, step) for step in range(8)])
    assert len(set(steps.flatten().tolist())) > 0.97 * steps.numel()  # some meet on the grid
    torch.manual_seed(5)
    assert torch.equal(gradient(worker, 0), steps[0])


def test_dropout_is_drawn_from_the_sites_secret():
    def summed(secret):
        worker = guarded(Open(noise=0.0, secret=secret))
        worker.module.append(nn.Dropout(0.5))
        torch.manual_seed(int(secret[0]))
        return gradient(worker)

    one, other = bytes(32), bytes(31) + b"1"
    assert torch.equal(summed(one), summed(one))
    assert not torch.equal(summed(one), summed(other))


class Drawing(nn.Module):
    def forward(self, x):
        return x * random.random() * np.random.rand()


def test_other_generators_are_drawn_from_the_sites_secret_and_given_back():
    def summed():
        worker = guarded(Open(noise=0.0))
        worker.module.append(Drawing())
        return gradient(worker)

    once, states = summed(), (random.random(), np.random.rand())
    assert torch.equal(summed(), once)
    assert states != (random.random(), np.random.rand())


class Looking(nn.Module):
    def forward(self, x):
        assert torch.are_deterministic_algorithms_enabled()
        return x


def test_it_computes_by_deterministic_algorithms():
    worker = guarded()
    worker.module.append(Looking())
    gradient(worker)
    assert not torch.are_deterministic_algorithms_enabled()


def test_newer_settings_of_precision_are_a_part_of_the_query(monkeypatch):
    def mixed():
        raise RuntimeError("mix of the legacy and new APIs")

    gradient(guarded())
    monkeypatch.setattr(torch, "get_float32_matmul_precision", mixed)
    gradient(guarded())


class Short(nn.Module):
    """It fails for some records as long as something is short."""

    fails_for: ClassVar[set[float]] = set()

    def forward(self, x):
        if x[0, 0].item() in Short.fails_for:
            raise OSError
        return x


def test_another_sum_has_other_draws_and_noise_and_is_charged(monkeypatch):
    account = Open(noise=100.0)
    drawn: list[list[int]] = []

    def of(rows):
        drawn[-1].extend(rows)
        return X[rows], Y[rows]

    def grad():
        drawn.append([])
        return gradient(worker)

    worker = guarded(account, of=of, size=6)
    worker.module.insert(0, Short())
    monkeypatch.setattr(Short, "fails_for", {X[3, 0].item()})
    short, again = grad(), grad()
    assert torch.equal(again, short)
    assert len(account.charged) == 1
    Short.fails_for.clear()
    whole = grad()
    assert torch.isclose(whole, short, rtol=1e-3).sum() <= 1
    assert len(account.charged) == 2
    first = drawn[1]
    assert drawn[0] == first
    assert len({*first[-2:]}) == 1  # read again, to be computed again
    assert drawn[2][: len(first)] == first
    assert drawn[2][len(first) :] not in ([], first)
    assert torch.equal(grad(), whole)
    assert len(account.charged) == 2


def test_augmentation_of_a_record_does_not_depend_on_the_others():
    def grads(first):
        drawn = {}

        def of(rows):
            if rows == [0] and first:
                torch.rand(5)
            drawn[rows[0]] = torch.rand(())
            return X[rows] * drawn[rows[0]], Y[rows]

        gradient(guarded(Open(noise=0.0), of=of))
        return drawn

    one, other = grads(first=True), grads(first=False)
    assert one[0] != other[0]
    assert all(one[number] == other[number] for number in range(1, 12))


def test_dropout_of_a_record_does_not_depend_on_the_others():
    def grads(scale):
        of = lambda rows: (X[rows], Y[rows] * (scale if rows == [0] else 1))  # noqa: E731
        worker = guarded(Open(noise=0.0), of=of)
        worker.module.append(nn.Dropout(0.5))
        records = {n: worker.loss_at.examples.of([n]) for n in range(4)}
        seen = []
        for number, (x, _) in zip(records, worker.loss_at._seeded(b"", records), strict=True):
            seen.append(worker.module(x))
            if scale == 0 and number == 0:
                torch.rand(3)  # this one draws more
        return torch.cat(seen)

    assert torch.equal(grads(1), grads(0))


def test_a_line_is_in_the_ledger_before_the_noise_is_drawn(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path, "site")
    account = Account(ledger, "run", 3, of_run=Budget(1e3, 1e-5))
    monkeypatch.setattr(account, "noise_multiplier", lambda sample_rate: 5.0)
    worker = guarded(account)

    def killed(summed, key, deviation):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(private_worker, "with_noise", killed)
        with pytest.raises(KeyboardInterrupt):
            worker.steps(0, 3)
    assert Ledger(tmp_path, "site").steps().total() == 1
    worker = guarded(Account(Ledger(tmp_path, "site"), "run", 3, of_run=Budget(1e3, 1e-5)))
    worker.steps(0, 3)
    assert Ledger(tmp_path, "site").steps() == {Step(5.0, 1.0): 3}


def test_where_the_budget_is_spent_no_record_is_read(tmp_path, monkeypatch):
    cost = lambda steps, delta: sum(number for _, number in steps)  # noqa: E731
    monkeypatch.setattr(accounting, "_epsilon", cost)
    account = Account(Ledger(tmp_path, "site"), "run", 1, of_run=Budget(1, 1e-5))
    monkeypatch.setattr(account, "noise_multiplier", lambda sample_rate: 5.0)
    read: list[list[int]] = []

    def of(rows):
        read.append(rows)
        return X[rows], Y[rows]

    worker = guarded(account, of=of)
    once = gradient(worker)
    read.clear()
    with pytest.raises(BudgetSpentError):
        gradient(worker, 1)
    assert not read
    assert torch.equal(gradient(worker), once)


def test_a_private_worker_says_nothing_of_its_data():
    worker = guarded()
    measured = worker.steps(0, 3)
    assert all(map(math.isnan, measured.losses))
    assert all(map(math.isfinite, measured.grad_norms))
    assert worker.num_examples == 1
    assert worker.info == ClientInfo(device="cpu")
    assert worker.evaluate is None
    assert worker.data_version is None
