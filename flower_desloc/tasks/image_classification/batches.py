"""Batches as pure functions of images and a key."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Images and what they show."""

    images: Tensor  # (batch, channel, row, column), uint8
    labels: Tensor  # (batch,), int64


@dataclass(frozen=True, eq=False)
class Images:
    """A part of the images, decoded."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: NDArray[np.int64]) -> ImageBatch:
        """Return a batch of those rows."""
        index = torch.from_numpy(rows)
        return ImageBatch(self.images[index], self.labels[index])


def shuffled_batch(images: Images, *, batch_size: int, step: int, key: Sequence[int]) -> ImageBatch:
    """Return the batch of a step: epoch after epoch, each in an order of its own.

    A batch may reach from one epoch into the next, so that all are of one size.
    """
    epochs, places = np.divmod(step * batch_size + np.arange(batch_size), len(images))
    rows = [
        np.random.default_rng([*key, epoch]).permutation(len(images))[places[epochs == epoch]]
        for epoch in np.unique(epochs)
    ]
    return images.take(np.concatenate(rows))


def heldout_batches(images: Images, *, batch_size: int, limit: int) -> list[ImageBatch]:
    """Return at most ``limit`` images (0: all), spread evenly, each once."""
    num = min(limit, len(images)) if limit else len(images)
    rows = np.arange(num) * len(images) // max(num, 1)
    return [images.take(rows[i : i + batch_size]) for i in range(0, num, batch_size)]
