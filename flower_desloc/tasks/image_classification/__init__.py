"""Image classification: which of a few things an image shows."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from flower_desloc.config import Config
from flower_desloc.tasks import Site, Sums
from flower_desloc.tasks.compute import TrainingLoss, autocast, share_rows, to_device
from flower_desloc.tasks.image_classification.batches import (
    ImageBatch,
    Images,
    heldout_batches,
)
from flower_desloc.tasks.image_classification.corpus import read
from flower_desloc.tasks.image_classification.model import build_model
from flower_desloc.tasks.image_classification.shard import Shard, common_shape, decoded
from flower_desloc.tasks.image_classification.source import Source
from flower_desloc.tasks.quiet import quiet

__all__ = ["ImageBatch", "ImageClassification"]


class ImageClassification:
    """The task ``image_classification``.

    A model sees every byte of an image scaled to -1..1, the same at every site.

    The common source says which labels there are and what shape the images have, so that every
    site reads it, one with private images too.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._heldout: dict[str, Images] | None = None
        self._loss = TrainingLoss(_cross_entropy, config)

    def build_model(self) -> nn.Module:
        """Return a new model on the CPU; its weights are a function of the seed."""
        return build_model(
            self._config.model,
            shape=common_shape(self._config),
            names=read(Source.of(self._config.data)).names,
            seed=self._config.run.seed,
        )

    def client_data(self, site: Site) -> Shard:
        """Return the images of one client."""
        return Shard(self._config, site)

    def heldout(self) -> Mapping[str, Iterable[ImageBatch]]:
        """Return the held-out batches of every label."""
        if self._heldout is None:
            self._heldout = self._by_label()
        return {
            name: heldout_batches(
                images,
                batch_size=self._config.data.batch_size,
                limit=self._config.evaluation.images,
            )
            for name, images in self._heldout.items()
        }

    def loss(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        """Return the mean cross entropy in nats per image."""
        return self._loss(model, batch.images, batch.labels)

    def share(self, batch: ImageBatch, rank: int, world: int) -> tuple[ImageBatch, float]:
        """Return the images of one of several processes, and their weight in the loss."""
        (images, labels), weight = share_rows(rank, world, batch.images, batch.labels)
        return ImageBatch(images, labels), weight

    def evaluate(self, model: nn.Module, batches: Iterable[ImageBatch]) -> Sums:
        """Return the nats, the images recognised and the images of ``batches``."""
        sums = {"nats": 0.0, "correct": 0.0, "images": 0.0}
        device = next(model.parameters()).device
        precision = autocast(self._config.model.precision, device)
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad(), precision:
                for batch in batches:
                    labels = to_device(batch.labels, device)
                    logits = _logits(model, to_device(batch.images, device))
                    nats = functional.cross_entropy(logits, labels, reduction="sum")
                    sums["nats"] += nats.item()
                    sums["correct"] += (logits.argmax(-1) == labels).sum().item()
                    sums["images"] += len(labels)
        finally:
            model.train(was_training)
        return sums

    def metrics(self, sums: Sums) -> Mapping[str, float]:
        """Return the loss in nats per image, and the share of images recognised."""
        images = sums["images"] or math.nan
        return {"loss": sums["nats"] / images, "accuracy": sums["correct"] / images}

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write what ``from_pretrained(folder)`` needs: weights, config and image processor."""
        folder.mkdir(parents=True, exist_ok=True)
        shape = common_shape(self._config)
        half = [0.5] * shape.channels
        with quiet():
            # Imported here, for without torchvision it gives advice.
            from transformers import ViTImageProcessor

            cast(PreTrainedModel, model).save_pretrained(folder)
            ViTImageProcessor(
                size={"height": shape.height, "width": shape.width}, image_mean=half, image_std=half
            ).save_pretrained(folder)

    def _by_label(self) -> dict[str, Images]:
        corpus = read(Source.of(self._config.data))
        rows = {
            name: np.flatnonzero(corpus.heldout.labels == number).tolist()
            for number, name in enumerate(corpus.names)
        }
        return {
            name: decoded(self._config, corpus.heldout, mine) for name, mine in rows.items() if mine
        }


def _cross_entropy(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(_logits(model, images), labels)


def _logits(model: nn.Module, images: Tensor) -> Tensor:
    dtype = next(model.parameters()).dtype
    logits: Tensor = model(pixel_values=images.to(dtype) / 127.5 - 1).logits
    return logits
