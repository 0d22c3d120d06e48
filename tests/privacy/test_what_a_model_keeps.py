"""A model whose loss of a record depends on others is refused, as far as that is seen."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("opacus")

from private_workers import Open, X, Y, gradient, guarded

from flower_desloc.privacy import digests
from flower_desloc.privacy import worker as private_worker

pytestmark = pytest.mark.usefixtures("unspoiled")

SEEN: list[float] = []


class Keeping(nn.Module):
    """It keeps what it computes of a record, in the given way."""

    def __init__(self, way):
        super().__init__()
        self.way, self.list, self.calls, self.scale = way, [torch.zeros(1)], 0, 1.0
        self.other, self.drawn = SimpleNamespace(), torch.Generator()
        self.of_numpy = np.random.default_rng(0)
        self.hidden = [nn.Module()]
        self.hidden[0].register_buffer("last", torch.zeros(1))
        self.weight = nn.Parameter(torch.ones(1), requires_grad=False)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x):
        return x * self.scale + getattr(self, self.way)(x.detach().mean(0))

    def by_its_own_generator(self, mean):
        return torch.rand(1, generator=self.drawn)

    def by_numpys_generator(self, mean):
        return float(self.of_numpy.random())

    def in_place(self, mean):
        return self.mean.mul_(0.9).add_(mean)

    def through_data(self, mean):
        self.mean.data += mean
        return self.mean

    def as_another(self, mean):
        last, self.mean = self.mean, mean
        return last

    def in_a_list(self, mean):
        self.list.append(mean)
        return self.list[-2]

    def as_a_number(self, mean):
        self.scale = float(mean)
        return 0

    def by_counting(self, mean):
        self.calls += 1
        return self.calls

    def in_a_parameter(self, mean):
        self.weight.data.copy_(mean)
        return self.weight

    def in_another_parameter(self, mean):
        self.weight.data.add_(1)
        return self.weight

    def in_a_global(self, mean):
        SEEN.append(float(mean))
        return SEEN[-2] if len(SEEN) > 1 else 0.0

    def in_a_module_of_a_list(self, mean):
        last, self.hidden[0].last = self.hidden[0].last, mean
        return last

    def in_an_object(self, mean):
        last, self.other.mean = getattr(self.other, "mean", 0.0), mean
        return last


WAYS = [way for way in vars(Keeping) if way.split("_")[0] in ("in", "through", "as", "by")]


@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_keeps_what_it_computes_is_refused(way):
    worker = guarded()
    worker.module.append(Keeping(way))
    with pytest.raises(ValueError, match="Sequential changes while it computes a loss: it keeps"):
        gradient(worker)
    with pytest.raises(
        ValueError, match=r"in this process a step has failed.* restart the process"
    ):
        gradient(guarded())  # it may be in a global, of another model


def test_a_module_may_make_a_buffer_anew_that_is_as_before():
    """As rotary embeddings for long texts do."""

    class Anew(nn.Module):
        def forward(self, x):
            self.register_buffer("table", torch.arange(3.0), persistent=False)
            return x + self.get_buffer("table")[1]

    worker = guarded()
    worker.module.append(Anew())
    assert gradient(worker).any()


def test_a_module_that_changes_back_is_refused():
    """As dynamic rotary embeddings: a long record changes a buffer, a short one resets it."""

    class Reset(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(1), persistent=False)

        def forward(self, x):
            if x[0, 0] > 1:
                self.register_buffer("scale", torch.full((1,), 2.0), persistent=False)
            elif x[0, 0] < -1:
                self.register_buffer("scale", torch.ones(1), persistent=False)
            return x * self.scale

    assert X[:, 0].abs()[[0, -1]].max() < 1
    assert X[:, 0].abs().max() > 1
    worker = guarded()
    worker.module.insert(0, Reset())
    with pytest.raises(ValueError, match="changes while it computes a loss"):
        gradient(worker)


@pytest.mark.parametrize(
    "drawn", [lambda rng: rng.random(), lambda rng: rng.standard_normal(2).sum()]
)
def test_data_with_a_generator_of_its_own_is_refused(drawn):
    rng = np.random.default_rng(0)
    worker = guarded(of=lambda rows: (X[rows] * float(drawn(rng)), Y[rows]))
    with pytest.raises(ValueError, match="not from generators of its own"):
        gradient(worker)


def test_generators_in_a_list_are_all_looked_at():
    """The states that they return live shortly, and each may be where the last one was."""
    all_: list[Any] = [random.Random(n) for n in range(4)]
    all_ += [np.random.default_rng(n) for n in range(4)]
    module = nn.Module()
    module.all = all_  # type: ignore[assignment]  # not a module
    seen = {digests.of_attributes(module)}
    for each in all_:
        each.random()
        seen.add(digests.of_attributes(module))
    assert len(seen) == 9


def in_place(module, batch):
    x, y = batch.pop("x"), batch.pop("y")
    return mse_loss(module(x.sub_(x.mean())), y)


def test_a_loss_may_change_its_batch():
    account = Open()
    worker = guarded(account, of=lambda rows: {"x": X[rows].clone(), "y": Y[rows]})
    worker = replace(worker, loss_at=replace(worker.loss_at, loss=in_place))
    assert torch.equal(gradient(worker), gradient(worker))
    assert len(account.charged) == 1


def test_a_step_of_which_the_sum_always_differs_is_refused_in_the_end():
    shift = torch.zeros(1)
    worker = guarded(of=lambda rows: (X[rows], Y[rows] + shift))
    for _ in range(private_worker._MOST_ANSWERS):
        gradient(worker)
        shift += 1
    with pytest.raises(ValueError, match="this step was repeated 8 times"):
        gradient(worker)
    private_worker._spoiled.clear()
    shift -= 3
    gradient(worker)
    assert len(worker.loss_at.account.charged) == private_worker._MOST_ANSWERS


def test_a_record_without_a_gradient_is_no_witness():
    """Else it would not be seen that a module keeps something."""
    ignored = torch.zeros(12, 1)
    ignored[4:7] = 1
    worker = guarded(of=lambda rows: (X[rows], ignored[rows]), size=12)
    weighted = lambda module, batch: (module(batch[0]).square() * batch[1]).sum()  # noqa: E731
    worker = replace(worker, loss_at=replace(worker.loss_at, loss=weighted))
    seen = 0
    for step in range(12):
        worker.module.append(Keeping("in_a_global"))
        private_worker._spoiled.clear()
        SEEN.clear()
        try:
            gradient(worker, step)
        except ValueError:
            seen += 1
        del worker.module[-1]
    assert seen >= 6  # four records are tried; with one it would be 3


class Sizes(TorchDispatchMode):
    """The largest tensor that is made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.most = max(self.most, made.numel())
        return made


@pytest.mark.parametrize(
    ("changed", "factor", "is_same"),
    [("a", 1.0, True), ("a", 1 + 1e-3, True), ("b", 1.2, False), ("a", 1.2, False)],
)
def test_on_an_accelerator_a_witness_is_compared_parameter_by_parameter(changed, factor, is_same):
    """They may be on several devices, and of all together there may be no memory for a copy."""
    private_loss = guarded().loss_at
    vars(private_loss)["_accelerators"] = [torch.device("cuda")]
    once = {name: torch.linspace(-1, 1, 50, dtype=torch.float64) for name in "ab"}
    again = once | {changed: once[changed] * factor}
    with Sizes() as sizes:
        assert private_loss._is_same(private_loss._kept(once), again) == is_same
    assert sizes.most == 50


def test_another_site_in_the_same_process_goes_on():
    worker = guarded()
    worker.module.append(Keeping("by_counting"))
    with pytest.raises(ValueError, match="changes while"):
        gradient(worker)
    gradient(guarded(Open(secret=bytes(31) + b"1")))


class Lazy(nn.Module):
    """It makes a table when it is called first, as rotary embeddings do, and draws from it."""

    def forward(self, x):
        if not hasattr(self, "table"):
            self.table = torch.arange(40_000.0)
        return x + self.table[torch.arange(40_000) % 7].mean()


def test_what_a_module_makes_once_is_no_part_of_a_record():
    account = Open(noise=100.0)
    workers = [guarded(account), guarded(account)]
    for worker in workers:
        worker.module.append(Lazy())
    once = [gradient(worker) for worker in (workers[0], workers[0], workers[1])]
    assert torch.equal(once[0], once[1])
    assert torch.equal(once[0], once[2])
    assert len(account.charged) == 1
