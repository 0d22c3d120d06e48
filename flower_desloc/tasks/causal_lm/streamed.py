"""One client's part of text that is read as it is trained on."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from flower_desloc.config import Config
from flower_desloc.tasks import Site
from flower_desloc.tasks.causal_lm.batches import TextBatch, heldout_batches
from flower_desloc.tasks.causal_lm.packing import Recipe
from flower_desloc.tasks.causal_lm.partition import parts
from flower_desloc.tasks.causal_lm.patience import patiently
from flower_desloc.tasks.causal_lm.sequences import Sequences
from flower_desloc.tasks.causal_lm.source import Source
from flower_desloc.tasks.causal_lm.stream import Part, domain, domain_names
from flower_desloc.tasks.causal_lm.tokens import Tokens, joined, load_tokenizer

_CHUNK = 16
"""Held-out documents tokenised at a time."""


class StreamedShard:
    """A client's sequences, which do not end: step t takes those from t * batch_size on.

    Raises ``ValueError`` where there is no text for the client.
    """

    num_examples: int
    """Sequences of the whole run: how many the text has is not known."""
    description: Mapping[str, int]
    """The first text that is packed, by domain, in UTF-8 bytes."""

    def __init__(self, config: Config, site: Site) -> None:
        data = config.data
        self._config = config
        source = Source.of(data)
        if site.data_path:
            source = source.at_site(site.data_path)
        elif not 0 <= site.partition < site.num_partitions:
            raise ValueError(
                f"partition-id={site.partition}: must be at least 0 and below "
                f"num-partitions={site.num_partitions}"
            )
        self._parts = patiently(source, lambda: parts(source, data.weights, data.partition, site))
        recipe = Recipe(
            parts=tuple(self._parts),
            tokenizer=data.tokenizer,
            length=data.seq_len + 1,
            key=(config.run.seed, site.partition),
        )
        self._sequences = patiently(source, lambda: Sequences(recipe))
        self.num_examples = config.run.steps * data.batch_size
        read = self._sequences.pause(1).read
        self.description = {p.domain: r.num_bytes for p, r in zip(self._parts, read, strict=True)}

    def train_batch(self, step: int) -> TextBatch:
        """Return the batch of the step taken after ``step`` completed steps."""
        size = self._config.data.batch_size
        return self._sequences.batch(step * size, (step + 1) * size)

    def heldout(self) -> Iterable[TextBatch]:
        """Return held-out batches of the client's domains, in their weights."""
        numbers = _shared(self._parts, self._config.evaluation.sequences)
        return [
            batch
            for part, number in zip(self._parts, numbers, strict=True)
            for batch in _batches(self._config, part.source, part.domain, number)
        ]


def streamed_heldout(config: Config) -> dict[str, list[TextBatch]]:
    """Return held-out batches of every domain of the common source."""
    source = Source.of(config.data)
    number = config.evaluation.sequences
    names = patiently(source, lambda: domain_names(source))
    return {name: _batches(config, source, name, number) for name in names}


def _shared(parts: Sequence[Part], number: int) -> list[int]:
    """Return how many held-out sequences each part has, in their weights, and at least one."""
    total = sum(part.weight for part in parts)
    return [max(1, round(number * part.weight / total)) for part in parts]


def _batches(config: Config, source: Source, name: str, sequences: int) -> list[TextBatch]:
    data = config.data
    wanted = config.evaluation.sequences * (data.seq_len + 1)
    tokens = patiently(source, lambda: _heldout(source, name, data.tokenizer, wanted))
    return heldout_batches(
        tokens, seq_len=data.seq_len, batch_size=data.batch_size, sequences=sequences
    )


@lru_cache(maxsize=64)
def _heldout(source: Source, name: str, tokenizer: str, wanted: int) -> Tokens:
    """Return the first held-out documents of a domain, of as many tokens as are wanted or more."""
    encode = load_tokenizer(tokenizer).encode_each
    found: list[Tokens] = []
    documents: list[str] = []
    for text in domain(source, name).heldout():
        documents.append(text)
        if len(documents) == _CHUNK:
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
