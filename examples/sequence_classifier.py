"""A sequence classifier from transformers that predicts the domain of a document.

desloc run sequence_classifier.yaml
"""

import numpy as np
import torch
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification

from flower_desloc.app.tasks.causal_lm.corpus import read
from flower_desloc.app.tasks.partition import PartitionRule, partition_rows
from flower_desloc.app.tasks.source import Source

PAD = 256  # padding token; the other 256 are bytes


class SequenceClassifier:
    """The task: classify the documents of ``data.source``, as bytes, by domain."""

    def __init__(self, config):
        self.config = config
        corpus = read(Source.of(config.data))
        self.domains = corpus.domains
        self.train_part = self.encode(corpus.train)
        self.heldout_part = self.encode(corpus.heldout)

    def build_model(self):
        """Return a BERT with the sizes of the section model; the seed determines its weights."""
        torch.manual_seed(self.config.run.seed)
        model = self.config.model
        return BertForSequenceClassification(
            BertConfig(
                vocab_size=PAD + 1,
                pad_token_id=PAD,
                hidden_size=model.hidden_size,
                intermediate_size=model.intermediate_size,
                num_hidden_layers=model.num_hidden_layers,
                num_attention_heads=model.num_attention_heads,
                max_position_embeddings=self.config.data.seq_len,
                id2label=dict(enumerate(self.domains)),
            )
        )

    def client_data(self, site):
        """Partition the documents by the settings in data; return one client's."""
        rule, parts = PartitionRule.of(self.config), []
        for tokens, labels in (self.train_part, self.heldout_part):
            rows = partition_rows(labels.tolist(), rule, site.num_partitions)[site.partition]
            parts.append((tokens[rows], labels[rows]))
        return Shard(self, site.partition, *parts)

    def heldout(self):
        """Return the held-out batches of every domain."""
        tokens, labels = self.heldout_part
        return {
            name: self.batches(tokens[labels == number], labels[labels == number])
            for number, name in enumerate(self.domains)
        }

    def loss(self, model, batch):
        """Return the mean cross entropy of a batch."""
        tokens, labels = (part.to(model.device) for part in batch)
        return model(tokens, attention_mask=tokens != PAD, labels=labels).loss

    @torch.no_grad()
    def evaluate(self, model, batches):
        """Return totals, which add up over batches and clients."""
        sums = {"nats": 0.0, "correct": 0.0, "documents": 0.0}
        model.eval()
        for batch in batches:
            tokens, labels = (part.to(model.device) for part in batch)
            logits = model(tokens, attention_mask=tokens != PAD).logits
            sums["nats"] += functional.cross_entropy(logits, labels, reduction="sum").item()
            sums["correct"] += (logits.argmax(1) == labels).sum().item()
            sums["documents"] += len(labels)
        return sums

    def metrics(self, sums):
        """Return the metrics of the totals, ``loss`` among them."""
        documents = max(1.0, sums["documents"])
        return {"loss": sums["nats"] / documents, "accuracy": sums["correct"] / documents}

    def save(self, model, folder):
        """Write weights and configuration, for ``from_pretrained``."""
        model.save_pretrained(folder)

    def encode(self, documents):
        """Return the documents' first bytes, (document, seq_len), and the indices of domains."""
        length = self.config.data.seq_len
        tokens = torch.full((len(documents), length), PAD)
        for row, text in zip(tokens, documents["text"][:], strict=True):
            start = torch.tensor(list(text.encode()[:length]))
            row[: len(start)] = start
        labels = [self.domains.index(name) for name in documents["domain"][:]]
        return tokens, torch.tensor(labels)

    def batches(self, tokens, labels):
        """Return the first ``evaluation.sequences`` documents, in batches."""
        count, size = self.config.evaluation.sequences, self.config.data.batch_size
        return zip(tokens[:count].split(size), labels[:count].split(size), strict=True)


class Shard:
    """One client's documents."""

    def __init__(self, task, partition, train, heldout):
        self.task, self.partition, self.train, self.held = task, partition, train, heldout
        self.num_examples = len(train[1])
        counts = np.bincount(train[1], minlength=len(task.domains)).tolist()
        self.description = {name: n for name, n in zip(task.domains, counts, strict=True) if n}
        if not self.num_examples or not len(heldout[1]):
            raise ValueError("a client has no text; lower simulation.num_clients")

    def train_batch(self, step):
        """Return the batch of a step: a function of seed, client and step."""
        config = self.task.config
        draw = np.random.default_rng([config.data_seed, self.partition, step])
        rows = torch.from_numpy(draw.integers(self.num_examples, size=config.data.batch_size))
        return self.train[0][rows], self.train[1][rows]

    def heldout(self):
        """Return the batches this client evaluates on."""
        return self.task.batches(*self.held)
