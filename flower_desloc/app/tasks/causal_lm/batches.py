"""Batches of text that fits into memory: pure functions of tokens and a key."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor

from flower_desloc.app.config import Config
from flower_desloc.app.tasks.causal_lm.corpus import client_rows, read
from flower_desloc.app.tasks.causal_lm.tokens import Tokens, load_tokenizer
from flower_desloc.app.tasks.data_version import digest
from flower_desloc.app.tasks.partition import PartitionRule
from flower_desloc.app.tasks.protocol import FEWER_CLIENTS, MORE_TEXT, Site
from flower_desloc.app.tasks.source import Source


@dataclass(frozen=True, eq=False)
class TextBatch:
    """Sequences of tokens; each token except a sequence's first is predicted from those before."""

    tokens: Tensor  # (batch, seq_len + 1), int64
    num_bytes: int
    """UTF-8 bytes that the predicted tokens stand for."""


def random_batch(tokens: Tokens, *, seq_len: int, batch_size: int, key: Sequence[int]) -> TextBatch:
    """Return sequences at random offsets of at least ``seq_len + 1`` tokens."""
    starts = np.random.default_rng(key).integers(len(tokens) - seq_len, size=batch_size)
    return _sequences(tokens, starts, seq_len + 1)


def heldout_batches(
    tokens: Tokens, config: Config, sequences: int | None = None
) -> list[TextBatch]:
    """Return sequences that do not overlap, spread evenly over at least two tokens.

    At most ``sequences``, by default ``evaluation.sequences``. Text shorter than a sequence is one
    shorter sequence.
    """
    limit = config.evaluation.sequences if sequences is None else sequences
    length = min(config.data.seq_len + 1, len(tokens))
    available = len(tokens) // length
    num, size = min(limit, available), config.data.batch_size
    starts = np.arange(num) * available // num * length
    return [_sequences(tokens, starts[i : i + size], length) for i in range(0, num, size)]


def _sequences(tokens: Tokens, starts: NDArray[Any], length: int) -> TextBatch:
    index = starts[:, None] + np.arange(length)
    return TextBatch(
        torch.from_numpy(tokens.ids[index].astype(np.int64)),
        int(tokens.num_bytes[index[:, 1:]].sum()),
    )


class TextShard:
    """A client's tokens, and the batches cut from them.

    Raises ``ValueError`` if the tokens are fewer than one sequence.
    """

    num_examples: int
    """Training sequences that do not overlap."""
    description: Mapping[str, int]
    """Training text by domain, in UTF-8 bytes."""

    def __init__(self, config: Config, site: Site) -> None:
        self._config = config
        self._site = site
        data = config.data
        train, heldout = _client_documents(config, site)
        encode = load_tokenizer(data.tokenizer).encode
        self._train, self._heldout = encode(train["text"][:]), encode(heldout["text"][:])
        if len(self._train) <= data.seq_len or len(self._heldout) < 2:
            more = MORE_TEXT if site.data_path else f"{FEWER_CLIENTS}, {MORE_TEXT}"
            or_else = "smaller data.seq_len"
            if len(self._heldout) < 2:
                or_else = "larger data.validation_fraction"
            raise ValueError(
                f"{site.describe(data)} holds {len(self._train)} tokens to train on and "
                f"{len(self._heldout)} held out, and a sequence takes data.seq_len + 1 = "
                f"{data.seq_len + 1}; use {more}, or a {or_else}"
            )
        self.num_examples = len(self._train) // (data.seq_len + 1)
        num_bytes = Counter[str]()
        for text, domain in zip(train["text"][:], train["domain"][:], strict=True):
            num_bytes[domain] += len(text.encode())
        self.description = dict(num_bytes)

    def train_batch(self, step: int) -> TextBatch:
        """Return the batch of the step taken after ``step`` completed steps."""
        data = self._config.data
        return random_batch(
            self._train,
            seq_len=data.seq_len,
            batch_size=data.batch_size,
            key=[self._config.data_seed, self._site.partition, step],
        )

    def examples(self, numbers: Sequence[int]) -> TextBatch:
        """Return training sequences, which do not overlap."""
        length = self._config.data.seq_len + 1
        return _sequences(self._train, np.asarray(numbers, np.int64) * length, length)

    def heldout(self) -> Iterable[TextBatch]:
        """Return the batches of the client's held-out part."""
        return heldout_batches(self._heldout, self._config)

    def data_digest(self) -> str:
        """Return a digest of the client's tokens."""
        return digest([self._train.ids, self._heldout.ids])


def _client_documents(config: Config, site: Site) -> tuple[Dataset, Dataset]:
    source = Source.of(config.data)
    if site.data_path:
        private = read(source.at_site(site.data_path))
        return private.train, private.heldout
    corpus = read(source)
    rows = client_rows(source, PartitionRule.of(config), site.num_partitions)[site.partition]
    return corpus.train.select(rows.train), corpus.heldout.select(rows.heldout)
