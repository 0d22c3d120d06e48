"""A private worker: its gradients, what they depend on, and what it says of its data."""

import math
import random
import weakref
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("opacus")

from flower_desloc.core.client_info import ClientInfo
from flower_desloc.core.errors import SiteRefusedError
from flower_desloc.core.worker import Clipping, Worker
from flower_desloc.optim.adam_bc import AdamBC
from flower_desloc.privacy import accounting, digests
from flower_desloc.privacy import worker as private_worker
from flower_desloc.privacy.account import Account, BudgetSpentError
from flower_desloc.privacy.accounting import Budget, Step
from flower_desloc.privacy.failures import Failures
from flower_desloc.privacy.ledger import Ledger
from flower_desloc.privacy.worker import Examples, PrivateLoss, private

X = torch.randn(12, 5, generator=torch.Generator().manual_seed(3))
Y = X.sum(1, keepdim=True).sin()


@dataclass
class Open:
    """An account without a limit."""

    noise: float = 1.0
    secret: bytes = bytes(32)
    charged: list[tuple[str, Step]] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)

    def noise_multiplier(self, sample_rate):
        return self.noise

    def require_left(self, query, step):
        pass

    def charge(self, query, answer, step):
        if query not in self.answers:
            self.charged.append((query, step))
        return self.answers.setdefault(query, answer) == answer


@pytest.fixture(autouse=True)
def _unspoiled():
    """Give each test a process in which no step has failed."""
    private_worker._traced.clear()
    private_worker._spoiled.clear()
    yield
    private_worker._spoiled.clear()


def loss(module, batch):
    x, y = batch
    return mse_loss(module(x), y)


def plain(**options):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    return Worker(
        module=module,
        optimizer=optimizer,
        loss_at=lambda step: loss(module, (X, Y)),
        num_examples=len(X),
        clipping=Clipping(norm=1.0),
        evaluate=lambda: {"loss": 1.0},
        data_version=lambda: "version",
        info=ClientInfo(device="cpu", data={"label": len(X)}),
        **options,
    )


def guarded(account=None, *, of=lambda rows: (X[rows], Y[rows]), size=12, **options):
    worker = plain()
    examples = Examples(number=len(X), of=of, batch_size=size)
    made = PrivateLoss(
        module=worker.module,
        optimizer=worker.optimizer,
        loss=loss,
        examples=examples,
        account=account or Open(),  # type: ignore[arg-type]  # acts as an Account
        **{"max_grad_norm": 1.0, **options},
    )
    return private(worker, made)


def weights(worker):
    return nn.utils.parameters_to_vector(worker.module.parameters()).detach().clone()


def gradient(worker, step=0):
    grads, _ = worker.gradient(step)
    return torch.cat([grad.flatten() for grad in grads.values()])


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


def fails_for(failing, worker):
    """Return the worker with records of those numbers that fail, every other when it is read."""

    def of(rows):
        if rows[0] in failing[::2]:
            raise FileNotFoundError(rows)
        return X[rows], Y[rows]

    def computed(module, batch):
        if any(torch.equal(batch[0], X[[number]]) for number in failing):
            raise KeyError(str(batch))
        return loss(module, batch)

    examples = replace(worker.loss_at.examples, of=of)
    return replace(worker, loss_at=replace(worker.loss_at, loss=computed, examples=examples))


def test_where_all_records_fail_the_step_is_refused_and_only_the_site_is_told_why(caplog):
    """An error of a record would tell the server exactly what is in the data."""
    account = Open()
    for _ in range(2):
        worker = fails_for(range(12), guarded(account))
        with pytest.raises(SiteRefusedError, match=r"most records .* see this site's log$") as told:
            gradient(worker)
        assert not getattr(told.value, "__notes__", ())
        assert len(account.charged) == 1
    assert "6 examples of 12 cannot be read and count as none" in caplog.text
    assert "6 examples of 6 fail and count as none" in caplog.text
    gradient(guarded(account))  # it has left nothing of a record


@pytest.mark.parametrize(
    ("noise", "failed", "expected"),
    [
        *((1.0, 0, 0), (1.0, 6, 0), (1.0, 10, 200), (1.0, 11, 337), (1.0, 12, 391)),  # limit 6 + 4
        *((50.0, 0, 0), (50.0, 12, 0), (50.0, 300, 200)),  # limit 6 x 50, above all noise
    ],
)
def test_a_step_is_refused_by_the_number_of_records_that_fail_and_noise(noise, failed, expected):
    private_loss, refused = guarded().loss_at, 0
    for n in range(400):
        try:
            private_loss._require_computed(failed, n.to_bytes(32), Step(noise, 1.0))
        except SiteRefusedError:
            refused += 1
    assert refused == pytest.approx(expected, abs=40 if expected else 0)


def test_records_without_a_finite_gradient_have_failed(caplog):
    worker = guarded(of=lambda rows: (X[rows] * math.nan, Y[rows]))
    with pytest.raises(SiteRefusedError, match="most records of a step could not be computed"):
        gradient(worker)
    assert "12 examples of 12 fail and count as none; the first: its gradient has" in caplog.text


def test_the_number_of_records_that_fail_is_a_part_of_the_query():
    """Of the same noise and sum, the difference of two numbers would be bare."""
    account = Open()
    flat = lambda module, batch: module(batch[0]).sum() * 0  # noqa: E731

    def fails(module, batch):
        if torch.equal(batch[0], X[[3]]):
            raise KeyError
        return flat(module, batch)

    for each in (flat, fails, flat):
        worker = guarded(account)
        gradient(replace(worker, loss_at=replace(worker.loss_at, loss=each)))
    assert len(account.charged) == 2


class PanicException(BaseException):
    """As those of libraries in Rust, such as tokenizers."""


class WithoutTextError(Exception):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize(
    "error", [SystemExit(1), PanicException("index"), WithoutTextError(), StopIteration()], ids=repr
)
def test_any_error_of_a_record_counts_as_none(error, caplog):
    """Else it would be sent without noise, before the step is charged."""

    def of(rows):
        if rows == [3]:
            raise error
        return X[rows], Y[rows]

    def failing(module, batch):
        if torch.equal(batch[0], X[[3]]):
            raise error
        return loss(module, batch)

    first, second = guarded(Open(noise=0.0), of=of), guarded(Open(noise=0.0))
    second = replace(second, loss_at=replace(second.loss_at, loss=failing))
    assert torch.equal(gradient(first), gradient(second))
    assert "1 examples of 12 cannot be read" in caplog.text
    assert "1 examples of 12 fail" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, torch.OutOfMemoryError])
def test_too_little_memory_and_the_end_of_the_program_are_no_errors_of_a_record(error):
    def of(rows):
        raise error

    with pytest.raises(error):
        gradient(guarded(of=of))


def test_records_that_fail_keep_nothing_in_memory():
    """Their tracebacks hold all that was computed of them."""
    computed = weakref.WeakSet[nn.Module]()
    most = 0

    def failing(module, batch):
        nonlocal most
        held = nn.Linear(1, 1)  # as an activation
        computed.add(held)
        most = max(most, len(computed))
        raise KeyError

    worker = guarded()
    worker = replace(worker, loss_at=replace(worker.loss_at, loss=failing))
    with pytest.raises(SiteRefusedError):
        gradient(worker)
    assert most <= 2


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


class Looking(nn.Module):
    def forward(self, x):
        assert torch.are_deterministic_algorithms_enabled()
        return x


def test_it_computes_by_deterministic_algorithms():
    worker = guarded()
    worker.module.append(Looking())
    gradient(worker)
    assert not torch.are_deterministic_algorithms_enabled()


class Failing(nn.Module):
    def forward(self, x):
        if x[0, 0] < 0:
            raise IndexError(f"{x} has no place")
        return x


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


def test_a_record_that_fails_counts_as_none_and_the_site_is_told(caplog):
    worker, failed = guarded(Open(noise=0.0)), int((X[:, 0] < 0).sum())
    worker.module.insert(0, Failing())
    assert 0 < failed < 12
    assert gradient(worker).any()
    assert f"{failed} examples of 12 fail and count as none" in caplog.text
    assert "has no place" in caplog.text
    assert len(caplog.records) == 1


def test_a_record_that_cannot_be_read_counts_as_none_and_the_site_is_told(caplog):
    def of(rows):
        if rows == [3]:
            raise OSError("a broken image")
        return X[rows], Y[rows]

    without = guarded(Open(noise=0.0), of=of)
    zero = guarded(Open(noise=0.0), of=lambda rows: (X[rows], Y[rows] * (rows != [3])))
    grads = gradient(without)
    assert "1 examples of 12 cannot be read and count as none" in caplog.text
    assert "a broken image" in caplog.text
    rest = guarded(Open(noise=0.0))
    records = {n: rest.loss_at.examples.of([n]) for n in range(12) if n != 3}
    summed = rest.loss_at._clipped(dict(rest.module.named_parameters()), b"", records, Failures())
    torch.testing.assert_close(
        grads, torch.cat([g.flatten() for g in summed.values()]).float() / 12
    )
    assert not torch.equal(grads, gradient(zero))


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
