"""Who gets which images."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from flower_desloc.tasks import dealing
from flower_desloc.tasks.dealing import Rows, Rule
from flower_desloc.tasks.image_classification.corpus import read
from flower_desloc.tasks.image_classification.source import Source


@dataclass(frozen=True)
class Share:
    """One client's images, as rows of the corpus' two parts, ascending."""

    train: Rows
    heldout: Rows


@lru_cache(maxsize=8)
def shares(source: Source, rule: Rule, num_clients: int) -> list[Share]:
    """Return every client's share of the source.

    Each training image goes to one client. The held-out images of a label are dealt in the
    proportions of its training images, so that a client is tested on what it trains on; one that
    would get none is lent one of each of its labels, so that an image may serve several clients.

    Raises ``ValueError`` when there are more clients than training images, or the rule cannot be
    kept.
    """
    corpus = read(source)
    if num_clients > len(corpus.train):
        raise ValueError(
            f"federation.num_clients={num_clients}: {source} has only {len(corpus.train)} images "
            "to train on; use fewer clients"
        )
    train = dealing.deal(corpus.train.labels.tolist(), rule, num_clients)
    if rule.name == "dirichlet":
        dealing.leave_nobody_empty(train)
    heldout = _in_proportion(corpus.heldout.labels, [corpus.train.labels[rows] for rows in train])
    return [Share(sorted(mine), sorted(kept)) for mine, kept in zip(train, heldout, strict=True)]


def _in_proportion(heldout: NDArray[np.int64], clients: list[NDArray[np.int64]]) -> list[Rows]:
    dealt: list[Rows] = [[] for _ in clients]
    rows = {label: np.flatnonzero(heldout == label) for label in np.unique(heldout)}
    for label, all_of_it in rows.items():
        held = np.cumsum([np.count_nonzero(labels == label) for labels in clients])
        ends = np.rint(held / max(held[-1], 1) * len(all_of_it)).astype(int)
        for mine, part in zip(dealt, np.split(all_of_it, ends[:-1]), strict=True):
            mine.extend(part.tolist())
    turns = {label: cycle(all_of_it.tolist()) for label, all_of_it in rows.items()}
    for mine, labels in zip(dealt, clients, strict=True):
        if not mine:
            mine.extend(next(turns[label]) for label in np.unique(labels) if label in turns)
    return dealt
