"""Partitions of a data set by its labels, for all tasks."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
from datasets import Dataset

from flower_desloc.config import Config

Rows = list[int]
"""Row numbers of a data set."""


@dataclass(frozen=True)
class PartitionRule:
    """The settings of ``data`` that decide who gets which rows."""

    name: str
    alpha: float
    seed: int
    classes_per_client: int = 1

    @classmethod
    def of(cls, config: Config) -> "PartitionRule":
        """Return the rule of a run."""
        data = config.data
        return cls(data.partition, data.alpha, config.run.seed, data.classes_per_client)


@dataclass(frozen=True)
class ClientRows:
    """One client's rows of a training and of a held-out part, ascending."""

    train: Rows
    heldout: Rows


def partition_rows(labels: Sequence[Any], rule: PartitionRule, num_clients: int) -> list[Rows]:
    """Return each client's rows; every row goes to exactly one client.

    The rows are shuffled by the seed first, so that no client gets only neighbouring rows. The
    labels must be sortable.

    Raises ``ValueError`` if the rule cannot give every row to a client.
    """
    return _RULES[rule.name](shuffled(labels, rule.seed), rule, num_clients)


def shuffled(labels: Sequence[Any], seed: int) -> Dataset:
    """Return a data set with the columns ``row`` and ``label``, in an order drawn by the seed."""
    return Dataset.from_dict({"row": range(len(labels)), "label": labels}).shuffle(seed=seed)


def fill_empty_clients(clients: list[Rows]) -> None:
    """Give each client without rows one row of the client with most.

    This departs from the Dirichlet distribution, which leaves some of many clients without data.
    """
    for rows in clients:
        if not rows:
            rows.append(max(clients, key=len).pop())


def lend_heldout(
    train: Sequence[Rows],
    heldout: Sequence[Rows],
    train_labels: Sequence[Any],
    heldout_labels: Sequence[Any],
) -> list[ClientRows]:
    """Return every client's rows; one without held-out rows gets one of each of its labels."""
    turns = {
        label: cycle([row for row, other in enumerate(heldout_labels) if other == label])
        for label in {*heldout_labels}
    }
    for mine, kept in zip(train, heldout, strict=True):
        if not kept:
            labels = sorted({train_labels[row] for row in mine} & turns.keys())
            kept.extend(next(turns[label]) for label in labels)
    return [ClientRows(sorted(a), sorted(b)) for a, b in zip(train, heldout, strict=True)]


# The partitioners are imported inside the rules: the default partition does without them.


def _iid(numbered: Dataset, _rule: PartitionRule, num_clients: int) -> list[Rows]:
    from flwr_datasets.partitioner import IidPartitioner

    return _partitioned(IidPartitioner(num_clients), numbered)


def _dirichlet(numbered: Dataset, rule: PartitionRule, num_clients: int) -> list[Rows]:
    from flwr_datasets.partitioner import DirichletPartitioner

    # No balancing and no minimum size: both would change the distribution, and drawing again
    # until nobody is empty can fail.
    return _partitioned(
        DirichletPartitioner(
            num_partitions=num_clients,
            partition_by="label",
            alpha=rule.alpha,
            min_partition_size=0,
            self_balancing=False,
            shuffle=False,
            seed=rule.seed,
        ),
        numbered,
    )


def _pathological(numbered: Dataset, rule: PartitionRule, num_clients: int) -> list[Rows]:
    from flwr_datasets.partitioner import PathologicalPartitioner

    held = rule.classes_per_client
    labels = numbered.unique("label")
    if held > len(labels):
        raise ValueError(f"data.classes_per_client={held}: there are only {len(labels)} labels")
    partitioner = PathologicalPartitioner(
        num_partitions=num_clients,
        partition_by="label",
        num_classes_per_partition=held,
        # Client i holds label i mod C and others drawn, as in the paper that introduced it.
        class_assignment_mode="first-deterministic",
        shuffle=False,
        seed=rule.seed,
    )
    # It warns of labels that no client holds; here that is an error.
    with warnings.catch_warnings(action="ignore"):
        try:
            clients = _partitioned(partitioner, numbered)
        except ValueError as error:
            raise ValueError(
                f"data.classes_per_client={held}: federation.num_clients={num_clients} clients "
                f"need more examples of a label than there are ({error})"
            ) from error
    if missed := len(numbered) - sum(map(len, clients)):
        raise ValueError(
            f"data.classes_per_client={held}: with federation.num_clients={num_clients} no client "
            f"holds some labels, which leaves {missed} of {len(numbered)} examples out; use more "
            f"classes per client, or at least {len(labels)} clients"
        )
    return clients


def _quantity(numbered: Dataset, rule: PartitionRule, num_clients: int) -> list[Rows]:
    from flwr_datasets.partitioner import SizePartitioner

    # One row each, and a fraction drawn from Dirichlet(alpha) of the rest.
    spare = len(numbered) - num_clients
    fractions = np.random.default_rng(rule.seed).dirichlet(np.full(num_clients, rule.alpha))
    ends = np.rint(np.cumsum(fractions) * spare).astype(int)
    ends[-1] = spare
    return _partitioned(SizePartitioner([1 + int(n) for n in np.diff(ends, prepend=0)]), numbered)


def _partitioned(partitioner: Any, numbered: Dataset) -> list[Rows]:
    partitioner.dataset = numbered
    return [partitioner.load_partition(i)["row"][:] for i in range(partitioner.num_partitions)]


_RULES: dict[str, Callable[[Dataset, PartitionRule, int], list[Rows]]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "pathological": _pathological,
    "quantity": _quantity,
}
