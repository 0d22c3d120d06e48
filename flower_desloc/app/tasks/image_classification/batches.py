"""Images as tensors, batches of them, and which client gets which."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import datasets
import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_desloc.app.config import Config
from flower_desloc.app.tasks.data_version import digest
from flower_desloc.app.tasks.image_classification.sources import (
    ImageCorpus,
    LabelledImages,
    StoredImage,
    read,
)
from flower_desloc.app.tasks.partition import (
    ClientRows,
    PartitionRule,
    Rows,
    deal_by_value,
    fill_empty_clients,
    lend_heldout,
    partition_rows,
)
from flower_desloc.app.tasks.protocol import FEWER_CLIENTS, Site
from flower_desloc.app.tasks.source import Source

_KEPT = 1 << 30
"""Bytes of images that are kept once they were decoded alone."""
_DIGESTED = 1000
"""Images of each part that a client's digest covers."""


@dataclass(frozen=True)
class ImageShape:
    """The shape of all images of a run."""

    channels: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.width} x {self.height} pixels"


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Decoded images and their labels."""

    images: Tensor  # (image, channel, row, column), uint8
    labels: Tensor  # (image,), int64

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, rows: NDArray[np.int64]) -> "ImageBatch":
        """Return a batch of those rows."""
        index = torch.from_numpy(rows)
        return ImageBatch(self.images[index], self.labels[index])


def shuffled_batch(
    images: ImageBatch, *, batch_size: int, step: int, key: Sequence[int]
) -> ImageBatch:
    """Return the batch of a step; every epoch has an order of its own.

    A batch may span two epochs, so that all batches have one size.
    """
    epochs, places = np.divmod(step * batch_size + np.arange(batch_size), len(images))
    rows = [
        np.random.default_rng([*key, epoch]).permutation(len(images))[places[epochs == epoch]]
        for epoch in np.unique(epochs)
    ]
    return images.rows(np.concatenate(rows))


def heldout_batches(images: ImageBatch, config: Config) -> list[ImageBatch]:
    """Return at most ``evaluation.images`` images (0: all), spread evenly, each once."""
    limit, size = config.evaluation.images, config.data.batch_size
    num = min(limit, len(images)) if limit else len(images)
    rows = np.arange(num) * len(images) // max(num, 1)
    return [images.rows(rows[i : i + size]) for i in range(0, num, size)]


class ImageShard:
    """A client's images, and the batches made of them.

    Raises ``ValueError`` if it has no images to train on, or none held out.
    """

    num_examples: int
    """Training images."""
    description: Mapping[str, int]
    """Training images by label."""

    def __init__(self, config: Config, site: Site) -> None:
        self._config = config
        self._site = site
        corpus, rows = _client_images(config, site)
        if not rows.train or not rows.heldout:
            fewer = "" if site.data_path else f"{FEWER_CLIENTS}, "
            other = "larger" if rows.train else "smaller"
            raise ValueError(
                f"{site.describe(config.data)} holds {len(rows.train)} images to train on and "
                f"{len(rows.heldout)} held out; use {fewer}more images, or a {other} "
                "data.validation_fraction"
            )
        self._corpus, self._rows = corpus, rows
        self._decoded: dict[int, Tensor] = {}  # by row
        labels = corpus.train.labels[rows.train]
        self.num_examples = len(labels)
        counts = np.bincount(labels, minlength=len(corpus.names)).tolist()
        self.description = {
            n: count for n, count in zip(corpus.names, counts, strict=True) if count
        }

    def train_batch(self, step: int) -> ImageBatch:
        """Return the batch of the step taken after ``step`` completed steps."""
        return shuffled_batch(
            self._train,
            batch_size=self._config.data.batch_size,
            step=step,
            key=[self._config.data_seed, self._site.partition],
        )

    def examples(self, numbers: Sequence[int]) -> ImageBatch:
        """Return copies of training images.

        Each is decoded alone: one that cannot be decoded is no other's fault.
        """
        rows = [self._rows.train[number] for number in numbers]
        labels = torch.from_numpy(self._corpus.train.labels[rows])
        return ImageBatch(torch.stack([self._image(row) for row in rows]), labels)

    def heldout(self) -> Iterable[ImageBatch]:
        """Return the batches of the client's held-out part."""
        return heldout_batches(self._heldout, self._config)

    def data_digest(self) -> str:
        """Return a digest of the client's rows and labels, and of a sample of its images."""
        parts = (self._corpus.train, self._rows.train), (self._corpus.heldout, self._rows.heldout)
        return digest(
            [
                np.array(rows),
                part.labels[rows],
                [_stored(part.images[row]) for row in _spread(rows)],
            ]
            for part, rows in parts
        )

    # Decoded when first used: the client's description needs the labels only.

    @cached_property
    def _train(self) -> ImageBatch:
        return decode_rows(self._config, self._corpus.train, self._rows.train)

    def _image(self, row: int) -> Tensor:
        """Return an image, which is kept while there is room."""
        if row in self._decoded:
            return self._decoded[row]
        image: Tensor = decode_rows(self._config, self._corpus.train, [row]).images[0]
        if (len(self._decoded) + 1) * image.nbytes <= _KEPT:
            self._decoded[row] = image
        return image

    @cached_property
    def _heldout(self) -> ImageBatch:
        return decode_rows(self._config, self._corpus.heldout, self._rows.heldout)


def _client_images(config: Config, site: Site) -> tuple[ImageCorpus, ClientRows]:
    source = Source.of(config.data)
    corpus = read(source)
    if site.data_path:
        private = read(source.at_site(site.data_path), corpus.names)
        everything = (list(range(len(part))) for part in (private.train, private.heldout))
        return private, ClientRows(*everything)
    rows = client_rows(source, PartitionRule.of(config), site.num_partitions)[site.partition]
    return corpus, rows


@lru_cache(maxsize=8)
def client_rows(source: Source, rule: PartitionRule, num_clients: int) -> list[ClientRows]:
    """Return every client's images of a source.

    Each training image goes to one client. The held-out images of a label are dealt in the
    proportions of its training images, so that a client is tested on what it trains on; those of a
    column's value go to the clients of that value. A client that would get none is given one of
    each of its labels, which then serve several clients.

    Raises ``ValueError`` if there are more clients than training images, or the rule cannot be
    kept.
    """
    corpus = read(source)
    if num_clients > len(corpus.train):
        raise ValueError(
            f"{source}: it has only {len(corpus.train)} images to train on for {num_clients} "
            f"clients; use {FEWER_CLIENTS}"
        )
    labels, heldout_labels = corpus.train.labels, corpus.heldout.labels
    column = corpus.train.column
    train = partition_rows(labels.tolist(), rule, num_clients, column=column)
    if rule.name == "dirichlet":
        fill_empty_clients(train)
    if rule.column:
        heldout = deal_by_value(corpus.heldout.column, rule, num_clients, values=column)
    else:
        heldout = _in_proportion(heldout_labels, [labels[rows] for rows in train])
    return lend_heldout(train, heldout, labels.tolist(), heldout_labels.tolist())


def _in_proportion(heldout: NDArray[np.int64], clients: list[NDArray[np.int64]]) -> list[Rows]:
    dealt: list[Rows] = [[] for _ in clients]
    for label in np.unique(heldout):
        rows = np.flatnonzero(heldout == label)
        held = np.cumsum([np.count_nonzero(labels == label) for labels in clients])
        ends = np.rint(held / max(held[-1], 1) * len(rows)).astype(int)
        for mine, part in zip(dealt, np.split(rows, ends[:-1]), strict=True):
            mine.extend(part.tolist())
    return dealt


def common_shape(config: Config) -> ImageShape:
    """Return the shape of the run's images: the first image's, or ``data.image_size``."""
    return _shape(Source.of(config.data), config.data.image_size)


@lru_cache(maxsize=8)
def _shape(source: Source, side: int | None) -> ImageShape:
    picture = _picture(read(source).train.images[0])
    width, height = (side, side) if side else picture.size
    return ImageShape(1 if picture.mode == "L" else 3, height, width)


def decode_rows(config: Config, part: LabelledImages, rows: Rows) -> ImageBatch:
    """Decode images to uint8 of (image, channel, row, column), in grey or colour as the first.

    Raises ``ValueError`` if images differ in size and ``data.image_size`` is null.
    """
    shape = common_shape(config)
    mode, size = ("L" if shape.channels == 1 else "RGB"), (shape.width, shape.height)
    arrays = []
    for row in rows:
        picture = _picture(part.images[row]).convert(mode)
        if picture.size != size:
            if not config.data.image_size:
                raise ValueError(
                    f"data.image_size=null: there is an image of {picture.width} x "
                    f"{picture.height} pixels and one of {shape}; set it to the side that all "
                    "images are resized to"
                )
            picture = picture.resize(size, PIL.Image.Resampling.BILINEAR)
        arrays.append(np.asarray(picture).reshape(shape.height, shape.width, shape.channels))
    # Copied, because indexing a view of a transposed array is slow.
    images = torch.from_numpy(np.stack(arrays).transpose(0, 3, 1, 2).copy())
    return ImageBatch(images, torch.from_numpy(part.labels[rows]))


def _spread(rows: Rows) -> Rows:
    """Return at most ``_DIGESTED`` of the rows, evenly spread."""
    return rows[:: -(-len(rows) // _DIGESTED)]


def _stored(image: StoredImage) -> object:
    """Return what tells images apart, without decoding them."""
    if isinstance(image, Mapping):  # the bytes of a file, or its path
        file = Path(image["path"] or "")
        return image["bytes"] or (file.name, file.stat().st_size if file.is_file() else 0)
    return image


def _picture(image: StoredImage) -> PIL.Image.Image:
    """Return an image in grey (L) or in colour (RGB)."""
    if isinstance(image, Mapping):
        decoded = datasets.Image().decode_example(dict(image))
    elif isinstance(image, bytes):
        decoded = datasets.Image().decode_example({"bytes": image, "path": None})
    else:
        decoded = PIL.Image.fromarray(_as_bytes(np.asarray(image)))
    picture: PIL.Image.Image = decoded
    return picture.convert("L" if picture.mode in ("1", "L", "I;16") else "RGB")


def _as_bytes(array: np.ndarray) -> np.ndarray:
    if array.ndim == 3 and array.shape[0] in (1, 3) and array.shape[2] not in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] != 3):
        raise ValueError(f"data.image_field: an array of shape {array.shape} is not an image")
    if array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 255:
        raise ValueError("data.image_field: its arrays must hold whole numbers from 0 to 255")
    return array.astype(np.uint8)
