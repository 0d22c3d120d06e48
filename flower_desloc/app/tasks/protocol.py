"""The interface between the algorithm and a model with its data.

A task builds the model, gives every client its batches and measures losses. It knows nothing of
synchronisation periods, streams or Flower.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from flower_desloc.app.config.schema import Data

Batch = Any
"""The argument of the task's own ``loss``; on the CPU until the task moves it."""

Sums = Mapping[str, float]
"""Totals of an evaluation, such as nats and tokens; totals of batches, domains or clients add."""

FEWER_CLIENTS = "fewer clients (simulation.num_clients, or num-partitions of the sites)"
"""Advice where the common data are too few for every client: a deployment has no num_clients."""
MORE_TEXT = "more text (in the source, or of it: data.max_bytes)"


@dataclass(frozen=True)
class Site:
    """The part of the data that one client may use, as its node config states it.

    Raises ``ValueError`` if there is no such partition.
    """

    partition: int
    """With ``data_path`` and no ``partition-id`` in the node config, 0 of 1 at every site."""
    num_partitions: int
    data_path: Path | None = None
    """The site's private data, used instead of a partition of the common source."""

    def __post_init__(self) -> None:
        if self.data_path is None and not 0 <= self.partition < self.num_partitions:
            raise ValueError(
                f"partition-id={self.partition}: must be at least 0 and below "
                f"num-partitions={self.num_partitions}"
            )

    def describe(self, data: Data) -> str:
        """Return what error messages call this client's data."""
        if self.data_path is not None:
            return f"data-path={self.data_path}"
        return (
            f"partition {self.partition} of {self.num_partitions} "
            f"(data.partition={data.partition}, data.source={data.source})"
        )


class ClientData(Protocol):
    """The data of one client."""

    num_examples: int
    """Size of the training part, the weight under ``federation.weighting=examples``."""

    description: Mapping[str, int]
    """Size of the training part by domain or label."""

    def train_batch(self, step: int) -> Batch:
        """Return the batch of the step taken after ``step`` completed steps.

        A pure function of (seed, client, step).
        """

    def heldout(self) -> Iterable[Batch]:
        """Return the batches of the client's held-out part, the same in every call."""


@runtime_checkable
class HasDigest(Protocol):
    """Client data that is compared by more than its description and its first batch."""

    def data_digest(self) -> str:
        """Return a text that changes when the data does; it may take a second."""


@runtime_checkable
class HasExamples(Protocol):
    """Client data whose examples are drawn one by one, as differential privacy needs."""

    def examples(self, numbers: Sequence[int]) -> Batch:
        """Return the training examples of these numbers, from 0 and below ``num_examples``.

        A batch for ``Task.loss``. It is asked for one example at a time, also twice for the same,
        and must depend on nothing else, nor ``Task.loss`` on earlier batches: what one example
        changed of the gradients of others would not be protected.
        """


@runtime_checkable
class HasVocabulary(Protocol):
    """A task whose tokenizer every site must have."""

    def vocabulary_digest(self) -> str:
        """Return a text that differs for tokenizers with other tokens."""


class Task(Protocol):
    """A model, its data and its loss.

    A class whose ``client_data`` reads ``site.data_path`` states ``reads_data_path = True``. No
    other can be trained on a site's private data.
    """

    def build_model(self) -> nn.Module:
        """Return a new model on the CPU; its weights are a function of the seed.

        Parameters that require no gradient are neither trained nor sent: every site must build
        them with the same values.
        """

    def client_data(self, site: Site) -> ClientData:
        """Return the data of one client; if ``site.data_path`` is set, what is there.

        Raises ``ValueError`` if the data
        would be empty; the message names the setting to change.
        """

    def heldout(self) -> Mapping[str, Iterable[Batch]]:
        """Return the held-out batches of every domain, for evaluation on the server."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of ``batch``, a scalar to differentiate."""

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> Sums:
        """Return the totals over ``batches``, with the model in evaluation mode."""

    def metrics(self, sums: Sums) -> Mapping[str, float]:
        """Return the metrics of added totals: at least ``loss``."""

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the weights (safetensors) and the model's config into ``folder``."""
