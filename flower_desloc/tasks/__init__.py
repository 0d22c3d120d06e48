"""What is learned: the seam between the algorithm and a model with its data.

A task builds the model, gives every client its batches and measures losses. It knows nothing of
clocks, streams or Flower.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from flower_desloc.config import Config, ConfigError
from flower_desloc.config.imports import imported, is_path

Batch = Any
"""What a task's own ``loss`` takes; on the CPU until the task moves it."""

Sums = Mapping[str, float]
"""Totals of an evaluation, such as nats and tokens; those of several batches, domains or clients
add up."""


@dataclass(frozen=True)
class Site:
    """The part of the data a client may see, as its node says."""

    partition: int
    num_partitions: int
    data_path: Path | None = None
    """The site's private data; it takes the place of a partition of the common source."""


class ClientData(Protocol):
    """One client's shard."""

    num_examples: int
    """Size of the training part, the weight under ``federation.weighting=examples``."""

    description: Mapping[str, int]
    """What the shard holds: domain or label -> size."""

    def train_batch(self, step: int) -> Batch:
        """Return the batch of the step taken after ``step`` completed steps.

        A pure function of (seed, client, step).
        """

    def heldout(self) -> Iterable[Batch]:
        """Return the batches of the client's held-out part, always the same."""


class Task(Protocol):
    """A model, its data and its loss."""

    def build_model(self) -> nn.Module:
        """Return a new model on the CPU; its weights are a function of the seed.

        What needs no gradient is neither trained nor sent: every site has it from here, the same.
        """

    def client_data(self, site: Site) -> ClientData:
        """Return the shard of one client.

        Raises ``ValueError``, naming the setting to change, when the shard would be empty.
        """

    def heldout(self) -> Mapping[str, Iterable[Batch]]:
        """Return the held-out batches of every domain, for central evaluation."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of ``batch``, a scalar to differentiate."""

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> Sums:
        """Return the totals over ``batches``; the model is in evaluation mode."""

    def metrics(self, sums: Sums) -> Mapping[str, float]:
        """Return the metrics of added totals: at least ``loss``."""

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the weights (safetensors) and the model's config into ``folder``."""


def build_task(config: Config) -> Task:
    """Return the task that ``config.task`` names.

    Raises :class:`ConfigError` when it cannot be imported or is not a task.
    """
    task = find_task(config)(config)
    methods = (name for name in vars(Task) if not name.startswith("_"))
    if missing := [name for name in methods if not hasattr(task, name)]:
        raise ConfigError(f"task={config.task}: it is not a task, it lacks {', '.join(missing)}")
    return task


def find_task(config: Config) -> Callable[[Config], Task]:
    """Return what makes the task that ``config.task`` names.

    Raises :class:`ConfigError` when it cannot be imported.
    """
    make: Callable[[Config], Task]
    make = imported(config.task, "task") if is_path(config.task) else _TASKS[config.task]
    return make


def _causal_lm(config: Config) -> Task:
    # Imported when asked for: transformers takes seconds.
    from flower_desloc.tasks.causal_lm import CausalLM

    return CausalLM(config)


def _image_classification(config: Config) -> Task:
    from flower_desloc.tasks.image_classification import ImageClassification

    return ImageClassification(config)


_TASKS: dict[str, Callable[[Config], Task]] = {
    "causal_lm": _causal_lm,
    "image_classification": _image_classification,
}
