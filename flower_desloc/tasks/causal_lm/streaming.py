"""Streaming text: a client's sequences, packed during training, and the held-out text."""

from collections.abc import Iterable, Mapping
from functools import lru_cache

from flower_desloc.config import Config
from flower_desloc.tasks.causal_lm.batches import TextBatch, heldout_batches
from flower_desloc.tasks.causal_lm.document_streams import client_shares, domain_names, open_domain
from flower_desloc.tasks.causal_lm.packing import PackedSequences, PackingSpec
from flower_desloc.tasks.causal_lm.tokens import Tokens, joined, load_tokenizer
from flower_desloc.tasks.protocol import Site
from flower_desloc.tasks.retry import retry_network
from flower_desloc.tasks.source import Source

_HELDOUT_CHUNK = 16
"""Held-out documents tokenised at a time."""


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
