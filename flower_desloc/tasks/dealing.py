"""Who gets which rows of a data set, by their labels: the partitions all tasks have."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset

Rows = list[int]
"""Rows of a data set."""


@dataclass(frozen=True)
class Rule:
    """How rows are dealt; the fields are those of the configuration."""

    name: str
    alpha: float
    seed: int
    classes_per_client: int = 1


def deal(labels: Sequence[Any], rule: Rule, num_clients: int) -> list[Rows]:
    """Return the rows each client gets; every row goes to one client.

    The rows are shuffled by the seed first, so that no client gets neighbours only. The labels
    sort.

    Raises ``ValueError`` when the rule cannot give every row to somebody.
    """
    return _RULES[rule.name](shuffled(labels, rule.seed), rule, num_clients)


def shuffled(labels: Sequence[Any], seed: int) -> Dataset:
    """Return a data set of ``row`` and ``label``, in an order drawn by the seed."""
    return Dataset.from_dict({"row": range(len(labels)), "label": labels}).shuffle(seed=seed)


def leave_nobody_empty(clients: list[Rows]) -> None:
    """Give a client to which the draw left nothing a row of the client with most.

    A departure from the distribution, which for many clients leaves some without data.
    """
    for rows in clients:
        if not rows:
            rows.append(max(clients, key=len).pop())


def _iid(numbered: Dataset, _rule: Rule, num_clients: int) -> list[Rows]:
    # Imported when asked for, here and below: the default partition does without.
    from flwr_datasets.partitioner import IidPartitioner

    return _partitioned(IidPartitioner(num_clients), numbered)


def _dirichlet(numbered: Dataset, rule: Rule, num_clients: int) -> list[Rows]:
    from flwr_datasets.partitioner import DirichletPartitioner

    # Neither balanced nor drawn again until nobody is empty-handed: both would change the
    # distribution, and the second can fail.
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


def _pathological(numbered: Dataset, rule: Rule, num_clients: int) -> list[Rows]:
    from flwr_datasets.partitioner import PathologicalPartitioner

    held = rule.classes_per_client
    labels = numbered.unique("label")
    if held > len(labels):
        raise ValueError(
            f"data.classes_per_client={held}: there are only {len(labels)} labels to hold"
        )
    partitioner = PathologicalPartitioner(
        num_partitions=num_clients,
        partition_by="label",
        num_classes_per_partition=held,
        # Client i holds label i mod C and others drawn: as in the paper it comes from.
        class_assignment_mode="first-deterministic",
        shuffle=False,
        seed=rule.seed,
    )
    # It warns of labels that no client holds, which here is an error.
    with warnings.catch_warnings(action="ignore"):
        try:
            clients = _partitioned(partitioner, numbered)
        except ValueError as error:
            raise ValueError(
                f"data.classes_per_client={held}: federation.num_clients={num_clients} clients "
                f"want more examples of a label than there are ({error})"
            ) from error
    if missed := len(numbered) - sum(map(len, clients)):
        raise ValueError(
            f"data.classes_per_client={held}: the draw for federation.num_clients={num_clients} "
            f"leaves {missed} of {len(numbered)} examples out, as no client holds some labels; use "
            f"more classes a client, or at least {len(labels)} clients"
        )
    return clients


def _quantity(numbered: Dataset, rule: Rule, num_clients: int) -> list[Rows]:
    from flwr_datasets.partitioner import SizePartitioner

    # One row each, and of the rest a share drawn from Dirichlet(alpha).
    spare = len(numbered) - num_clients
    shares = np.random.default_rng(rule.seed).dirichlet(np.full(num_clients, rule.alpha))
    ends = np.rint(np.cumsum(shares) * spare).astype(int)
    ends[-1] = spare
    return _partitioned(SizePartitioner([1 + int(n) for n in np.diff(ends, prepend=0)]), numbered)


def _partitioned(partitioner: Any, numbered: Dataset) -> list[Rows]:
    partitioner.dataset = numbered
    return [partitioner.load_partition(i)["row"][:] for i in range(partitioner.num_partitions)]


_RULES: dict[str, Callable[[Dataset, Rule, int], list[Rows]]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "pathological": _pathological,
    "quantity": _quantity,
}
