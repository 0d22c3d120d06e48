"""One client's part of the text."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from datasets import Dataset

from flower_desloc.config import Config
from flower_desloc.tasks import Site
from flower_desloc.tasks.causal_lm.batches import TextBatch, heldout_batches, random_batch
from flower_desloc.tasks.causal_lm.partition import shares
from flower_desloc.tasks.causal_lm.source import Source
from flower_desloc.tasks.causal_lm.text import read
from flower_desloc.tasks.causal_lm.tokens import Tokens, load_tokenizer
from flower_desloc.tasks.dealing import Rule


class Shard:
    """A client's tokens, and the batches cut from them.

    Raises ``ValueError`` when they do not make one sequence.
    """

    num_examples: int
    """Training sequences that do not overlap."""
    description: Mapping[str, int]
    """Training text by domain, in UTF-8 bytes."""

    def __init__(self, config: Config, site: Site) -> None:
        self._config = config
        self._site = site
        data = config.data
        rule = Rule(data.partition, data.alpha, config.run.seed)
        self._text = _text(Source.of(data), rule, data.tokenizer, site)
        self._require_a_sequence()
        self.num_examples = len(self._text.train) // (data.seq_len + 1)
        self.description = self._text.num_bytes

    def train_batch(self, step: int) -> TextBatch:
        """Return the batch of the step taken after ``step`` completed steps."""
        data = self._config.data
        return random_batch(
            self._text.train,
            seq_len=data.seq_len,
            batch_size=data.batch_size,
            key=[self._config.run.seed, self._site.partition, step],
        )

    def heldout(self) -> Iterable[TextBatch]:
        """Return the batches of the client's held-out part."""
        data = self._config.data
        return heldout_batches(
            self._text.heldout,
            seq_len=data.seq_len,
            batch_size=data.batch_size,
            sequences=self._config.evaluation.sequences,
        )

    def _require_a_sequence(self) -> None:
        data, site = self._config.data, self._site
        if len(self._text.train) > data.seq_len and len(self._text.heldout) > 1:
            return
        who = (
            f"data-path={site.data_path}"
            if site.data_path
            else f"partition {site.partition} of {site.num_partitions} "
            f"(data.partition={data.partition}, data.source={data.source})"
        )
        more = (
            "more text" if site.data_path else "fewer clients (federation.num_clients), more text"
        )
        raise ValueError(
            f"{who} holds {len(self._text.train)} tokens to train on and "
            f"{len(self._text.heldout)} held out, and a sequence takes data.seq_len + 1 = "
            f"{data.seq_len + 1}; use {more} (data.max_bytes) or a smaller data.seq_len"
        )


@dataclass(frozen=True, eq=False)
class _Text:
    train: Tokens
    heldout: Tokens
    num_bytes: dict[str, int]


def _text(source: Source, rule: Rule, tokenizer: str, site: Site) -> _Text:
    if site.data_path:
        corpus = read(source.at_site(site.data_path))
        train, heldout = corpus.train, corpus.heldout
    else:
        if not 0 <= site.partition < site.num_partitions:
            raise ValueError(
                f"partition-id={site.partition}: must be at least 0 and below "
                f"num-partitions={site.num_partitions}"
            )
        corpus = read(source)
        share = shares(source, rule, site.num_partitions)[site.partition]
        train, heldout = corpus.train.select(share.train), corpus.heldout.select(share.heldout)
    encode = load_tokenizer(tokenizer).encode
    return _Text(encode(train["text"][:]), encode(heldout["text"][:]), _bytes(train))


def _bytes(documents: Dataset) -> dict[str, int]:
    num_bytes = Counter[str]()
    for text, domain in zip(documents["text"][:], documents["domain"][:], strict=True):
        num_bytes[domain] += len(text.encode())
    return dict(num_bytes)
