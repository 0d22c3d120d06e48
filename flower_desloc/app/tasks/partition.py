"""Partitions of a data set by its labels, for all tasks."""

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from typing import Any

import numpy as np
from datasets import Dataset

from flower_desloc.app.config import Config
from flower_desloc.app.config.schema import PARTITIONS, column_of
from flower_desloc.app.tasks.missing import sorted_names
from flower_desloc.app.tasks.protocol import FEWER_CLIENTS

_BY_LABEL = ", ".join(PARTITIONS["image_classification"])

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
        return cls(data.partition, data.alpha, config.data_seed, data.classes_per_client)

    @property
    def column(self) -> str:
        """NAME of ``data.partition=column:NAME``; empty under another rule."""
        return column_of(self.name)


@dataclass(frozen=True)
class ClientRows:
    """One client's rows of a training and of a held-out part, ascending."""

    train: Rows
    heldout: Rows


def partition_rows(
    labels: Sequence[Any],
    rule: PartitionRule,
    num_clients: int,
    *,
    column: Sequence[str] | None = None,
) -> list[Rows]:
    """Return each client's rows; every row goes to exactly one client.

    The rows are shuffled by the seed first, so that no client gets only neighbouring rows. The
    labels must be sortable. ``column`` has the values of ``rule.column``, one for each row. The
    last few partitions are cached: a process that serves many clients computes theirs once.

    Raises ``ValueError`` if the rule cannot give every row to a client.
    """
    if rule.column:
        if column is None:
            raise ValueError(
                f"data.partition={rule.name}: this task does not read that column; choose one of "
                f"{_BY_LABEL}"
            )
        return deal_by_value(column, rule, num_clients)
    return [rows.copy() for rows in _partitioned(tuple(labels), rule, num_clients)]


@lru_cache(maxsize=4)
def _partitioned(labels: tuple[Any, ...], rule: PartitionRule, num_clients: int) -> list[Rows]:
    partitioner = _partitioner(len(labels), rule, num_clients)
    partitioner.dataset = shuffled(labels, rule.seed)
    stated, num_labels = f"data.classes_per_client={rule.classes_per_client}", len({*labels})
    if rule.name == "pathological" and rule.classes_per_client > num_labels:
        raise ValueError(f"{stated}: there are only {num_labels} labels")
    try:
        # The pathological one warns of labels that no client holds; here that is an error.
        with warnings.catch_warnings(action="ignore"):
            clients = [partitioner.load_partition(i)["row"][:] for i in range(num_clients)]
    except ValueError as error:
        raise ValueError(
            f"{stated}: {num_clients} clients need more examples of a label than there are "
            f"({error}); use fewer classes per client, or {FEWER_CLIENTS}"
        ) from error
    if missed := len(labels) - sum(map(len, clients)):
        raise ValueError(
            f"{stated}: with {num_clients} clients no client holds some labels, which leaves "
            f"{missed} of {len(labels)} examples out; use more classes per client, or at least "
            f"{num_labels} clients"
        )
    return clients


def _partitioner(num_rows: int, rule: PartitionRule, num_clients: int) -> Any:
    # Imported here: the default partition of text does without it.
    from flwr_datasets import partitioner

    by_label = {"num_partitions": num_clients, "partition_by": "label", "seed": rule.seed}
    match rule.name:
        case "iid":
            return partitioner.IidPartitioner(num_clients)
        case "dirichlet":
            # No balancing and no minimum size: both would change the distribution, and drawing
            # again until nobody is empty can fail.
            return partitioner.DirichletPartitioner(
                **by_label,
                alpha=rule.alpha,
                min_partition_size=0,
                self_balancing=False,
                shuffle=False,
            )
        case "pathological":
            # Client i holds label i mod C and others drawn, as in the paper that introduced it.
            return partitioner.PathologicalPartitioner(
                **by_label,
                num_classes_per_partition=rule.classes_per_client,
                class_assignment_mode="first-deterministic",
                shuffle=False,
            )
        case "quantity":
            # One row each, and a fraction drawn from Dirichlet(alpha) of the rest.
            spare = num_rows - num_clients
            fractions = np.random.default_rng(rule.seed).dirichlet(np.full(num_clients, rule.alpha))
            ends = np.rint(np.cumsum(fractions) * spare).astype(int)
            ends[-1] = spare
            return partitioner.SizePartitioner([1 + int(n) for n in np.diff(ends, prepend=0)])
    raise ValueError(
        f"data.partition={rule.name}: is for the task causal_lm; choose one of {_BY_LABEL}"
    )


def deal_by_value(
    column: Sequence[str], rule: PartitionRule, num_clients: int, values: Collection[str] = ()
) -> list[Rows]:
    """Return each client's rows where client i holds those with value i mod V of a column.

    The V values are those of ``values``, by default of ``column``, in natural order; rows with
    another value go to nobody. Clients of the same value have equal parts of its rows.

    Raises ``ValueError`` unless the clients are V, or a multiple of it.
    """
    names = sorted_names({*(values or column)})
    if num_clients % len(names):
        some = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
        raise ValueError(
            f"data.partition={rule.name}: the column has {len(names)} values ({some}) for "
            f"{num_clients} clients; set simulation.num_clients={len(names)} (or num-partitions of "
            "the sites), or a multiple of it, for several clients to a value"
        )
    clients: list[Rows] = [[] for _ in range(num_clients)]
    holders = {name: cycle(clients[i :: len(names)]) for i, name in enumerate(names)}
    for row in np.random.default_rng(rule.seed).permutation(len(column)).tolist():
        if column[row] in holders:
            next(holders[column[row]]).append(row)
    return clients


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
