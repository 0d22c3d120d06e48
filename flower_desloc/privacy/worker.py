"""A worker whose optimizer sees private gradients only."""

import hmac
import logging
import os
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache, cached_property
from itertools import chain
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_desloc.core.errors import SiteRefusedError
from flower_desloc.core.streams import digest, trained
from flower_desloc.core.worker import Clipping, Worker
from flower_desloc.privacy.account import Account
from flower_desloc.privacy.accounting import Step
from flower_desloc.privacy.clipping import Loss, clipped_sum, require_independent
from flower_desloc.privacy.noise import uniform, with_noise

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

    Coins and noise are functions of the account's secret and of all that the gradient depends on:
    the parameters, the step, the drawn records; noise is one of the sum as well. The same query so
    has the same answer, bit for bit, and is charged once; any other has independent noise and is
    charged. Sums on a GPU may differ when they are repeated, so there every query is another.
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
                "have left something of an example in it; restart the site's SuperNode"
            )
        probe = self._probe(params)  # the first also makes what a module makes once
        state = _state(self.module)
        query = self._query(step, cost, state)
        coins = uniform(self._key(query, "rows"), self.examples.number)
        drawn = np.flatnonzero(coins <= cost.sample_rate).tolist()
        with _exactly(_accelerators(self.module)):  # a record may be augmented
            records = {n: self.examples.of([n]) for n in self._seeded(query, {n: n for n in drawn})}
        of_records = _digest(records)
        _SPOILED.add(self.module)
        total = self._clipped(params, self._seeded(query, records), skip=probe.is_fit)
        if _state(self.module) != state or self._probe(params) != probe:
            raise SiteRefusedError(
                f"differential privacy: {type(self.module).__name__} keeps what it computes of an "
                "example, on which the gradients of others would depend; no clipping bounds that"
            )
        _SPOILED.discard(self.module)
        # Of the sum too: were another one added to the same noise, their difference would be bare.
        answer = self._key(query, f"{of_records} {digest(total)}")
        self.account.charge(answer.hex(), cost)
        deviation = cost.noise_multiplier * self.max_grad_norm  # of the sum's noise
        for group in self.optimizer.param_groups:
            if _NOISE_STD in group:
                group[_NOISE_STD] = deviation / self.examples.batch_size
        grads: list[Tensor] = []
        for key, param in params.items():
            summed = total.pop(key)  # of float64 until the noise is in it
            if cost.noise_multiplier:
                summed = with_noise(summed, self._key(answer, key), deviation)
            grads.append(summed.div_(self.examples.batch_size).to(param.dtype))
        loss: Tensor = _Gradients.apply(grads, *params.values())  # type: ignore[no-untyped-call]  # PyTorch's
        return loss

    @cached_property
    def _zeros(self) -> Any:
        return _zeroed(self.examples.of([0]))

    def _clipped(
        self, params: Mapping[str, Tensor], records: Iterable[Any], *, skip: bool
    ) -> dict[str, Tensor]:
        bound = self.max_grad_norm
        with _exactly(_accelerators(self.module)):
            return clipped_sum(
                self.loss, self.module, params, records, max_grad_norm=bound, skip=skip
            )

    def _probe(self, params: Mapping[str, Tensor]) -> "_Probe":
        """Return what comes of a record of zeros, which must not depend on the drawn ones.

        Only whether it is fit on an accelerator, where sums differ when they are repeated.
        """
        zeros = {-1: self._zeros}
        try:
            with _exactly(_accelerators(self.module)), torch.no_grad():
                (record,) = self._seeded(b"", zeros)
                loss = self.loss(self.module, record)
            grads = self._clipped(params, self._seeded(b"", zeros), skip=False)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            _warn(f"fails: {type(error).__name__}: {error}")
            return _Probe(False, type(error).__name__)
        if not loss.isfinite().all():
            _warn(f"has the loss {float(loss)}")
        return _Probe(True, "" if _accelerators(self.module) else digest({**grads, "": loss}))

    def _seeded(self, query: bytes, records: Mapping[int, Any]) -> Iterator[Any]:
        """Yield the records, each with random numbers that do not depend on the others."""
        # Without an accelerator torch.manual_seed keeps its caller's stack, each time.
        accelerated = bool(_accelerators(self.module))
        seed = torch.manual_seed if accelerated else torch.default_generator.manual_seed
        for number, record in records.items():
            drawn = self._key(query, f"random {number}")
            seed(int.from_bytes(drawn[:7]))
            random.seed(drawn)
            np.random.seed(int.from_bytes(drawn[:4]))
            yield record

    def _cost(self) -> Step:
        rate = self.examples.sample_rate
        return Step(self.account.noise_multiplier(rate), rate)

    def _query(self, step: int, cost: Step, state: str) -> bytes:
        """Return a digest of what the gradient depends on, but for the records."""
        devices = sorted({str(p.device) for p in self.module.parameters()})
        about = (
            *(
                step,
                cost,
                self.max_grad_norm,
                self.examples.batch_size,
                # With the same noise the gradients by fewer parameters would differ by clipping.
                sorted(trained(self.module, self.optimizer)),
            ),
            *(self.examples.number, torch.__version__, torch.get_num_threads(), devices),
            *(torch.get_default_dtype(), _precision()),
            *(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
            torch.backends.mkldnn.enabled,
            os.urandom(32) if _accelerators(self.module) else b"",
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


def _state(module: nn.Module) -> str:
    """Return a digest of what a loss depends on: tensors, and numbers and texts in attributes.

    Raises ``SiteRefusedError`` for a tensor that cannot be compared.
    """

    def held() -> Iterator[tuple[str, Any]]:
        for name, part in module.named_modules():
            own = {key: value for key, value in vars(part).items() if not _is_torchs(key)}
            yield from _inside(repr(name), own, set())

    try:
        return _digest_of(held())
    except RuntimeError as error:  # PyTorch's, for a layout or device that has no bytes to read
        raise SiteRefusedError(
            f"differential privacy: {type(module).__name__} has a tensor that cannot be compared, "
            "such as a sparse one"
        ) from error


def _is_torchs(key: str) -> bool:
    return key == "_modules" or key.endswith(
        ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
    )


def _inside(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, numbers and texts that ``value`` holds, by name; of other things, none."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, np.ndarray | np.generic):
        yield name, (str(value.dtype), value.shape, value.tobytes())
    elif isinstance(value, (*_PLAIN, Enum, torch.dtype, torch.device)):
        yield name, value
    elif isinstance(value, set | frozenset):
        yield name, sorted(map(repr, value))
    elif id(value) not in seen:
        seen.add(id(value))
        held = _held(value)
        if held is not None:
            yield name, (type(value).__qualname__, len(held))
            for key, each in held.items():
                yield from _inside(f"{name}.{key!r}", each, seen)


def _held(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list | tuple | deque):
        return dict(enumerate(value))
    if isinstance(value, SimpleNamespace) or (is_dataclass(value) and not isinstance(value, type)):
        return vars(value) if hasattr(value, "__dict__") else {}
    return None


def _digest(records: Mapping[int, Any]) -> str:
    return _digest_of(chain.from_iterable(_leaves(str(n), each) for n, each in records.items()))


def _digest_of(named: Iterable[tuple[str, Any]]) -> str:
    """Return a text that differs for other tensors, numbers or texts, or other names of them."""
    tensors: dict[str, Tensor] = {}
    others = []
    for name, value in named:
        if isinstance(value, Tensor):
            tensors[name] = value
        else:
            others.append((name, value))
    return f"{others} {digest(tensors)}"


_PLAIN = (bool, int, float, str, bytes, type(None))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a record consists of, by name: tensors, numbers, texts, and what holds them."""
    is_tensor = isinstance(value, Tensor) and value.layout is torch.strided
    if type(value) in _PLAIN or (is_tensor and not value.is_quantized):
        yield name, value
        return
    inside: Mapping[Any, Any]
    if isinstance(value, Mapping):
        inside = value
    elif isinstance(value, tuple | list):
        inside = dict(enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        inside = {field.name: getattr(value, field.name) for field in fields(value)}
    else:
        raise SiteRefusedError(
            "differential privacy needs examples of tensors, numbers and texts, or lists, tuples, "
            f"dictionaries and dataclasses of them; got a {type(value).__name__}"
        )
    yield name, (type(value).__qualname__, [repr(key) for key in inside])
    for key, each in inside.items():
        yield from _leaves(f"{name}.{key!r}", each)


def _zeroed(value: Any) -> Any:
    """Return a record of the same form, all of whose tensors are zero."""
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    if isinstance(value, MutableMapping):
        zeroed = copy(value)
        zeroed.update({key: _zeroed(each) for key, each in value.items()})
        return zeroed
    if isinstance(value, tuple | list):
        inside = [_zeroed(each) for each in value]
        is_named = hasattr(value, "_fields")
        return type(value)(*inside) if is_named else type(value)(inside)
    if is_dataclass(value) and not isinstance(value, type):
        held = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        return replace(value, **{name: _zeroed(each) for name, each in held.items()})
    return value


def _accelerators(module: nn.Module) -> list[torch.device]:
    return sorted({p.device for p in module.parameters() if p.device.type != "cpu"}, key=str)


@contextmanager
def _exactly(accelerators: Sequence[torch.device]) -> Iterator[None]:
    """Compute the same bits each time on a CPU, and give random generators back their states."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    was_exact = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    kind = accelerators[0].type if accelerators else "cuda"
    with torch.random.fork_rng(devices=accelerators, device_type=kind):
        try:
            if not accelerators:
                torch.use_deterministic_algorithms(True)
            yield
        finally:
            torch.use_deterministic_algorithms(was_exact, warn_only=warned)
            random.setstate(of_python)
            np.random.set_state(of_numpy)


@cache
def _warn(what: str) -> None:
    """Say once what a probe cannot show."""
    _LOG.warning(
        "differential privacy: a record of zeros %s, so it cannot be looked at whether the model "
        "keeps what it computes of a record; use one that does not",
        what,
    )


def _precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by PyTorch's newer settings, of which this is one
        return str(torch.backends.fp32_precision)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Probe:
    is_fit: bool
    """Whether its gradient could be computed."""
    found: str


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
