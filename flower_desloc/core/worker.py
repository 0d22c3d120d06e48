"""A worker: its model, optimizer and data, and the local steps it takes between two sync events."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from flower_desloc.core.client_info import ClientInfo
from flower_desloc.core.lr_schedule import LRSchedule, constant
from flower_desloc.core.schedule import BUFFERS, PARAMS
from flower_desloc.core.states import seed_states
from flower_desloc.core.streams import (
    prime,
    put,
    set_step,
    sparse_gradient,
    stream_names,
    take,
    trained,
    trained_by,
)
from flower_desloc.core.types import Stream


@dataclass(frozen=True)
class Clipping:
    """Gradient clipping: to a global ``norm`` rho, or each coordinate to +-``value``.

    The paper's experiments clip the norm (rho = 1); its listings clip coordinates.
    """

    norm: float | None = None
    value: float | None = None
    whole: Callable[[Tensor], Tensor] | None = None
    """For a client of several processes: the norm of all gradients from that of this process's."""


@dataclass(frozen=True)
class StepMetrics:
    """Measurements of one window's local steps, one number per step.

    ``grad_norms`` are before clipping, ``learning_rates`` of the first parameter group.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)

    def __add__(self, later: "StepMetrics") -> "StepMetrics":
        return StepMetrics(
            self.losses + later.losses,
            self.grad_norms + later.grad_norms,
            self.learning_rates + later.learning_rates,
        )


class LocalSteps:
    """The loop over the local steps ``start + 1 .. stop`` of the federation.

    Iterating yields the number of completed steps, from ``start``. The body of the loop computes
    the gradients of the next batch and calls ``optimizer.step()``; it may ``record`` what it
    measures. Around the body the optimizer has the federation's step count, also for parameters
    without a gradient, and gradients are None at the start of each step.

    Parameters
    ----------
    module : nn.Module
        What is trained.
    optimizer : Optimizer
        Its optimizer, primed.
    start, stop : int
        Completed steps before the first and after the last.
    origin : int (default: 0)
        The step at which the optimizer's states were last reset; it counts from there.

    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, start: int, stop: int, origin: int = 0
    ) -> None:
        self._module, self._optimizer = module, optimizer
        self._start, self._stop, self._origin = start, stop, origin
        self._losses: list[Tensor | float] = []
        self._grad_norms: list[Tensor | float] = []
        self._rates: list[float] = []
        self.rate: float | None = None
        """The learning rate of a step whose body changes it after ``optimizer.step()``."""

    def __iter__(self) -> Iterator[int]:
        set_step(self._optimizer, self._start - self._origin)
        self._module.train()
        self._module.zero_grad(set_to_none=True)  # of parameters that are not trained too
        params, groups = trained_by(self._optimizer), self._optimizer.param_groups
        for step in range(self._start, self._stop):
            for p in params:
                p.grad = None  # as optimizer.zero_grad(), whose hooks take 10 % of a small step
            self.rate = None
            yield step
            self._rates.append(float(groups[0]["lr"]) if self.rate is None else self.rate)
            if any(p.grad is None for p in params):  # the optimizer has not counted their step
                set_step(self._optimizer, step + 1 - self._origin)
        self._module.zero_grad(set_to_none=True)

    def record(self, loss: Tensor | float, grad_norm: Tensor | float | None = None) -> None:
        """Keep the loss of the step, and the norm of its gradient before clipping."""
        self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
        if grad_norm is not None:
            self._grad_norms.append(grad_norm)

    def metrics(self) -> StepMetrics:
        """Return what was measured; reading it waits for the device."""
        return StepMetrics(_numbers(self._losses), _numbers(self._grad_norms), self._rates)


def _numbers(values: Sequence[Tensor | float]) -> list[float]:
    """Return numbers, with one transfer from the device where all are tensors."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if tensors and len(tensors) == len(values):
        numbers: list[float] = torch.stack(tensors).tolist()
        return numbers
    return [float(value) for value in values]


def own_loop(step: int) -> Tensor:
    """Take the place of ``Worker.loss_at`` where a client trains in a loop of its own."""
    raise ValueError(
        f"the loss of step {step} is needed, but the Worker has no loss_at: its client trains in "
        "a loop of its own"
    )


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A client's model, optimizer and data.

    Only its streams outlive a message, so one worker can serve several clients, if ``loss_at`` and
    ``evaluate`` are the client's own.
    """

    module: nn.Module
    """On the device where it computes."""
    optimizer: Optimizer
    """Of the module's parameters; the client writes the federation's states into it. It neither
    trains nor clips parameters that it does not hold."""
    loss_at: Callable[[int], Tensor] = own_loop
    """The loss of the batch after so many completed steps, from 0; a pure function of the step, so
    that a window can be repeated. Clients with a training loop of their own need none."""
    num_examples: int
    """The weight of this client's evaluation, and of its streams under weighting by examples."""
    lr_schedule: LRSchedule = field(default_factory=constant)
    """Factor of each parameter group's own learning rate."""
    clipping: Clipping = field(default_factory=Clipping)
    """Of the gradients, before each step."""
    evaluate: Callable[[], Mapping[str, float]] | None = None
    """Metrics of the module on the client's held-out data, which the server averages by
    ``num_examples``; or with ``metrics`` totals, such as nats and tokens, which it adds."""
    metrics: Callable[[Mapping[str, float]], Mapping[str, float]] = dict
    """Metrics from totals that are at least 0, such as nats per token; ``DesLoc`` needs the same
    function."""
    info: ClientInfo = field(default_factory=ClientInfo)
    """What else the server should know of this client, such as its device."""
    data_version: Callable[[], str] | None = None
    """A short text that changes when the client's data does; the server warns of a change."""

    @property
    def rests(self) -> bool:
        """Whether its tensors change in its own calls only.

        A loop of the user's own may change the module at any time, and other processes what they
        share.
        """
        return self.loss_at is not own_loop and type(self).take is Worker.take

    def steps(self, start: int, stop: int, origin: int = 0) -> StepMetrics:
        """Take the local steps ``start + 1 .. stop`` of the federation.

        ``origin`` is the step at which the optimizer's states were last reset; it counts from
        there.
        """
        groups = self.optimizer.param_groups
        # The last bits of a norm depend on the order: that of clip_grad_norm_(module.parameters()).
        params = trained(self.module, self.optimizer)
        tensors = list(params.values())
        for group in groups:
            group.setdefault("initial_lr", group["lr"])
        steps = LocalSteps(self.module, self.optimizer, start, stop, origin)
        for step in steps:
            loss = self.loss_at(step)
            loss.backward()
            require_dense(params)
            steps.record(loss, clip(tensors, self.clipping))
            factor = self.lr_schedule(step)
            for group in groups:
                group["lr"] = group["initial_lr"] * factor
            self.optimizer.step()
        return steps.metrics()

    def gradient(self, step: int) -> tuple[dict[str, Tensor], StepMetrics]:
        """Return the gradient after ``step`` completed steps, by parameter name.

        It is not clipped and no step is taken: the server does both. The gradient of a parameter
        that the loss does not depend on is zero.
        """
        self.module.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss_at(step)
        loss.backward()
        params = trained(self.module, self.optimizer)
        require_dense(params)
        grads = {
            key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in params.items()
        }
        self.optimizer.zero_grad(set_to_none=True)
        norm = get_total_norm(grads.values())
        return grads, StepMetrics([float(loss.detach())], [float(norm)], [])

    def seed(self, names: Collection[str], step: int) -> None:
        """Let an optimizer that starts with zeros at a later ``step`` seed the named states.

        This costs the gradient of one batch, which is then used again for the step itself.
        """
        self.module.train()
        self.loss_at(step).backward()
        params = trained(self.module, self.optimizer)
        require_dense(params)
        clip(list(params.values()), self.clipping)
        seed_states(self.optimizer, names)
        self.optimizer.zero_grad(set_to_none=True)

    def stream_names(self) -> tuple[str, ...]:
        """Return the names of its streams, after priming the optimizer if it was not."""
        if not self.optimizer.state:
            prime(self.optimizer)
        return stream_names(self.module, self.optimizer)

    def model_streams(self) -> list[str]:
        """Return the streams that a model is made of: params, and buffers if it has any."""
        return [name for name in self.stream_names() if name in (PARAMS, BUFFERS)]

    def templates(self, names: Iterable[str]) -> dict[str, Stream]:
        """Return tensors of the shapes and types that the named streams have."""
        return dict(take(self.module, self.optimizer, names))

    def put(self, streams: Mapping[str, Stream]) -> None:
        """Write ``streams`` into the module and the optimizer."""
        put(self.module, self.optimizer, streams)

    def take(self, names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
        """Return the named streams as views; read them before the worker is used again."""
        return take(self.module, self.optimizer, names)


def require_dense(params: Mapping[str, Tensor]) -> None:
    """Raise for the first parameter, by name, whose gradient is sparse (``sparse_gradient``)."""
    for key, p in params.items():
        if p.grad is not None and p.grad.layout != torch.strided:
            raise sparse_gradient(key)


def clip(params: Sequence[Tensor], clipping: Clipping) -> Tensor:
    """Clip the gradients of ``params`` in place; return their norm before that."""
    grads = [p.grad for p in params if p.grad is not None]
    norm = get_total_norm(grads)
    if clipping.whole is not None:
        norm = clipping.whole(norm)
    if clipping.norm is not None:
        clip_grads_with_norm_(params, clipping.norm, norm)
    if clipping.value is not None:
        torch._foreach_clamp_min_(grads, -clipping.value)
        torch._foreach_clamp_max_(grads, clipping.value)
    return norm
