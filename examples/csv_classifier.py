"""A text classifier on private CSV files with the columns text and label, one file at each site.

desloc federate csv_classifier.yaml --nodes 2 --data-path a.csv --data-path b.csv

Simulated clients share one file, here by the values of its column hospital:

desloc run csv_classifier.yaml data.source=all.csv data.partition=column:hospital
"""

import csv
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_model
from torch import nn
from torch.nn import functional

from flower_desloc.app.tasks.partition import PartitionRule, partition_rows

WORDS = 1024  # numbers that words are mapped to


class CSVClassifier:
    """The task: predict which of ``task_options.labels`` a text has, from its words."""

    reads_data_path = True

    def __init__(self, config):
        self.config, self.labels = config, list(config.task_options["labels"])

    def build_model(self):
        """Return the network; its weights are a function of the seed."""
        torch.manual_seed(self.config.run.seed)
        return nn.Sequential(
            nn.Linear(WORDS, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(32, len(self.labels)),
        )

    def client_data(self, site):
        """Read the site's own file, or its part of the file that simulated clients share."""
        path = site.data_path or Path(self.config.data.source)
        if not path.is_file():
            raise ValueError("csv_classifier: set data-path (desloc federate has --data-path)")
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
        if site.data_path is None:
            rows = self.part_of(rows, site)
        return Shard(self, path, rows)

    def part_of(self, rows, site):
        """Return the rows of one simulated client."""
        rule = PartitionRule.of(self.config)
        if rule.column not in ("", *rows[0]):
            raise ValueError(f"data.partition={rule.name}: there is only {', '.join(rows[0])}")
        labels, column = ([row.get(name) for row in rows] for name in ("label", rule.column))
        mine = partition_rows(labels, rule, site.num_partitions, column=column)[site.partition]
        return [rows[row] for row in sorted(mine)]

    def heldout(self):
        """Return nothing: the server has no data (``evaluation.central: false``)."""
        return {}

    def loss(self, model, batch):
        """Return the mean cross entropy of a batch."""
        words, labels = (part.to(next(model.parameters()).device) for part in batch)
        return functional.cross_entropy(model(words), labels)

    @torch.no_grad()
    def evaluate(self, model, batches):
        """Return totals, which add up over batches and clients."""
        sums = {"nats": 0.0, "correct": 0.0, "texts": 0.0}
        model.eval()
        for words, labels in batches:
            logits = model(words.to(next(model.parameters()).device)).cpu()
            sums["nats"] += functional.cross_entropy(logits, labels, reduction="sum").item()
            sums["correct"] += (logits.argmax(1) == labels).sum().item()
            sums["texts"] += len(labels)
        return sums

    def metrics(self, sums):
        """Return the metrics of the totals, ``loss`` among them."""
        texts = max(1.0, sums["texts"])
        return {"loss": sums["nats"] / texts, "accuracy": sums["correct"] / texts}

    def save(self, model, folder):
        """Write the weights."""
        folder.mkdir(parents=True, exist_ok=True)
        save_model(model, folder / "model.safetensors")


class Shard:
    """The texts of one client; every tenth is held out."""

    def __init__(self, task, path, rows):
        self.task = task
        # Not site.partition, which may be 0 at every site.
        self.seed = [task.config.data_seed, zlib.crc32(repr(rows).encode())]
        if unknown := {row["label"] for row in rows} - {*task.labels}:
            raise ValueError(f"{path}: task_options.labels lacks {sorted(unknown)}")
        self.words = torch.zeros(len(rows), WORDS)
        for counts, row in zip(self.words, rows, strict=True):
            for word in row["text"].lower().split():
                counts[zlib.crc32(word.encode()) % WORDS] += 1  # hash() differs between processes
        self.labels = torch.tensor([task.labels.index(row["label"]) for row in rows])
        held = np.arange(len(rows)) % 10 == 0
        self.train_rows, self.heldout_rows = np.flatnonzero(~held), np.flatnonzero(held)
        self.num_examples = len(self.train_rows)
        self.description = Counter(rows[i]["label"] for i in self.train_rows)
        if not self.num_examples:
            raise ValueError(f"{path}: it needs at least two rows")

    def train_batch(self, step):
        """Return the batch of a step: a function of seed, client and step."""
        draw = np.random.default_rng([*self.seed, step])
        rows = draw.choice(self.train_rows, self.task.config.data.batch_size)
        return self.words[rows], self.labels[rows]

    def heldout(self):
        """Return the batches this client evaluates on."""
        return [(self.words[self.heldout_rows], self.labels[self.heldout_rows])]
