"""Text too large for memory: a client's own documents of a domain, read in turn, without end."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from datasets import IterableDataset

from flower_desloc.tasks.causal_lm.source import Files, Row, Source, why
from flower_desloc.tasks.causal_lm.text import chosen, document, units

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one client reads of one domain; no document is in the parts of two."""

    source: Source
    domain: str
    turn: int
    """Which of those who read this domain the client is."""
    holders: int
    """How many read it."""
    weight: float
    """How much of the client's tokens come of it, in comparison with its other parts."""


@dataclass(frozen=True)
class Position:
    """How far a client has read its part of a domain: all it takes to read on."""

    epoch: int = 0
    """How often all of it has been read."""
    shard: int = 0
    """How many of its shards have been read in this epoch."""
    rows: dict[str, Any] | None = None
    """Where in the next shard, as ``datasets`` writes it down; None: at its beginning."""


class Domain:
    """The documents of one domain: those to train on, in shards, and those held out."""

    def __init__(self, source: Source, name: str) -> None:
        unit = units(source)[name]
        files = unit.files() if unit.files else Files([_generated(unit.train)], "")
        self.version, self._damaged = files.version, files.damaged
        self._source, self._name = source, name
        self._shards = [(rows, i) for rows in files.datasets for i in range(rows.num_shards)]
        self._own = unit.heldout
        if self._own is not None and not any(True for _ in self._own()):
            self._own = None

    @property
    def num_shards(self) -> int:
        """How many parts of it can be read without the others."""
        return len(self._shards)

    def shard(self, index: int) -> IterableDataset:
        """Return the rows of one shard."""
        rows, i = self._shards[index]
        # The names of columns are not known of every format without reading.
        if self._source.text_field in (rows.column_names or ()):
            rows = rows.select_columns([self._source.text_field])
        return rows.shard(rows.num_shards, i)

    def texts(self, rows: Iterable[Row], *, train: bool) -> Iterator[str]:
        """Return the documents of training rows that are trained on, or those held out.

        Where the source has no held-out part, the content's hash says which: equal documents lie
        on one side, wherever they stand.
        """
        heldout = self._source.validation_fraction if self._own is None else 0.0
        for row in self._read(rows):
            text = document(self._source, row)
            if text and (_hashed(text, "held out") >= heldout) == train:
                yield text

    def _read(self, rows: Iterable[Row]) -> Iterator[Row]:
        try:
            yield from rows
        except Exception as error:
            what = self._damaged() or f"domain {self._name!r}"
            raise ValueError(f"{self._source}: cannot read {what} ({why(error)})") from error

    def heldout(self) -> Iterator[str]:
        """Return the held-out documents, which nobody trains on."""
        if self._own is not None:
            yield from filter(None, (document(self._source, row) for row in self._own()))
            return
        for index in range(self.num_shards):
            yield from self.texts(self.shard(index), train=False)


@lru_cache(maxsize=64)
def domain(source: Source, name: str) -> Domain:
    """Return a domain of the source, opened once a process."""
    return Domain(source, name)


@lru_cache(maxsize=4)
def domain_names(source: Source) -> tuple[str, ...]:
    """Return the domains that are used, in their order."""
    return tuple(chosen(source, units(source)))


class Documents:
    """A client's documents of one domain, which begin again where they end.

    With at least as many shards as clients that read the domain, a client reads whole shards of
    its own; with fewer, it reads all, and takes the documents whose hash falls to it. The shards
    come in another order in every epoch, drawn by ``key``.
    """

    def __init__(self, part: Part, key: Sequence[int], position: Position) -> None:
        self._part = part
        self._key = key
        self._position = position
        self._domain = domain(part.source, part.domain)
        self._whole_shards = part.holders <= self._domain.num_shards
        self._rows: IterableDataset | None = None

    @property
    def position(self) -> Position:
        """Where to read on after the last document given."""
        rows = self._rows
        return self._position if rows is None else replace(self._position, rows=rows.state_dict())

    def __iter__(self) -> Iterator[str]:
        """Return the documents.

        Raises ``ValueError`` when there is none, or a row has no text.
        """
        while True:
            found = self._position != Position()
            for text in self._epoch():
                found = True
                yield text
            epoch = self._position.epoch + 1
            part = self._part
            if not found:
                raise ValueError(
                    f"{part.source}: of domain {part.domain!r} there is no document for part "
                    f"{part.turn} of {part.holders}; give it more text, use fewer clients "
                    "(federation.num_clients), or leave it out of data.domains"
                )
            _log.warning(
                "%s: part %d of %d of domain %r has been read; it begins again, for pass %d",
                *(part.source, part.turn, part.holders, part.domain, epoch + 1),
            )
            self._position = Position(epoch)

    def _epoch(self) -> Iterator[str]:
        part, at = self._part, self._position
        mine = range(self._domain.num_shards)
        if self._whole_shards:
            mine = mine[part.turn :: part.holders]
        order = np.random.default_rng([*self._key, at.epoch]).permutation(mine)
        for number in range(at.shard, len(order)):
            self._rows = self._domain.shard(int(order[number]))
            if self._position.rows is not None:
                self._rows.load_state_dict(self._position.rows)
            for text in self._domain.texts(self._rows, train=True):
                if self._whole_shards or self._falls_to_me(text):
                    yield text
            self._rows = None
            self._position = Position(at.epoch, number + 1)

    def _falls_to_me(self, text: str) -> bool:
        return int(_hashed(text, "dealt") * self._part.holders) == self._part.turn


def _hashed(text: str, what: str) -> float:
    """Return a number from 0 to below 1, drawn by the content."""
    digest = hashlib.blake2b(text.encode(), digest_size=6, person=what.encode()).digest()
    return int.from_bytes(digest) / 2**48


def _generated(rows: Callable[[], Iterable[Row]]) -> IterableDataset:
    return IterableDataset.from_generator(rows)
