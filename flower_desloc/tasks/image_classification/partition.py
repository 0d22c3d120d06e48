"""Partitions of images: which client gets which images."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flower_desloc.tasks.image_classification.sources import read
from flower_desloc.tasks.partition import (
    ClientRows,
    PartitionRule,
    Rows,
    fill_empty_clients,
    lend_heldout,
    partition_rows,
)
from flower_desloc.tasks.source import Source


@lru_cache(maxsize=8)
def client_rows(source: Source, rule: PartitionRule, num_clients: int) -> list[ClientRows]:
    """Return every client's images of a source.

    Each training image goes to one client. The held-out images of a label are dealt in the
    proportions of its training images, so that a client is tested on what it trains on. A client
    that would get none is given one of each of its labels, which then serve several clients.

    Raises ``ValueError`` if there are more clients than training images, or the rule cannot be
    kept.
    """
    corpus = read(source)
    if num_clients > len(corpus.train):
        raise ValueError(
            f"federation.num_clients={num_clients}: {source} has only {len(corpus.train)} images "
            "to train on; use fewer clients"
        )
    labels, heldout_labels = corpus.train.labels, corpus.heldout.labels
    train = partition_rows(labels.tolist(), rule, num_clients)
    if rule.name == "dirichlet":
        fill_empty_clients(train)
    heldout = _in_proportion(heldout_labels, [labels[rows] for rows in train])
    return lend_heldout(train, heldout, labels.tolist(), heldout_labels.tolist())


def _in_proportion(heldout: NDArray[np.int64], clients: list[NDArray[np.int64]]) -> list[Rows]:
    dealt: list[Rows] = [[] for _ in clients]
    for label in np.unique(heldout):
        rows = np.flatnonzero(heldout == label)
        held = np.cumsum([np.count_nonzero(labels == label) for labels in clients])
        ends = np.rint(held / max(held[-1], 1) * len(rows)).astype(int)
        for mine, part in zip(dealt, np.split(rows, ends[:-1]), strict=True):
            mine.extend(part.tolist())
    return dealt
