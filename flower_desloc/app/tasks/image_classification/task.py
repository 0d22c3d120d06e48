"""The task ``image_classification``: model, data, loss and metrics."""

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from flower_desloc.app.config import Config
from flower_desloc.app.tasks.compute import Evaluator, TrainingLoss, share_rows
from flower_desloc.app.tasks.image_classification.batches import (
    ImageBatch,
    ImageShard,
    common_shape,
    decode_rows,
    heldout_batches,
)
from flower_desloc.app.tasks.image_classification.model import build_model
from flower_desloc.app.tasks.image_classification.sources import read
from flower_desloc.app.tasks.protocol import Site, Sums
from flower_desloc.app.tasks.quiet import quiet
from flower_desloc.app.tasks.source import Source


class ImageClassification:
    """The task ``image_classification``.

    Pixels, bytes in the data, are scaled to -1..1. The common source determines the labels and the
    shape of the images, so every site reads it, also one with private images.
    """

    reads_data_path = True

    def __init__(self, config: Config) -> None:
        self._config = config
        self._loss = TrainingLoss(_cross_entropy, config)
        self._evaluation = Evaluator(_measure, config)

    def build_model(self) -> nn.Module:
        """Return a new model on the CPU; its weights are a function of the seed."""
        model: nn.Module = build_model(
            self._config.model,
            shape=common_shape(self._config),
            names=read(Source.of(self._config.data)).names,
            seed=self._config.run.seed,
        )
        return model

    def client_data(self, site: Site) -> ImageShard:
        """Return the images of one client."""
        return ImageShard(self._config, site)

    def heldout(self) -> Mapping[str, Iterable[ImageBatch]]:
        """Return the held-out batches of every label."""
        return {
            name: heldout_batches(images, self._config) for name, images in self._heldout.items()
        }

    def loss(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        """Return the mean cross entropy in nats per image."""
        return self._loss(model, batch.images, batch.labels)

    def share(self, batch: ImageBatch, rank: int, world: int) -> tuple[ImageBatch, float]:
        """Return the images for one of several processes, and their weight in the loss."""
        (images, labels), weight = share_rows(rank, world, batch.images, batch.labels)
        return ImageBatch(images, labels), weight

    def evaluate(self, model: nn.Module, batches: Iterable[ImageBatch]) -> Sums:
        """Return the nats, the correctly classified images and the images of ``batches``."""
        sums = {"nats": 0.0, "correct": 0.0, "images": 0.0}
        for batch in batches:
            for nats, correct in self._evaluation(model, batch.images, batch.labels):
                sums["nats"] += nats
                sums["correct"] += correct
            sums["images"] += len(batch.labels)
        return sums

    def metrics(self, sums: Sums) -> Mapping[str, float]:
        """Return the loss in nats per image, and the accuracy."""
        images = sums["images"] or math.nan
        return {"loss": sums["nats"] / images, "accuracy": sums["correct"] / images}

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write what ``from_pretrained(folder)`` needs: weights, config and image processor."""
        folder.mkdir(parents=True, exist_ok=True)
        shape = common_shape(self._config)
        half = [0.5] * shape.channels
        with quiet():
            # Imported here: without torchvision its import prints advice.
            from transformers import ViTImageProcessor

            cast(PreTrainedModel, model).save_pretrained(folder)
            ViTImageProcessor(
                size={"height": shape.height, "width": shape.width}, image_mean=half, image_std=half
            ).save_pretrained(folder)

    @cached_property
    def _heldout(self) -> dict[str, ImageBatch]:
        corpus = read(Source.of(self._config.data))
        labels = corpus.heldout.labels
        rows = {label: np.flatnonzero(labels == label).tolist() for label in np.unique(labels)}
        return {
            corpus.names[label]: decode_rows(self._config, corpus.heldout, mine)
            for label, mine in rows.items()
        }


def _cross_entropy(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(_logits(model, images), labels)


def _measure(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, int]:
    """Return the nats and the correctly classified images."""
    logits = _logits(model, images)
    nats = functional.cross_entropy(logits, labels, reduction="sum")
    return nats.item(), int((logits.argmax(-1) == labels).sum())


def _logits(model: nn.Module, images: Tensor) -> Tensor:
    dtype = next(model.parameters()).dtype
    logits: Tensor = model(pixel_values=images.to(dtype) / 127.5 - 1).logits
    return logits
