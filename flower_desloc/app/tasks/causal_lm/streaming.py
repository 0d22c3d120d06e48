"""Streaming text: documents of several domains, mixed by weight, packed into sequences in files."""

import hashlib
import json
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from flower_desloc.app.config import Config
from flower_desloc.app.tasks.causal_lm.batches import TextBatch, heldout_batches
from flower_desloc.app.tasks.causal_lm.document_streams import (
    DocumentStream,
    DomainShare,
    client_shares,
    domain_names,
    open_domain,
)
from flower_desloc.app.tasks.causal_lm.tokens import Tokens, joined, load_tokenizer
from flower_desloc.app.tasks.data_version import digest
from flower_desloc.app.tasks.protocol import Site
from flower_desloc.app.tasks.retry import retry_network
from flower_desloc.app.tasks.source import Source
from flower_desloc.flower.system import cache_folder

BLOCK = 1024
"""Sequences packed at a time; documents are shuffled within a block."""

KEPT_BLOCKS = 256
"""Blocks kept on disk: 1 GB, with sequences of 2048 tokens of two bytes."""

_MAX_OPEN_PACKERS = 4
"""Packers that a task keeps open; each holds rows in memory that it has read ahead."""

_HELDOUT_CHUNK = 16
"""Held-out documents tokenised at a time."""


@dataclass(frozen=True, kw_only=True)
class PackingSpec:
    """All settings that determine a client's sequences."""

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

    def __init__(self, spec: PackingSpec, number: int, state: PackerState | None) -> None:
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


OpenPackers = OrderedDict[Path, Packer]
"""The open packers of a task's clients, the least recently used first."""


class PackedSequences:
    """The sequences of a specification, packed when they are needed and cached on disk.

    Sequence n is the same in every process and after any loss of cached files. A file holds a block
    of ``BLOCK`` sequences and the packer's state after it. Files are written atomically and
    with the same content by every process, so no lock is needed. Old blocks are deleted and packed
    again when they are asked for; the first is kept, because every client is described by it.
    """

    def __init__(self, spec: PackingSpec, packers: OpenPackers) -> None:
        self._spec, self._packers = spec, packers
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
        packer = self._packers.pop(self._folder, None)
        if packer is None or not first <= packer.number <= number:
            packer = Packer(self._spec, first, self.state_after(first - 1) if first else None)
        while packer.number <= number:
            self._write(packer.number, *packer.pack())
        self._packers[self._folder] = packer
        while len(self._packers) > _MAX_OPEN_PACKERS:
            self._packers.popitem(last=False)

    def _write(self, number: int, tokens: Tokens, state: PackerState) -> None:
        shape = BLOCK, self._spec.length
        arrays = {
            "ids": tokens.ids.reshape(shape),
            "num_bytes": tokens.num_bytes.reshape(shape)[:, 1:].sum(axis=1, dtype=np.int64),
            "rest_ids": state.rest.ids,
            "rest_num_bytes": state.rest.num_bytes,
        }
        arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
                written = Path(scratch, "block")
                save_file(arrays, written, {"streams": json.dumps(state.streams)})
                written.replace(self._path(number))
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"cannot write packed text to {self._folder} ({error}); free disk space, or name "
                "another folder in the environment variable XDG_CACHE_HOME"
            ) from error
        if number > KEPT_BLOCKS:
            self._path(number - KEPT_BLOCKS).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.safetensors"


class StreamedShard:
    """A client's endless sequences: step t takes ``batch_size`` of them from t * batch_size on.

    Raises ``ValueError`` if there is no text for the client.
    """

    num_examples: int
    """Sequences of the whole run, as the size of the text is unknown."""
    description: Mapping[str, int]
    """Text of the first block by domain, in UTF-8 bytes."""

    def __init__(self, config: Config, site: Site, packers: OpenPackers) -> None:
        self._config = config
        data, source = config.data, Source.of(config.data)
        if site.data_path:
            source = source.at_site(site.data_path)
        self._shares = client_shares(source, data.weights, data.partition, site)
        spec = PackingSpec(
            shares=tuple(self._shares),
            tokenizer=data.tokenizer,
            length=data.seq_len + 1,
            key=(config.data_seed, site.partition),
        )
        self._sequences = retry_network(source, lambda: PackedSequences(spec, packers))
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

    def data_digest(self) -> str:
        """Return a digest of the first block, and of the sizes of all files."""
        sizes = [open_domain(share.source, share.domain).sizes for share in self._shares]
        return digest([self._sequences.batch(0, BLOCK), sizes])


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
            f"{source}: no text of domain {name!r} is held out; leave that domain out, add text, "
            "or raise data.validation_fraction"
        )
    return joined(found)
