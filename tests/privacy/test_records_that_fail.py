"""Records that cannot be computed count as none, and only the site's log says so."""

import errno
import math
import weakref
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import nn

pytest.importorskip("opacus")

from private_workers import Open, X, Y, gradient, guarded, loss

from flower_desloc.core.errors import SiteRefusedError
from flower_desloc.privacy.accounting import Step
from flower_desloc.privacy.failures import Failures, is_of_memory

pytestmark = pytest.mark.usefixtures("unspoiled")


class Failing(nn.Module):
    def forward(self, x):
        if x[0, 0] < 0:
            raise IndexError(f"{x} has no place")
        return x


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


def test_where_all_records_fail_steps_are_refused_and_only_the_site_is_told_why(caplog):
    """An error of a record would tell the server exactly what is in the data."""
    account = Open()
    for _ in range(2):
        worker = fails_for(range(12), guarded(account))
        with pytest.raises(SiteRefusedError, match=r"most records .* see this site's log$") as told:
            worker.steps(0, 12)
        assert not getattr(told.value, "__notes__", ())
    assert 1 < len(account.charged) < 6  # repeated alike
    assert "6 examples of 12 cannot be read and count as none" in caplog.text
    assert "6 examples of 6 fail and count as none" in caplog.text
    guarded(account).steps(0, 12)  # it has left nothing of a record


@pytest.mark.parametrize(
    ("noise", "number", "share", "refused"),
    [
        *((13.9, 64, 0.0, 0), (13.9, 64, 0.3, 0), (13.9, 64, 1.0, 100)),
        *((0.5, 64, 0.5, 0), (0.5, 64, 1.0, 100), (0.5, 1, 0.0, 0), (50.0, 64, 0.5, 0)),
    ],
)
def test_a_run_is_refused_by_the_number_of_records_that_fail_and_noise(
    noise, number, share, refused
):
    """A window has 32 steps. The noise of one may be larger than the number of all records."""
    private_loss = guarded().loss_at
    examples, cost = replace(private_loss.examples, number=number), Step(noise, 1.0)
    found = 0
    for window in range(100):
        private_loss = replace(private_loss, examples=examples)
        with suppress(SiteRefusedError):
            for step in range(32):
                key = f"{window} {step}".encode()
                private_loss._require_computed(round(share * number), key, cost)
            continue
        found += 1
    assert found == refused


@pytest.mark.parametrize(("noise", "number"), [(0.5, 64), (2.0, 64), (0.0, 20)])
def test_one_step_is_refused_where_noise_does_not_hide_that_all_fail(noise, number):
    private_loss = guarded().loss_at
    private_loss = replace(private_loss, examples=replace(private_loss.examples, number=number))
    with pytest.raises(SiteRefusedError, match="most records could not be computed"):
        private_loss._require_computed(number, b"", Step(noise, 1.0))


def test_a_step_that_is_repeated_counts_once_towards_the_failing_ones():
    private_loss = guarded().loss_at
    for _ in range(20):
        private_loss._require_computed(12, b"once", Step(1.0, 1.0))


def test_records_without_a_finite_gradient_have_failed(caplog):
    with pytest.raises(SiteRefusedError, match="most records could not be computed"):
        guarded(of=lambda rows: (X[rows] * math.nan, Y[rows])).steps(0, 12)
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


@pytest.mark.parametrize(
    "of", [lambda m, b: loss(m, b).detach(), lambda m, b: b[0].clone().requires_grad_().sum()]
)
def test_records_whose_loss_depends_on_no_parameter_have_failed(of, caplog):
    """Else all of a run would be bare noise; without privacy the backward pass raises."""
    worker = guarded()
    worker = replace(worker, loss_at=replace(worker.loss_at, loss=of))
    with pytest.raises(SiteRefusedError, match="most records could not be computed"):
        worker.steps(0, 12)
    assert "12 examples of 12 fail" in caplog.text
    assert "its loss depends on no parameter; is it detached?" in caplog.text


def test_each_site_of_a_process_logs_one_traceback(caplog):
    for secret in (bytes(32), bytes(31) + b"1"):
        worker = fails_for([3], guarded(Open(secret=secret)))
        worker.steps(0, 2)
    assert caplog.text.count("Traceback (most recent call last)") == 2


class OwnError(RuntimeError):
    """An error of a task."""


TEXTS = [
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
    "DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes",
    "CUDA error: out of memory",
    "std::bad_alloc",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
]


@pytest.mark.parametrize("text", TEXTS)
def test_an_error_is_of_memory_if_it_is_pytorchs(text):
    """A record's own, which may quote it, would tell that it is there."""
    assert is_of_memory(RuntimeError(text))
    for of_record in (ValueError, KeyError, OSError, OwnError, IndexError):
        assert not is_of_memory(of_record(text))
    panic = RuntimeError(f"PanicException: {text}")
    panic.__cause__ = PanicException(text)
    assert not is_of_memory(panic)
    assert not is_of_memory(RuntimeError("shapes differ"))
    assert is_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not is_of_memory(OSError(errno.ENOENT, text))


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
    gradient(worker)
    assert 1 <= most <= 2


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
