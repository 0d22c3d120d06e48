"""A worker whose optimizer sees private gradients only."""

import hmac
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_desloc.core.errors import SiteRefusedError
from flower_desloc.core.exits import exits_as_errors
from flower_desloc.core.streams import digest, trained
from flower_desloc.core.worker import Clipping, Worker
from flower_desloc.privacy import digests
from flower_desloc.privacy.account import Account
from flower_desloc.privacy.accounting import Step
from flower_desloc.privacy.clipping import (
    Loss,
    clipped_sum,
    norm_of,
    require_independent,
    zeros,
)
from flower_desloc.privacy.failures import Failures, is_of_memory
from flower_desloc.privacy.noise import uniform, with_noise
from flower_desloc.privacy.repeatable import accelerators, repeatable, seed_all, settings

_LOG = logging.getLogger("flwr")
_ROUNDING = 1e-2
"""A relative difference that rounding does not reach."""
_WITNESSES = 4
"""Records that are tried for one that has a gradient."""
_MOST_ANSWERS = 8
"""Different sums of one step: they differ only if data change, or fail at times."""
_OF_NOISE, _OF_DRAWS = 6, 2
"""Deviations by which noise, practically never, and draws may raise the number of failing records.

Of draws at a half: much fewer failing records stay far below it."""
_NOISE_STD = "noise_std"
"""Setting of a parameter group: the standard deviation of the gradient's noise."""


@dataclass(frozen=True, kw_only=True)
class Examples:
    """The training data of a client, as records that are drawn and protected one by one."""

    number: int
    """How many there are. It counts as public: a neighbour has an empty record, without a
    gradient, in place of one."""
    of: Callable[[Sequence[int]], Any]
    """Returns the records of these numbers as a batch: a tensor, number or text, or a list, tuple,
    dictionary or dataclass of them. It is called with one number at a time."""
    batch_size: int
    """Records in a batch on average: each is in it with probability ``batch_size / number``."""

    def __post_init__(self) -> None:
        if self.number < 1:
            raise SiteRefusedError("differential privacy: this site has no training examples")

    @property
    def sample_rate(self) -> float:
        """The probability of a record to be in a batch."""
        return min(1.0, self.batch_size / self.number)


@dataclass(frozen=True, kw_only=True)
class PrivateLoss:
    """Takes the place of ``Worker.loss_at``: its ``backward()`` leaves a private gradient.

    Each record is in the batch by a coin of its own. The gradient is the ``clipped_sum`` of the
    batch plus Gaussian noise, divided by the average size of a batch. The value of the loss, which
    is not private, is NaN.

    Coins are functions of the account's secret and of all that the gradient depends on but for the
    records: the parameters, the step. Noise is one of the drawn records and their sum as well. So a
    query that is repeated has the same answer, bit for bit, and is charged once. Where its sum has
    changed, since a record failed then or now, coins and noise are drawn anew and charged. Sums on
    a GPU may differ when they are repeated, so there every query is another.
    """

    module: nn.Module
    optimizer: Optimizer
    loss: Loss
    examples: Examples
    account: Account
    max_grad_norm: float
    """Bound C of the norm of a record's gradient."""
    context: str = ""
    """What else the gradient depends on, such as the run's name and the model's settings."""
    _noisy_failures: dict[bytes, float] = field(default_factory=dict, init=False, repr=False)
    """Of each answer, how many records failed, with noise."""

    def __call__(self, step: int) -> Tensor:
        """Charge the account for the step after ``step`` completed ones; return its loss.

        Raises ``BudgetSpentError`` if the budget does not suffice, before a record is read, and
        ``SiteRefusedError`` where the loss of a record is seen to depend on others, or most records
        of this object's steps so far fail.
        """
        params = trained(self.module, self.optimizer)
        cost = self._cost()
        weights = digests.of_weights(self.module)
        asked = self._asked(step, cost, weights)
        for attempt in range(_MOST_ANSWERS):
            query = self._key(asked, f"attempt {attempt}")
            self.account.require_left(query.hex(), cost)
            drawn = self._drawn(query, cost)
            with _unless_spoiled(self.account.secret):
                of_records, total, failed = self._summed(params, query, drawn, weights)
            # Of the sum too: were another one added to the same noise, their difference would be
            # bare. And with the same draws another sum would cost more than a step.
            answer = self._key(query, f"{of_records} {digest(total)} {failed}")
            if self.account.charge(query.hex(), answer.hex(), cost):
                self._require_computed(failed, answer, cost)
                return self._noised(params, total, answer, cost)
        raise SiteRefusedError(
            f"differential privacy: this step was repeated {_MOST_ANSWERS} times, and each time "
            "the data or what fails of them was other; see the site's log, and start another run"
        )

    def _drawn(self, query: bytes, cost: Step) -> list[int]:
        coins = uniform(self._key(query, "rows"), self.examples.number)
        drawn: list[int] = np.flatnonzero(coins <= cost.sample_rate).tolist()
        return drawn

    def _summed(
        self, params: Mapping[str, Tensor], query: bytes, drawn: Sequence[int], weights: str
    ) -> tuple[str, dict[str, Tensor], int]:
        """Return a digest of the drawn records, their ``clipped_sum``, and how many failed.

        One of them, the witness, is computed before and after all: if the others had changed
        anything that a loss depends on, its gradient would most probably be another.
        """
        records = self._read(query, drawn)
        found = digests.of_records(records)
        if not records:
            return found, zeros(params), len(drawn)
        numbers = sorted(records, key=lambda n: self._key(query, f"witness {n}"))
        for witness in numbers[:_WITNESSES]:
            before = digests.of_records({witness: records[witness]})
            once = self._clipped(params, query, {witness: records[witness]}, Failures())
            records |= self._again(query, witness, before)  # a loss may have changed it
            if any(grad.any() for grad in once.values()):
                break
        # What a module makes when it is called first is no change.
        held, kept = digests.of_attributes(self.module), self._kept(once)
        del once
        failed = Failures()
        total = self._clipped(params, query, records, failed)
        again = self._clipped(params, query, self._again(query, witness, before), Failures())
        is_same = self._is_same(kept, again) and digests.of_weights(self.module) == weights
        if not is_same or digests.of_attributes(self.module) != held:
            raise self._changing()
        self._log(failed, f"of {len(records)} fail")
        return found, total, len(drawn) - len(records) + failed.number

    def _require_computed(self, failed: int, key: bytes, cost: Step) -> None:
        """Raise ``SiteRefusedError`` if most records have failed: the gradient would be bare noise.

        Their number gets noise, and costs nothing: times the bound C, it is one more coordinate of
        the sum. A record that fails has C there and a gradient of 0, any other and an empty one 0.
        So one in place of an empty one still changes all by at most C.

        The noise of one step may hide all of them, so the numbers of a window's steps are added.
        """
        noisy = torch.tensor(failed, dtype=torch.float64)
        if cost.noise_multiplier:  # no parameter has a name with an empty part
            noisy = with_noise(noisy, self._key(key, ".failed"), cost.noise_multiplier)
        self._noisy_failures[key] = float(noisy)
        steps, half = len(self._noisy_failures), cost.sample_rate * self.examples.number / 2
        by_chance = _OF_NOISE * cost.noise_multiplier + _OF_DRAWS * math.sqrt(half)
        most = steps * half + math.sqrt(steps) * by_chance
        if sum(self._noisy_failures.values()) > most:
            raise SiteRefusedError(
                "differential privacy: most records could not be computed; see this site's log"
            )

    def _noised(
        self, params: Mapping[str, Tensor], total: dict[str, Tensor], key: bytes, cost: Step
    ) -> Tensor:
        deviation = cost.noise_multiplier * self.max_grad_norm  # of the sum's noise
        for group in self.optimizer.param_groups:
            if _NOISE_STD in group:
                group[_NOISE_STD] = deviation / self.examples.batch_size
        grads: list[Tensor] = []
        for name, param in params.items():
            summed = total.pop(name)  # of float64 until the noise is in it
            if cost.noise_multiplier:
                summed = with_noise(summed, self._key(key, name), deviation)
            grads.append(summed.div_(self.examples.batch_size).to(param.dtype))
        loss: Tensor = _Gradients.apply(grads, *params.values())  # type: ignore[no-untyped-call]  # PyTorch's
        return loss

    @cached_property
    def _accelerators(self) -> list[torch.device]:
        return accelerators(self.module)

    def _read(self, query: bytes, drawn: Sequence[int]) -> dict[int, Any]:
        """Return the drawn records, without those that cannot be read."""
        records: dict[int, Any] = {}
        failed = Failures()
        with repeatable(self._accelerators):  # a record may be augmented
            for number in self._seeded(query, {n: n for n in drawn}):
                try:
                    with exits_as_errors():
                        records[number] = self.examples.of([number])
                except Exception as error:
                    if is_of_memory(error):
                        raise
                    failed.add(error)  # it would tell that the record is there
        self._log(failed, f"of {len(drawn)} cannot be read")
        return records

    def _log(self, failed: Failures, how: str) -> None:
        if failed.number:
            traceback = "" if self.account.secret in _traced else f"\n{failed.traceback}"
            _LOG.error(
                f"{failed.number} examples {how} and count as none; the first: {failed.text}"
                f"{traceback}"
            )
            _traced.add(self.account.secret)

    def _again(self, query: bytes, number: int, before: str) -> dict[int, Any]:
        """Return a record anew; raises ``SiteRefusedError`` if it is another than before."""
        records = self._read(query, [number])
        if digests.of_records(records) != before:
            raise SiteRefusedError(
                "differential privacy: the task's data has another record under the same number "
                "than before: its examples must be copies, so that the loss cannot change the "
                "data, and random numbers be drawn from torch, NumPy or Python, which are seeded "
                "for each record, not from generators of its own"
            )
        return records

    def _clipped(
        self,
        params: Mapping[str, Tensor],
        query: bytes,
        records: Mapping[int, Any],
        failed: Failures,
    ) -> dict[str, Tensor]:
        with repeatable(self._accelerators):
            return clipped_sum(
                *(self.loss, self.module, params, self._watched(query, records)),
                max_grad_norm=self.max_grad_norm,
                failed=failed,
            )

    def _watched(self, query: bytes, records: Mapping[int, Any]) -> Iterator[Any]:
        """Yield the records; raises ``SiteRefusedError`` if one has changed the module."""
        marks, values = None, None
        for record in self._seeded(query, records):
            yield record
            before, marks = marks, _marks(self.module)
            if marks != before:  # some modules make a buffer anew that is as before
                last, values = values, digests.of_buffers(self.module)
                if last not in (None, values):  # the first may make what is made once
                    raise self._changing()

    def _kept(self, grads: Mapping[str, Tensor]) -> str | dict[str, Tensor]:
        """Return of gradients what ``_is_same`` needs."""
        if self._accelerators:
            return {key: grad.float() for key, grad in grads.items()}
        return digest(dict(grads))

    def _is_same(self, once: str | dict[str, Tensor], again: Mapping[str, Tensor]) -> bool:
        if isinstance(once, str):
            return once == self._kept(again)
        # On an accelerator sums differ by rounding when they are repeated.
        difference = norm_of(once[key] - grad.float() for key, grad in again.items())
        return difference <= _ROUNDING * norm_of(once.values())

    def _changing(self) -> SiteRefusedError:
        """Return the error for a module whose loss depends on those before."""
        return SiteRefusedError(
            f"differential privacy: {type(self.module).__name__} changes while it computes a loss: "
            "it keeps something of an example, or counts, or draws from a generator of its own. "
            "The gradients of others would depend on that, and no clipping bounds it"
        )

    def _seeded(self, query: bytes, records: Mapping[int, Any]) -> Iterator[Any]:
        """Yield the records, each with random numbers that do not depend on the others."""
        for number, record in records.items():
            seed_all(self._key(query, f"random {number}"), self._accelerators)
            yield record

    def _cost(self) -> Step:
        rate = self.examples.sample_rate
        return Step(self.account.noise_multiplier(rate), rate)

    def _asked(self, step: int, cost: Step, weights: str) -> bytes:
        """Return a digest of what the server chooses of a gradient, alike in each process."""
        about = (
            *(step, cost, self.max_grad_norm, self.examples.batch_size, self.examples.number),
            # With the same noise the gradients by fewer parameters would differ by clipping.
            sorted(trained(self.module, self.optimizer)),
            sorted({str(p.device) for p in self.module.parameters()}),
            settings(),
            os.urandom(32) if self._accelerators else b"",
        )
        return self._key(self.context.encode(), f"{about} {weights}")

    def _key(self, key: bytes, use: str) -> bytes:
        return hmac.digest(self.account.secret, len(key).to_bytes(8) + key + use.encode(), "sha256")


def private(worker: Worker, loss: PrivateLoss) -> Worker:
    """Return ``worker`` with private gradients, and without all that it says of its data.

    Its losses are NaN, it evaluates nothing, it counts as one example, and neither the sizes nor
    the version of its data are sent, nor the free memory, which depends on them.

    Raises ``SiteRefusedError`` naming a module that has no gradients of single examples, and for an
    optimizer that counts on noise which clipping would change.
    """
    require_independent(worker.module)
    _check_clipping(worker)
    return replace(
        worker,
        loss_at=loss,
        num_examples=1,
        evaluate=None,
        data_version=None,
        info=replace(worker.info, data={}, memory_free=None, micro_batch=None),
    )


def _check_clipping(worker: Worker) -> None:
    told = any(_NOISE_STD in group for group in worker.optimizer.param_groups)
    if told and worker.clipping != Clipping():
        raise SiteRefusedError(
            f"{type(worker.optimizer).__name__} takes the noise off the second moment, and "
            "clipping the private gradient would scale it: set optimizer.clip_norm=null and "
            "optimizer.clip_value=null; privacy.max_grad_norm clips each example's gradient"
        )


def _marks(module: nn.Module) -> list[tuple[int, int]]:
    """Return what changes with the buffers, but not by ``.data``."""
    return [(id(t), t._version) for t in module.buffers()]


_alone = Lock()
"""Held by the step that uses the process' random generators."""
_traced: set[bytes] = set()
"""Secrets of the sites of which a failing record's traceback is in the log."""
_spoiled: set[bytes] = set()
"""Secrets of the sites of which a step has failed here: it may have kept something of a record."""


@contextmanager
def _unless_spoiled(site: bytes) -> Iterator[None]:
    with _alone:
        if site in _spoiled:
            raise SiteRefusedError(
                "differential privacy: in this process a step has failed, which may have left "
                "something of an example in the model or the task; restart the process: the "
                "site's SuperNode, the simulation or the notebook's kernel"
            )
        try:
            yield
        except BaseException:
            _spoiled.add(site)
            raise


class _Gradients(torch.autograd.Function):
    """A loss without a value, whose gradients are given."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *params: Tensor) -> Tensor:
        ctx.grads = grads
        return params[0].new_full((), torch.nan)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:  # noqa: ARG004
        return None, *ctx.grads
