"""A worker whose optimizer sees private gradients only."""

import hmac
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_desloc.core.errors import SiteRefusedError
from flower_desloc.core.streams import digest, trained
from flower_desloc.core.worker import Clipping, Worker
from flower_desloc.privacy import digests
from flower_desloc.privacy.account import Account
from flower_desloc.privacy.accounting import Step
from flower_desloc.privacy.clipping import Loss, clipped_sum, require_independent
from flower_desloc.privacy.noise import uniform, with_noise
from flower_desloc.privacy.repeatable import accelerators, repeatable, seed_all, settings
from flower_desloc.privacy.stand_ins import stand_ins

_LOG = logging.getLogger("flwr")
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

    def __call__(self, step: int) -> Tensor:
        """Charge the account for the step after ``step`` completed ones; return its loss.

        Raises ``BudgetSpentError`` if the budget does not suffice, before noise is drawn.
        """
        params = trained(self.module, self.optimizer)
        cost = self._cost()
        if self.module in _SPOILED:
            raise SiteRefusedError(
                "differential privacy: in this process a step of this model has failed, which may "
                "have left something of an example in it; restart the site's SuperNode, or the run"
            )
        stand_in, probed = self._first_probe(params)  # it also makes what a module makes once
        state = digests.of_module(self.module)
        asked = self._asked(step, cost, state)
        for attempt in count():
            query = self._key(asked, f"attempt {attempt}")
            of_records, total = self._summed(params, query, cost)
            if digests.of_module(self.module) != state or self._probe(params, stand_in) != probed:
                raise self._changing()
            _SPOILED.discard(self.module)
            # Of the sum too: were another one added to the same noise, their difference would be
            # bare. And with the same draws another sum would cost more than a step.
            answer = self._key(query, f"{of_records} {digest(total)}")
            if self.account.charge(query.hex(), answer.hex(), cost):
                break
        return self._noised(params, total, answer, cost)

    def _summed(
        self, params: Mapping[str, Tensor], query: bytes, cost: Step
    ) -> tuple[str, dict[str, Tensor]]:
        """Return a digest of the drawn records, and the sum of their clipped gradients."""
        coins = uniform(self._key(query, "rows"), self.examples.number)
        drawn = np.flatnonzero(coins <= cost.sample_rate).tolist()
        with repeatable(self._accelerators):  # a record may be augmented
            records = self._read(query, drawn)
        found = digests.of_records(records)
        _SPOILED.add(self.module)
        return found, self._clipped(params, self._seeded(query, records))

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

    @cached_property
    def _first(self) -> Any:
        first = self.examples.of([0])  # for its form
        digests.of_records({0: first})  # raises if it is of other things
        return first

    def _read(self, query: bytes, drawn: Sequence[int]) -> dict[int, Any]:
        """Return the drawn records, without those that cannot be read."""
        records: dict[int, Any] = {}
        failed: list[Exception] = []
        for number in self._seeded(query, {n: n for n in drawn}):
            try:
                records[number] = self.examples.of([number])
            except MemoryError:
                raise
            except Exception as error:  # it would tell that the record is there
                failed.append(error)
        if failed:
            _LOG.error(
                "%d examples cannot be read and count as none", len(failed), exc_info=failed[0]
            )
        return records

    def _clipped(
        self, params: Mapping[str, Tensor], records: Iterable[Any], *, skip: bool = True
    ) -> dict[str, Tensor]:
        bound = self.max_grad_norm
        with repeatable(self._accelerators):
            return clipped_sum(
                self.loss, self.module, params, records, max_grad_norm=bound, skip=skip
            )

    def _first_probe(self, params: Mapping[str, Tensor]) -> tuple[Any, str]:
        """Return a made-up record whose loss is finite, and what comes of it.

        Raises ``SiteRefusedError`` if there is none.
        """
        whys = []
        for stand_in in stand_ins(self._first):
            try:
                return stand_in, self._probe(params, stand_in)
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:
                whys.append(f"{type(error).__name__}: {error}")
        raise SiteRefusedError(
            "differential privacy: of two made-up records, whose whole numbers are zero and one, "
            "none has a finite loss, so it cannot be looked at whether the model keeps anything of "
            "a record; let the task's loss be finite for one of them, or the run has diverged",
            "; ".join(whys),
        )

    def _probe(self, params: Mapping[str, Tensor], stand_in: Any) -> str:
        """Return a digest of what comes of a made-up record, which depends on no other.

        Nothing on an accelerator, where sums differ when they are repeated. Raises
        ``ArithmeticError`` for a loss that is not finite.
        """
        made_up = {-1: stand_in}
        with repeatable(self._accelerators), torch.no_grad():
            (record,) = self._seeded(b"", made_up)
            loss = self.loss(self.module, record)
        if not loss.isfinite().all():
            raise ArithmeticError(f"the loss is {float(loss)}")
        grads = self._clipped(params, self._seeded(b"", made_up), skip=False)
        return "" if self._accelerators else digest({**grads, "": loss})

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

    def _asked(self, step: int, cost: Step, state: str) -> bytes:
        """Return a digest of what the gradient depends on, but for the records."""
        about = (
            *(step, cost, self.max_grad_norm, self.examples.batch_size, self.examples.number),
            # With the same noise the gradients by fewer parameters would differ by clipping.
            sorted(trained(self.module, self.optimizer)),
            sorted({str(p.device) for p in self.module.parameters()}),
            settings(),
            os.urandom(32) if self._accelerators else b"",
        )
        return self._key(self.context.encode(), f"{about} {state}")

    def _key(self, key: bytes, use: str) -> bytes:
        return hmac.digest(self.account.secret, len(key).to_bytes(8) + key + use.encode(), "sha256")


def private(worker: Worker, loss: PrivateLoss) -> Worker:
    """Return ``worker`` with private gradients, and without all that it says of its data.

    Its losses are NaN, it evaluates nothing, it counts as one example, and neither the sizes nor
    the version of its data are sent.

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
        info=replace(worker.info, data={}),
    )


def _check_clipping(worker: Worker) -> None:
    told = any(_NOISE_STD in group for group in worker.optimizer.param_groups)
    if told and worker.clipping != Clipping():
        raise SiteRefusedError(
            f"{type(worker.optimizer).__name__} takes the noise off the second moment, and "
            "clipping the private gradient would scale it: set optimizer.clip_norm=null and "
            "optimizer.clip_value=null; privacy.max_grad_norm clips each example's gradient"
        )


_SPOILED: "WeakSet[nn.Module]" = WeakSet()
"""Models of which a step has failed, and that may have kept something of an example."""


class _Gradients(torch.autograd.Function):
    """A loss without a value, whose gradients are given."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *params: Tensor) -> Tensor:
        ctx.grads = grads
        return params[0].new_full((), torch.nan)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:  # noqa: ARG004
        return None, *ctx.grads
