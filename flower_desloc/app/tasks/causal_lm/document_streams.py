"""Streamed documents: the domains of a source, and each client's share of them.

``datasets.interleave_datasets`` and ``split_dataset_by_node`` are not used: the first mixes by
documents and not by tokens, the second assigns rows by position, so that equal documents reach
different clients.
"""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from datasets import IterableDataset

from flower_desloc.app.tasks.causal_lm.corpus import domain_clients
from flower_desloc.app.tasks.causal_lm.sources import (
    OpenFiles,
    Row,
    document,
    domains_of,
    read_rows,
    selected,
    shards_of,
)
from flower_desloc.app.tasks.protocol import FEWER_CLIENTS, Site
from flower_desloc.app.tasks.source import Source

_log = logging.getLogger(__name__)


class StreamedDomain:
    """The documents of one domain: training documents in shards, and held-out documents."""

    def __init__(self, source: Source, name: str) -> None:
        domain = domains_of(source)[name]
        if domain.files is not None:
            files = domain.files()
        else:
            files = OpenFiles(shards_of(name, IterableDataset.from_generator(domain.train)), "", "")
        self.version, self.sizes, self.shards = files.version, files.sizes, files.shards
        self._source = source
        self._missing = 0  # rows without a text that were read
        self._own_heldout = domain.heldout
        if self._own_heldout is not None and not any(True for _ in self._own_heldout()):
            self._own_heldout = None

    def open_shard(self, index: int) -> IterableDataset:
        """Return the rows of one shard."""
        rows = self.shards[index].open()
        # Some formats have no column names before they are read.
        if self._source.text_field in (rows.column_names or ()):
            rows = rows.select_columns([self._source.text_field])
        return rows

    def texts(self, index: int, rows: Iterable[Row], *, train: bool) -> Iterator[str]:
        """Yield the training documents among the rows of a shard, or the held-out ones.

        If the source has no held-out part, the hash of the content decides: equal documents are in
        the same part.
        """
        heldout = self._source.validation_fraction if self._own_heldout is None else 0.0
        for row in read_rows(self._source, self.shards[index].name, rows):
            text = self._document(row)
            if text and (_hashed(text, "held out") >= heldout) == train:
                yield text

    def heldout(self) -> Iterator[str]:
        """Yield the held-out documents."""
        if self._own_heldout is not None:
            yield from filter(None, map(self._document, self._own_heldout()))
            return
        for index in range(len(self.shards)):
            yield from self.texts(index, self.open_shard(index), train=False)

    def _document(self, row: Row) -> str:
        """Return the row's document; warn of rows without a text, which cannot be counted before.

        Refusing them would end a run in its middle.
        """
        text = document(self._source, row)
        if not text and row[self._source.text_field] is None and not self._source.drop_missing:
            self._missing += 1
            if _doubles(self._missing):
                _log.warning(
                    "%s: rows without a text in %r (data.text_field) are left out, %d so far; "
                    "data.drop_missing=true says that this is meant",
                    *(self._source, self._source.text_field, self._missing),
                )
        return text


@lru_cache(maxsize=64)
def open_domain(source: Source, name: str) -> StreamedDomain:
    """Return a domain of the source, opened once in each process."""
    return StreamedDomain(source, name)


@lru_cache(maxsize=4)
def domain_names(source: Source) -> tuple[str, ...]:
    """Return the names of the used domains, in order."""
    return tuple(selected(source, domains_of(source)))


@dataclass(frozen=True)
class DomainShare:
    """One client's share of a domain's documents; no document is in two clients' shares."""

    source: Source
    domain: str
    turn: int
    """The client's number among those that read this domain."""
    holders: int
    """Number of clients that read it."""
    weight: float
    """Fraction of the client's tokens, relative to its other shares."""


def client_shares(
    source: Source, weights: Sequence[float], partition: str, site: Site
) -> list[DomainShare]:
    """Return a client's share of each domain; ``weights`` are by domain, by default equal."""
    names = domain_names(source)
    if site.data_path:
        return [DomainShare(source, name, turn=0, holders=1, weight=1.0) for name in names]
    shares = []
    for index, (name, weight) in enumerate(zip(names, weights or [1.0] * len(names), strict=True)):
        holders = [*range(site.num_partitions)]
        if partition == "by_domain":
            holders = domain_clients(index, len(names), site.num_partitions)
        if site.partition in holders:
            turn, count = holders.index(site.partition), len(holders)
            shares.append(DomainShare(source, name, turn, count, weight))
    return shares


class DocumentStream:
    """A client's documents of one domain, repeated without end.

    With at least as many shards as clients that read the domain, a client reads whole shards. With
    fewer, it reads all of them and keeps the documents whose hash selects it. ``key`` seeds the
    order of the shards, which differs in every epoch. The other arguments are those of
    ``state``, by default the beginning.
    """

    def __init__(
        self,
        share: DomainShare,
        key: Sequence[int],
        *,
        epoch: int = 0,
        shard: int = 0,
        rows: dict[str, Any] | None = None,
        num_bytes: int = 0,
        num_tokens: int = 0,
    ) -> None:
        self.epoch = epoch
        """Completed passes over the share."""
        self.num_bytes = num_bytes
        """UTF-8 bytes of the documents that were counted."""
        self.num_tokens = num_tokens
        self._share, self._key = share, key
        self._shard = shard  # shards read in this epoch
        self._start = rows  # where to start in the next shard
        self._domain = open_domain(share.source, share.domain)
        self._whole_shards = share.holders <= len(self._domain.shards)
        self._rows: IterableDataset | None = None

    def state(self) -> dict[str, Any]:
        """Return the position after the last document that was yielded, and what was counted."""
        return {
            "epoch": self.epoch,
            "shard": self._shard,
            "rows": self._start if self._rows is None else self._rows.state_dict(),
            "num_bytes": self.num_bytes,
            "num_tokens": self.num_tokens,
        }

    def __iter__(self) -> Iterator[str]:
        """Yield the documents.

        Raises ``ValueError`` if there is no document, or a row has no text.
        """
        found = (self.epoch, self._shard, self._start) != (0, 0, None)
        share = self._share
        while True:
            for text in self._pass():
                found = True
                yield text
            if not found:
                raise ValueError(
                    f"{share.source}: domain {share.domain!r} has no document for part "
                    f"{share.turn} of {share.holders}; give it more text, use {FEWER_CLIENTS}, or "
                    "leave that domain out"
                )
            self.epoch, self._shard, found = self.epoch + 1, 0, False
            if _doubles(self.epoch + 1):
                _log.warning(
                    "%s: part %d of %d of domain %r has been read; it begins again, for pass %d",
                    *(share.source, share.turn, share.holders, share.domain, self.epoch + 1),
                )

    def _pass(self) -> Iterator[str]:
        share = self._share
        mine = range(len(self._domain.shards))
        if self._whole_shards:
            mine = mine[share.turn :: share.holders]
        order = np.random.default_rng([*self._key, self.epoch]).permutation(mine).tolist()
        for index in order[self._shard :]:
            self._rows = self._domain.open_shard(index)
            if self._start is not None:
                self._rows.load_state_dict(self._start)
            for text in self._domain.texts(index, self._rows, train=True):
                if self._whole_shards or self._is_mine(text):
                    yield text
            self._rows = self._start = None
            self._shard += 1

    def _is_mine(self, text: str) -> bool:
        return int(_hashed(text, "dealt") * self._share.holders) == self._share.turn


def _doubles(count: int) -> bool:
    """Return whether a count is 1, 2, 4, 8 and so on, when a warning is repeated."""
    return count & (count - 1) == 0


def _hashed(text: str, purpose: str) -> float:
    """Return a pseudo-random number in [0, 1) that depends on the content only."""
    digest = hashlib.blake2b(text.encode(), digest_size=6, person=purpose.encode()).digest()
    return int.from_bytes(digest) / 2**48
