"""Causal language models: next-token prediction on text."""

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from flower_desloc.config import Config
from flower_desloc.tasks import Site, Sums
from flower_desloc.tasks.causal_lm.activations import measured
from flower_desloc.tasks.causal_lm.batches import TextBatch, heldout_batches
from flower_desloc.tasks.causal_lm.model import build_model
from flower_desloc.tasks.causal_lm.shard import Shard
from flower_desloc.tasks.causal_lm.source import Source
from flower_desloc.tasks.causal_lm.streamed import StreamedShard, streamed_heldout
from flower_desloc.tasks.causal_lm.text import read
from flower_desloc.tasks.causal_lm.tokens import Tokens, load_tokenizer
from flower_desloc.tasks.compute import TrainingLoss, autocast, share_rows, to_device
from flower_desloc.tasks.quiet import quiet

__all__ = ["CausalLM", "TextBatch"]


class CausalLM:
    """The task ``causal_lm``.

    Losses are measured in nats. Per token they depend on the tokenizer; per byte of text they
    compare across tokenizers.

    Raises ``ValueError`` when there is no tokenizer of the configured name.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tokenizer = load_tokenizer(config.data.tokenizer)
        self._loss = TrainingLoss(_cross_entropy, config)

    def build_model(self) -> nn.Module:
        """Return a new model on the CPU; its weights are a function of the seed."""
        return build_model(
            self._config.model,
            vocab_size=self._vocab_size(),
            seq_len=self._config.data.seq_len,
            eos_id=self._tokenizer.eos_id,
            seed=self._config.run.seed,
        )

    def _vocab_size(self) -> int:
        wanted, least = self._config.model.vocab_size, self._tokenizer.vocab_size
        if self._config.model.config:
            return least
        if wanted is not None and wanted < least:
            raise ValueError(
                f"model.vocab_size={wanted}: data.tokenizer={self._config.data.tokenizer} has "
                f"{least} tokens; set at least that, or null"
            )
        return wanted or least

    def client_data(self, site: Site) -> Shard | StreamedShard:
        """Return the text of one client."""
        endless = Source.of(self._config.data).endless
        return StreamedShard(self._config, site) if endless else Shard(self._config, site)

    def heldout(self) -> Mapping[str, Iterable[TextBatch]]:
        """Return the held-out batches of every domain."""
        data = self._config.data
        if Source.of(data).endless:
            return streamed_heldout(self._config)
        return {
            domain: heldout_batches(
                tokens,
                seq_len=data.seq_len,
                batch_size=data.batch_size,
                sequences=self._config.evaluation.sequences,
            )
            for domain, tokens in _heldout(Source.of(data), data.tokenizer).items()
        }

    def loss(self, model: nn.Module, batch: TextBatch) -> Tensor:
        """Return the mean cross entropy in nats per token."""
        return self._loss(model, batch.tokens)

    def share(self, batch: TextBatch, rank: int, world: int) -> tuple[TextBatch, float]:
        """Return the sequences of one of several processes, and their weight in the loss."""
        (tokens,), weight = share_rows(rank, world, batch.tokens)
        return TextBatch(tokens, num_bytes=0), weight  # in training nobody asks for the bytes

    def evaluate(self, model: nn.Module, batches: Iterable[TextBatch]) -> Sums:
        """Return the nats, tokens and UTF-8 bytes of what is predicted in ``batches``.

        Beside them, the norms of the activations after the last block, summed over tokens.
        """
        sums = {"nats": 0.0, "tokens": 0.0, "bytes": 0.0}
        device = next(model.parameters()).device
        precision = autocast(self._config.model.precision, device)
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad(), precision, measured(model) as activations:
                for batch in batches:
                    tokens = to_device(batch.tokens, device)
                    sums["nats"] += _cross_entropy(model, tokens, "sum").item()
                    sums["tokens"] += batch.tokens[:, 1:].numel()
                    sums["bytes"] += batch.num_bytes
        finally:
            model.train(was_training)
        if activations.total:
            sums["activations"] = activations.total
        return sums

    def metrics(self, sums: Sums) -> Mapping[str, float]:
        """Return the loss in nats per token, its perplexity, and the loss per byte of text.

        ``activation_norm`` is the mean over tokens of the norm after the last block.
        """
        loss = _ratio(sums["nats"], sums["tokens"])
        nats_per_byte = _ratio(sums["nats"], sums["bytes"])
        metrics = {
            "loss": loss,
            "perplexity": _exp(loss),
            "nats_per_byte": nats_per_byte,
            "bits_per_byte": nats_per_byte / math.log(2),
        }
        if "activations" in sums:
            metrics["activation_norm"] = _ratio(sums["activations"], sums["tokens"])
        return metrics

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write what ``from_pretrained(folder)`` needs: weights, config and tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        with quiet():
            cast(PreTrainedModel, model).save_pretrained(folder)
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


def _cross_entropy(model: nn.Module, tokens: Tensor, reduction: str = "mean") -> Tensor:
    logits: Tensor = model(input_ids=tokens[:, :-1], use_cache=False).logits
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    return functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction=reduction
    )


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
