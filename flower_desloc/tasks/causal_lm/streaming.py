"""Streaming text: each client's documents, packed into sequences during training.

``datasets.interleave_datasets`` and ``split_dataset_by_node`` are not used: the first mixes by
documents and not by tokens, the second assigns rows by position, so that equal documents reach
different clients.
"""

import hashlib
import json
import logging
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from flower_desloc.config import Config
from flower_desloc.tasks.causal_lm.batches import TextBatch, heldout_batches
from flower_desloc.tasks.causal_lm.partition import domain_clients
from flower_desloc.tasks.causal_lm.sources import (
    OpenFiles,
    Row,
    document,
    domains_of,
    read_rows,
    selected,
    shards_of,
)
from flower_desloc.tasks.causal_lm.tokens import Tokens, joined, load_tokenizer
from flower_desloc.tasks.compute import cache_folder
from flower_desloc.tasks.protocol import Site
from flower_desloc.tasks.retry import retry_network
from flower_desloc.tasks.source import Source

BLOCK = 1024
"""Sequences packed at a time; documents are shuffled within a block."""

KEPT_BLOCKS = 256
"""Blocks kept on disk: 1 GB, with sequences of 2048 tokens of two bytes."""

_MAX_OPEN_PACKERS = 4
"""Packers that a process keeps open; each holds rows in memory that it has read ahead."""

_HELDOUT_CHUNK = 16
"""Held-out documents tokenised at a time."""

_log = logging.getLogger(__name__)


# Domains, and each client's documents.


class StreamedDomain:
    """The documents of one domain: training documents in shards, and held-out documents."""

    def __init__(self, source: Source, name: str) -> None:
        domain = domains_of(source)[name]
        if domain.files is not None:
            files = domain.files()
        else:
            files = OpenFiles(shards_of(name, IterableDataset.from_generator(domain.train)), "")
        self.version, self.shards = files.version, files.shards
        self._source = source
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
            text = document(self._source, row)
            if text and (_hashed(text, "held out") >= heldout) == train:
                yield text

    def heldout(self) -> Iterator[str]:
        """Yield the held-out documents."""
        if self._own_heldout is not None:
            yield from filter(None, (document(self._source, row) for row in self._own_heldout()))
            return
        for index in range(len(self.shards)):
            yield from self.texts(index, self.open_shard(index), train=False)


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
    """How many clients read it."""
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
                    f"{share.source}: of domain {share.domain!r} there is no document for part "
                    f"{share.turn} of {share.holders}; give it more text, use fewer clients "
                    "(federation.num_clients), or leave it out of data.domains"
                )
            self.epoch, self._shard, found = self.epoch + 1, 0, False
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


def _hashed(text: str, purpose: str) -> float:
    """Return a pseudo-random number in [0, 1) that depends on the content only."""
    digest = hashlib.blake2b(text.encode(), digest_size=6, person=purpose.encode()).digest()
    return int.from_bytes(digest) / 2**48


# Packing: documents of several domains, mixed by weight, into sequences of equal length.


@dataclass(frozen=True, kw_only=True)
class PackingSpec:
    """What determines a client's sequences."""

    shares: tuple[DomainShare, ...]
    tokenizer: str
    length: int
    """Tokens in a sequence."""
    key: tuple[int, ...]
    """Seed of the order of files and documents."""

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions of the tokenizer and of the files behind these settings."""
        versions = [open_domain(share.source, share.domain).version for share in self.shares]
        return (load_tokenizer(self.tokenizer).fingerprint, *versions)


@dataclass(frozen=True, eq=False)
class PackerState:
    """The state of a packer between two blocks."""

    streams: list[dict[str, Any]]
    """The state of each share's ``DocumentStream``."""
    rest: Tokens
    """Tokens of documents that did not fit into the block."""


class Packer:
    """Packs the blocks of a specification, one after the other."""

    def __init__(
        self, spec: PackingSpec, number: int = 0, state: PackerState | None = None
    ) -> None:
        self.number = number
        """Number of the next block."""
        self._spec = spec
        self._tokenizer = load_tokenizer(spec.tokenizer)
        self._rest = state.rest if state else joined([*self._tokenizer.encode_each([""])])[:0]
        states = state.streams if state else [{} for _ in spec.shares]
        self._streams = [
            DocumentStream(share, [*spec.key, index], **stream)
            for index, (share, stream) in enumerate(zip(spec.shares, states, strict=True))
        ]
        self._documents = [iter(stream) for stream in self._streams]

    def pack(self) -> tuple[Tokens, PackerState]:
        """Return the next block's tokens, and the state after it.

        The packer is unusable after an exception.
        """
        rng = np.random.default_rng([*self._spec.key, len(self._streams), self.number])
        size = BLOCK * self._spec.length
        packed = [self._rest]
        while (missing := size - sum(map(len, packed))) > 0:
            drawn = self._draw(missing)
            rng.shuffle(drawn)
            encoded = self._tokenizer.encode_each([text for _, text in drawn])
            for (stream, text), tokens in zip(drawn, encoded, strict=True):
                packed.append(tokens)
                stream.num_bytes += len(text.encode())
                stream.num_tokens += len(tokens)
        tokens = joined(packed)
        self._rest = tokens[size:]
        self.number += 1
        return tokens[:size], PackerState([each.state() for each in self._streams], self._rest)

    def _draw(self, num_tokens: int) -> list[tuple[DocumentStream, str]]:
        """Return documents with slightly fewer than ``num_tokens``, each with its stream.

        The next document is always from the share that is farthest below its weight in tokens.
        Tokens of the documents drawn here are estimated from their bytes.
        """
        expected = [float(each.num_tokens) for each in self._streams]
        enough = sum(expected) + 0.95 * num_tokens
        drawn: list[tuple[DocumentStream, str]] = []
        while not drawn or sum(expected) < enough:
            index = min(
                range(len(expected)), key=lambda i: expected[i] / self._spec.shares[i].weight
            )
            stream, text = self._streams[index], next(self._documents[index])
            drawn.append((stream, text))
            per_byte = stream.num_tokens / stream.num_bytes if stream.num_bytes else 1.0
            expected[index] += len(text.encode()) * per_byte
        return drawn


# Sequences on disk.

_packers: OrderedDict[Path, Packer] = OrderedDict()
"""Open packers of this process, the least recently used first."""


class PackedSequences:
    """The sequences of a specification, packed when they are needed and cached on disk.

    Sequence n is the same in every process and after any loss of cached files. A file holds a block
    of ``BLOCK`` sequences and the packer's state after it. Files are written atomically and
    with the same content by every process, so no lock is needed. Old blocks are deleted and packed
    again when they are asked for; the first is kept, because every client is described by it.
    """

    def __init__(self, spec: PackingSpec) -> None:
        self._spec = spec
        what = repr((spec, spec.versions)).encode()
        self._folder = cache_folder() / "text" / hashlib.blake2b(what, digest_size=16).hexdigest()

    def batch(self, start: int, stop: int) -> TextBatch:
        """Return the sequences from number ``start`` to before ``stop``."""
        ids, num_bytes = [], 0
        while start < stop:
            number, first = divmod(start, BLOCK)
            last = min(BLOCK, first + stop - start)
            with self._block(number) as file:
                ids.append(file.get_slice("ids")[first:last].astype(np.int64))
                num_bytes += int(file.get_slice("num_bytes")[first:last].sum())
            start += last - first
        return TextBatch(torch.from_numpy(np.concatenate(ids)), num_bytes)

    def state_after(self, number: int) -> PackerState:
        """Return the packer's state after a block."""
        with self._block(number) as file:
            rest = Tokens(file.get_tensor("rest_ids"), file.get_tensor("rest_num_bytes"))
            return PackerState(json.loads(file.metadata()["streams"]), rest)

    def _block(self, number: int) -> Any:
        """Open the file of a block, which is packed if it is missing or damaged."""
        path = self._path(number)
        while True:
            try:
                return safe_open(path, "numpy")
            except (FileNotFoundError, SafetensorError):
                path.unlink(missing_ok=True)
                retry_network(self._spec.shares[0].source, lambda: self._pack(number))

    def _pack(self, number: int) -> None:
        """Pack a block and the blocks before it that this requires."""
        first = next((n for n in range(number, 0, -1) if self._path(n - 1).exists()), 0)
        # Removed here, and not put back if reading fails: its open files are then unusable.
        packer = _packers.pop(self._folder, None)
        if packer is None or not first <= packer.number <= number:
            packer = Packer(self._spec, first, self.state_after(first - 1) if first else None)
        while packer.number <= number:
            self._write(packer.number, *packer.pack())
        _packers[self._folder] = packer
        while len(_packers) > _MAX_OPEN_PACKERS:
            _packers.popitem(last=False)

    def _write(self, number: int, tokens: Tokens, state: PackerState) -> None:
        shape = BLOCK, self._spec.length
        arrays = {
            "ids": tokens.ids.reshape(shape),
            "num_bytes": tokens.num_bytes.reshape(shape)[:, 1:].sum(axis=1, dtype=np.int64),
            "rest_ids": state.rest.ids,
            "rest_num_bytes": state.rest.num_bytes,
        }
        self._replace(self._path(number), arrays, {"streams": json.dumps(state.streams)})
        if number > KEPT_BLOCKS:
            self._path(number - KEPT_BLOCKS).unlink(missing_ok=True)

    def _replace(
        self, path: Path, arrays: Mapping[str, NDArray[Any]], metadata: dict[str, str]
    ) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
                written = Path(scratch, "block")
                contiguous = {k: np.ascontiguousarray(a) for k, a in arrays.items()}
                save_file(contiguous, written, metadata)
                written.replace(path)
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"cannot write packed text to {self._folder} ({error}); free disk space, or name "
                "another folder in the environment variable XDG_CACHE_HOME"
            ) from error

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.safetensors"


# The client's data.


class StreamedShard:
    """A client's endless sequences: step t takes ``batch_size`` of them from t * batch_size on.

    Raises ``ValueError`` if there is no text for the client.
    """

    num_examples: int
    """Sequences of the whole run, as the size of the text is unknown."""
    description: Mapping[str, int]
    """Text of the first block by domain, in UTF-8 bytes."""

    def __init__(self, config: Config, site: Site) -> None:
        self._config = config
        data, source = config.data, Source.of(config.data)
        if site.data_path:
            source = source.at_site(site.data_path)
        self._shares = client_shares(source, data.weights, data.partition, site)
        spec = PackingSpec(
            shares=tuple(self._shares),
            tokenizer=data.tokenizer,
            length=data.seq_len + 1,
            key=(config.run.seed, site.partition),
        )
        self._sequences = retry_network(source, lambda: PackedSequences(spec))
        self.num_examples = config.run.steps * data.batch_size
        streams = self._sequences.state_after(0).streams
        self.description = {
            share.domain: stream["num_bytes"]
            for share, stream in zip(self._shares, streams, strict=True)
        }

    def train_batch(self, step: int) -> TextBatch:
        """Return the batch of the step taken after ``step`` completed steps."""
        size = self._config.data.batch_size
        return self._sequences.batch(step * size, (step + 1) * size)

    def heldout(self) -> Iterable[TextBatch]:
        """Return held-out batches of the client's domains, in the proportions of their weights."""
        total = sum(share.weight for share in self._shares)
        return [
            batch
            for share in self._shares
            for batch in _domain_batches(
                self._config,
                share.source,
                share.domain,
                max(1, round(self._config.evaluation.sequences * share.weight / total)),
            )
        ]


def streamed_heldout(config: Config) -> dict[str, list[TextBatch]]:
    """Return held-out batches of every domain of the common source."""
    source = Source.of(config.data)
    sequences = config.evaluation.sequences
    return {n: _domain_batches(config, source, n, sequences) for n in domain_names(source)}


def _domain_batches(config: Config, source: Source, name: str, sequences: int) -> list[TextBatch]:
    data = config.data
    wanted = config.evaluation.sequences * (data.seq_len + 1)
    tokens = retry_network(source, lambda: _heldout(source, name, data.tokenizer, wanted))
    return heldout_batches(tokens, config, sequences)


@lru_cache(maxsize=64)
def _heldout(source: Source, name: str, tokenizer: str, wanted: int) -> Tokens:
    """Return the first held-out documents of a domain: ``wanted`` tokens or more, or all."""
    encode = load_tokenizer(tokenizer).encode_each
    found: list[Tokens] = []
    documents: list[str] = []
    for text in open_domain(source, name).heldout():
        documents.append(text)
        if len(documents) == _HELDOUT_CHUNK:
            found.extend(encode(documents))
            documents = []
            if sum(map(len, found)) >= wanted:
                break
    found.extend(encode(documents))
    if sum(map(len, found)) < 2:
        raise ValueError(
            f"{source}: no text of domain {name!r} is held out; leave it out of data.domains, or "
            "raise data.validation_fraction"
        )
    return joined(found)
