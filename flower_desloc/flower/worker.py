"""A client's model, optimizer and data, and what is measured with them."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer

from flower_desloc.core.averaging import Stream, distance
from flower_desloc.core.local_steps import (
    Clipping,
    StepMetrics,
    gradients,
    local_steps,
    seed_states,
)
from flower_desloc.core.lr_schedule import LRSchedule, constant
from flower_desloc.core.noise import noise_totals
from flower_desloc.core.schedule import BUFFERS, PARAMS
from flower_desloc.core.streams import check_finite, put, stream_names, take
from flower_desloc.flower.messages import TOTALS, WindowReply

Config = Mapping[str, str | int | float | bool]
Metrics = dict[str, int | float | list[int] | list[float]]


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A client's model, optimizer and data.

    Only its streams outlive a message, so one worker can serve several clients, if ``loss_at`` and
    ``evaluate`` are the client's own.
    """

    module: nn.Module
    optimizer: Optimizer
    loss_at: Callable[[int], Tensor]
    """The loss of the batch of the step taken after so many completed steps; a pure function."""
    num_examples: int
    """The weight of this client under weighting by examples."""
    lr_schedule: LRSchedule = field(default_factory=constant)
    clipping: Clipping = field(default_factory=Clipping)
    evaluate: Callable[[], Mapping[str, float]] | None = None
    """Totals over the client's held-out data, such as nats and tokens."""
    metrics: Callable[[Mapping[str, float]], Mapping[str, float]] = dict
    """Metrics from totals."""
    about: Mapping[str, str] = field(default_factory=dict)
    """What the server should know of this client, such as its device."""

    def model_streams(self) -> list[str]:
        """Return the streams that a model is made of: params, and buffers if it has any."""
        names = stream_names(self.module, self.optimizer)
        return [name for name in names if name in (PARAMS, BUFFERS)]

    def like(self, names: Iterable[str]) -> dict[str, Stream]:
        """Return tensors of the shapes and types that the named streams have."""
        return dict(take(self.module, self.optimizer, names))

    def put(self, streams: Mapping[str, Stream]) -> None:
        """Write ``streams`` into the module and the optimizer."""
        put(self.module, self.optimizer, streams)

    def take(self, names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
        """Return the named streams as views; read them before the worker is used again."""
        return take(self.module, self.optimizer, names)

    def seed(self, names: list[str], step: int) -> None:
        """Let an optimizer that starts with zeros at a later ``step`` seed the named states."""
        self.module.train()
        seed_states(self.optimizer, names, self.loss_at, step=step, clipping=self.clipping)

    def steps(self, start: int, stop: int, origin: int) -> StepMetrics:
        """Take the local steps ``start + 1 .. stop``; the optimizer counts them from ``origin``."""
        return local_steps(
            self.module,
            self.optimizer,
            self.loss_at,
            start=start,
            stop=stop,
            lr_schedule=self.lr_schedule,
            clipping=self.clipping,
            origin=origin,
        )

    def gradient(self, step: int) -> tuple[dict[str, Tensor], StepMetrics]:
        """Return the gradient of the step taken after ``step`` completed ones."""
        return gradients(self.module, self.optimizer, self.loss_at, step=step)

    def noise(self, step: int) -> Mapping[str, float]:
        """Return the totals of the gradient noise over the next two batches, if they are finite."""
        self.module.train()
        losses = (self.loss_at(each) for each in (step, step + 1))
        params = [p for p in self.module.parameters() if p.requires_grad]
        totals = noise_totals(losses, params)
        return totals if all(map(math.isfinite, totals.values())) else {}


def trained(worker: Worker, steps: StepMetrics, before: Stream, after: Stream) -> Metrics:
    """Return the metrics of local steps that led from the parameters ``before`` to ``after``."""
    return {
        "num-examples": worker.num_examples,
        "train-loss": sum(steps.losses) / len(steps.losses),
        "losses": steps.losses,
        "grad-norms": steps.grad_norms,
        "learning-rates": steps.learning_rates,
        "update-norm": distance(after, before),
        "param-norm": distance(after),
    }


def evaluated(worker: Worker, step: int) -> WindowReply:
    """Evaluate the model as it is after ``step`` steps on the client's held-out data, if any."""
    if worker.evaluate is None:
        return WindowReply(metrics={"num-examples": 0})
    totals = worker.evaluate()
    noise = worker.noise(step)
    return WindowReply(
        metrics={
            "num-examples": worker.num_examples,
            **worker.metrics(totals),
            **{f"{TOTALS}{name}": value for name, value in {**totals, **noise}.items()},
        }
    )


def require_finite(streams: Mapping[str, Stream]) -> None:
    """Raise ``FloatingPointError`` for values that only a diverged training gives."""
    try:
        for name, stream in streams.items():
            check_finite(name, stream)
    except ValueError as error:
        raise FloatingPointError(f"training diverged: {error}; lower optimizer.lr") from error
