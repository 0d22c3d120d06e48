"""The task ``causal_lm``: model, data, loss and metrics."""

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from flower_desloc.app.config import Config
from flower_desloc.app.tasks.causal_lm.batches import TextBatch, TextShard, heldout_batches
from flower_desloc.app.tasks.causal_lm.corpus import read
from flower_desloc.app.tasks.causal_lm.evaluation import measure
from flower_desloc.app.tasks.causal_lm.model import build_model
from flower_desloc.app.tasks.causal_lm.probe import training_loss
from flower_desloc.app.tasks.causal_lm.streaming import (
    OpenPackers,
    StreamedShard,
    streamed_heldout,
)
from flower_desloc.app.tasks.causal_lm.tokens import Tokens, load_tokenizer
from flower_desloc.app.tasks.compute import Evaluator, TrainingLoss, share_rows
from flower_desloc.app.tasks.protocol import Site, Sums
from flower_desloc.app.tasks.quiet import quiet
from flower_desloc.app.tasks.source import Source


class CausalLM:
    """The task ``causal_lm``.

    Losses are in nats. Losses per token depend on the tokenizer; losses per byte of text compare
    across tokenizers.

    Raises ``ValueError`` if there is no tokenizer of the configured name.
    """

    reads_data_path = True

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tokenizer = load_tokenizer(config.data.tokenizer)
        self._loss = TrainingLoss(training_loss, config)
        self._evaluation = Evaluator(measure, config)
        self._packers = OpenPackers()

    def build_model(self) -> nn.Module:
        """Return a new model on the CPU; its weights are a function of the seed."""
        model: nn.Module = build_model(
            self._config.model,
            vocab_size=self._vocab_size(),
            seq_len=self._config.data.seq_len,
            eos_id=self._tokenizer.eos_id,
            seed=self._config.run.seed,
        )
        return model

    def vocabulary_digest(self) -> str:
        """Return the digest of the tokenizer's vocabulary."""
        return self._tokenizer.vocabulary_digest()

    def _vocab_size(self) -> int:
        stated, least = self._config.model.vocab_size, self._tokenizer.vocab_size
        if self._config.model.config:
            return least
        if stated is not None and stated < least:
            raise ValueError(
                f"model.vocab_size={stated}: data.tokenizer={self._config.data.tokenizer} has "
                f"{least} tokens; set at least that, or null"
            )
        return stated or least

    def client_data(self, site: Site) -> TextShard | StreamedShard:
        """Return the text of one client."""
        if Source.of(self._config.data).endless:
            return StreamedShard(self._config, site, self._packers)
        return TextShard(self._config, site)

    def heldout(self) -> Mapping[str, Iterable[TextBatch]]:
        """Return the held-out batches of every domain."""
        source = Source.of(self._config.data)
        if source.endless:
            return streamed_heldout(self._config)
        return {
            domain: heldout_batches(tokens, self._config)
            for domain, tokens in _heldout(source, self._config.data.tokenizer).items()
        }

    def loss(self, model: nn.Module, batch: TextBatch) -> Tensor:
        """Return the mean cross entropy in nats per token."""
        return self._loss(model, batch.tokens)

    def share(self, batch: TextBatch, rank: int, world: int) -> tuple[TextBatch, float]:
        """Return the sequences for one of several processes, and their weight in the loss."""
        (tokens,), weight = share_rows(rank, world, batch.tokens)
        return TextBatch(tokens, num_bytes=0), weight  # training does not use num_bytes

    def evaluate(self, model: nn.Module, batches: Iterable[TextBatch]) -> Sums:
        """Return the nats, tokens and UTF-8 bytes of what is predicted in ``batches``.

        Also the sum over tokens of the norms of the last block's activations.
        """
        sums = {"nats": 0.0, "tokens": 0.0, "bytes": 0.0}
        norms: list[float] = []
        for batch in batches:
            for nats, norm in self._evaluation(model, batch.tokens):
                sums["nats"] += nats
                norms += [] if norm is None else [norm]
            sums["tokens"] += batch.tokens[:, 1:].numel()
            sums["bytes"] += batch.num_bytes
        return sums | ({"activations": sum(norms)} if sum(norms) else {})

    def metrics(self, sums: Sums) -> Mapping[str, float]:
        """Return the loss in nats per token, its perplexity, and the loss per byte of text.

        ``activation_norm`` is the mean over tokens of the norm after the last block.
        """
        tokens = sums["tokens"] or math.nan
        loss = sums["nats"] / tokens
        nats_per_byte = sums["nats"] / (sums["bytes"] or math.nan)
        metrics = {
            "loss": loss,
            "perplexity": _exp(loss),
            "nats_per_byte": nats_per_byte,
            "bits_per_byte": nats_per_byte / math.log(2),
        }
        if "activations" in sums:
            metrics["activation_norm"] = sums["activations"] / tokens
        return metrics

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write what ``from_pretrained(folder)`` needs: weights, config and tokenizer.

        Generated text ends with the model's window unless the caller asks for more: an architecture
        with learned positions has none beyond.
        """
        folder.mkdir(parents=True, exist_ok=True)
        trained = cast(PreTrainedModel, model)
        if trained.generation_config is not None:
            longest = getattr(trained.config, "max_position_embeddings", None)
            trained.generation_config.max_length = longest
        with quiet():
            trained.save_pretrained(folder)
            self._tokenizer.save(folder)


@lru_cache(maxsize=4)
def _heldout(source: Source, tokenizer: str) -> dict[str, Tokens]:
    corpus = read(source)
    texts: dict[str, list[str]] = {domain: [] for domain in corpus.domains}
    for text, domain in zip(corpus.heldout["text"][:], corpus.heldout["domain"][:], strict=True):
        texts[domain].append(text)
    encoded = {name: load_tokenizer(tokenizer).encode(text) for name, text in texts.items()}
    for name, tokens in encoded.items():
        if len(tokens) < 2:
            raise ValueError(
                f"{source}: the held-out part of domain {name!r} is shorter than two tokens; "
                "leave it out of data.domains, or raise data.validation_fraction"
            )
    return encoded


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
