"""One client's part of the images."""

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from flower_desloc.config import Config
from flower_desloc.tasks import Site
from flower_desloc.tasks.dealing import Rows, Rule
from flower_desloc.tasks.image_classification.batches import (
    ImageBatch,
    Images,
    heldout_batches,
    shuffled_batch,
)
from flower_desloc.tasks.image_classification.corpus import Corpus, Part, read
from flower_desloc.tasks.image_classification.partition import Share, shares
from flower_desloc.tasks.image_classification.pixels import Shape, decode
from flower_desloc.tasks.image_classification.source import Source


class Shard:
    """A client's images, and the batches made of them.

    Raises ``ValueError`` when it has none to train on, or none held out.
    """

    num_examples: int
    """Training images."""
    description: Mapping[str, int]
    """Training images by label."""

    def __init__(self, config: Config, site: Site) -> None:
        self._config = config
        self._site = site
        corpus, share = _share(config, site)
        if not share.train or not share.heldout:
            who = (
                f"data-path={site.data_path}"
                if site.data_path
                else f"partition {site.partition} of {site.num_partitions} "
                f"(data.partition={config.data.partition}, data.source={config.data.source})"
            )
            raise ValueError(
                f"{who} holds {len(share.train)} images to train on and {len(share.heldout)} held "
                "out; use fewer clients (federation.num_clients) or a larger "
                "data.validation_fraction"
            )
        self._corpus, self._share = corpus, share
        self._parts: dict[str, Images] = {}
        labels = corpus.train.labels[share.train]
        self.num_examples = len(labels)
        self.description = {
            name: count
            for name, count in zip(
                corpus.names, np.bincount(labels, minlength=len(corpus.names)).tolist(), strict=True
            )
            if count
        }

    def train_batch(self, step: int) -> ImageBatch:
        """Return the batch of the step taken after ``step`` completed steps."""
        return shuffled_batch(
            self._images("train"),
            batch_size=self._config.data.batch_size,
            step=step,
            key=[self._config.run.seed, self._site.partition],
        )

    def heldout(self) -> Iterable[ImageBatch]:
        """Return the batches of the client's held-out part."""
        return heldout_batches(
            self._images("heldout"),
            batch_size=self._config.data.batch_size,
            limit=self._config.evaluation.images,
        )

    def _images(self, part: str) -> Images:
        # Decoded when first used: what a client says of itself takes the labels only.
        if part not in self._parts:
            rows: Rows = getattr(self._share, part)
            self._parts[part] = decoded(self._config, getattr(self._corpus, part), rows)
        return self._parts[part]


def decoded(config: Config, part: Part, rows: Rows) -> Images:
    """Return those rows of a part as the model takes them."""
    side = config.data.image_size
    return Images(
        decode(
            (part.examples.images[row] for row in rows), common_shape(config), resize=bool(side)
        ),
        torch.from_numpy(part.labels[rows]),
    )


def common_shape(config: Config) -> Shape:
    """Return the shape of the run's images: the first one's, or ``data.image_size``."""
    first = read(Source.of(config.data)).train.examples.images[0]
    return Shape.of(first, config.data.image_size)


def _share(config: Config, site: Site) -> tuple[Corpus, Share]:
    source = Source.of(config.data)
    corpus = read(source)
    if site.data_path:
        private = read(source.at_site(site.data_path), corpus.names)
        everything = (list(range(len(part))) for part in (private.train, private.heldout))
        return private, Share(*everything)
    if not 0 <= site.partition < site.num_partitions:
        raise ValueError(
            f"partition-id={site.partition}: must be at least 0 and below "
            f"num-partitions={site.num_partitions}"
        )
    data = config.data
    rule = Rule(data.partition, data.alpha, config.run.seed, data.classes_per_client)
    return corpus, shares(source, rule, site.num_partitions)[site.partition]
