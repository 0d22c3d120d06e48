"""A small convolutional network on scikit-learn's digits: a model, data and metrics of one's own.

desloc run cnn.yaml
"""

from dataclasses import dataclass

import numpy as np
import torch
from safetensors.torch import save_model
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from flower_desloc.tasks.partition import PartitionRule, partition_rows


class CNN:
    """The task: which digit an image of 8 x 8 pixels shows."""

    def __init__(self, config):
        self.config = config
        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        self.labels = torch.tensor(digits.target)
        order = np.random.default_rng(config.run.seed).permutation(len(self.labels))
        cut = int(config.data.validation_fraction * len(order))
        self.heldout_rows, self.train_rows = order[:cut], order[cut:]

    def build_model(self):
        """Return the network; its weights are a function of the seed."""
        torch.manual_seed(self.config.run.seed)
        width = self.config.task_options["width"]
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 10),
        )

    def client_data(self, site):
        """Partition the training images as the section data states; return one client's."""
        labels = self.labels[self.train_rows].tolist()
        clients = partition_rows(labels, PartitionRule.of(self.config), site.num_partitions)
        return Shard(self, self.train_rows[clients[site.partition]], site.partition)

    def heldout(self):
        """Return the held-out batches of the only domain."""
        return {"digits": [self.batch(self.heldout_rows)]}

    def loss(self, model, batch):
        """Return the mean cross entropy of a batch."""
        images, labels = (part.to(next(model.parameters()).device) for part in batch)
        return functional.cross_entropy(model(images), labels)

    @torch.no_grad()
    def evaluate(self, model, batches):
        """Return totals, which add up over batches and clients."""
        sums = {"nats": 0.0, "correct": 0.0, "images": 0.0}
        model.eval()
        for images, labels in batches:
            logits = model(images.to(next(model.parameters()).device)).cpu()
            sums["nats"] += functional.cross_entropy(logits, labels, reduction="sum").item()
            sums["correct"] += (logits.argmax(1) == labels).sum().item()
            sums["images"] += len(labels)
        return sums

    def metrics(self, sums):
        """Return what the totals mean; ``loss`` must be there."""
        images = max(1.0, sums["images"])
        return {"loss": sums["nats"] / images, "accuracy": sums["correct"] / images}

    def save(self, model, folder):
        """Write the weights."""
        folder.mkdir(parents=True, exist_ok=True)
        save_model(model, folder / "model.safetensors")

    def batch(self, rows):
        """Return those images and their labels."""
        return self.images[rows], self.labels[rows]


@dataclass
class Shard:
    """One client's images; a tenth is held out."""

    task: CNN
    rows: np.ndarray
    partition: int

    def __post_init__(self):
        rows = np.random.default_rng(self.task.config.run.seed).permutation(self.rows)
        cut = 1 + len(rows) // 10
        self.heldout_rows, self.train_rows = rows[:cut], rows[cut:]
        self.num_examples = len(self.train_rows)
        digits, counts = np.unique(self.task.labels[self.train_rows], return_counts=True)
        self.description = {str(d): int(n) for d, n in zip(digits, counts, strict=True)}
        if not self.num_examples:
            raise ValueError("a client has no images; lower federation.num_clients")

    def train_batch(self, step):
        """Return the batch of a step: a function of seed, client and step."""
        config = self.task.config
        draw = np.random.default_rng([config.run.seed, self.partition, step])
        return self.task.batch(draw.choice(self.train_rows, config.data.batch_size))

    def heldout(self):
        """Return the batches this client evaluates on."""
        return [self.task.batch(self.heldout_rows)]
