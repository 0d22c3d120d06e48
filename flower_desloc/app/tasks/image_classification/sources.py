"""Sources of labelled images: scikit-learn's digits, local files and data sets known by name."""

import glob
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from datasets import (
    Array2D,
    Array3D,
    ClassLabel,
    Features,
    Image,
    List,
    Value,
    load_dataset,
    load_dataset_builder,
)
from numpy.typing import NDArray

from flower_desloc.app.config.errors import one_line
from flower_desloc.app.tasks.caches import cache_error
from flower_desloc.app.tasks.empty_files import without_empty
from flower_desloc.app.tasks.missing import MissingValues, name_of, sorted_names
from flower_desloc.app.tasks.quiet import quiet
from flower_desloc.app.tasks.source import HELDOUT, Source, stated

_log = logging.getLogger(__name__)

StoredImage = Any
"""An image as its source stores it: the bytes or path of an encoded file, or an array."""


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Images as stored, and the number of each one's label."""

    images: Sequence[StoredImage]
    labels: NDArray[np.int64]
    column: Sequence[str] = ()
    """Each image's value in the column of the partition, if there is one."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class ImageCorpus:
    """The images of a source; ``names`` are those of the labels."""

    names: tuple[str, ...]
    train: LabelledImages
    heldout: LabelledImages


@lru_cache(maxsize=4)
def read(source: Source, names: tuple[str, ...] = ()) -> ImageCorpus:
    """Return the images of a source, read once in each process.

    Labels are numbered in the order of ``names``, by default in the source's own order.

    Raises ``ValueError`` if the source or a column is missing, a label is not among ``names``, or a
    part is empty; the message names the setting.
    """
    if source.source == "builtin" and source.column:
        raise ValueError(f"{stated('partition', source.column)}: {source} has no other columns")
    train, heldout = (_digits(), None) if source.source == "builtin" else _stored_parts(source)
    names = names or train.names or sorted_names({*train.labels, *(heldout or train).labels})
    if heldout is None:
        train, heldout = _split(train, _numbers(source, train, names), source.validation_fraction)
    elif not source.is_private and (unseen := {*heldout.labels} - {*train.labels}):
        listed = ", ".join(sorted_names(unseen))
        _log.warning("%s: labels of held-out images only, never trained on: %s", source, listed)
    parts = [
        LabelledImages(part.images, _numbers(source, part, names), part.column)
        for part in (train, heldout)
    ]
    for part, what in zip(parts, ("to train on", "held out"), strict=True):
        if not len(part):
            raise ValueError(
                f"{source}: no image is {what}; use more images, or another "
                f"data.validation_fraction than {source.validation_fraction}"
            )
    return ImageCorpus(names, *parts)


@dataclass(frozen=True, eq=False)
class _Stored:
    """One part of a source: images, the names of their labels, and the partition's column."""

    images: Sequence[StoredImage]
    labels: Sequence[str]
    column: Sequence[str] = ()
    names: tuple[str, ...] = ()
    """All labels in their order, if the source states it."""


def _digits() -> _Stored:
    """Return scikit-learn's 1797 handwritten digits of 8 x 8 pixels, in shades from 0 to 255."""
    # Imported here: it takes a second.
    from sklearn.datasets import load_digits

    bunch = load_digits()
    shades = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    return _Stored(shades, [str(name) for name in bunch.target])


def _split(part: _Stored, labels: NDArray[np.int64], fraction: float) -> tuple[_Stored, _Stored]:
    """Hold out the same fraction of every label, independent of the run's seed."""
    rng = np.random.default_rng(0)
    held = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        held[rows[: round(fraction * len(rows))]] = True
    train, heldout = (
        _Stored(
            [part.images[row] for row in rows],
            [part.labels[row] for row in rows],
            [part.column[row] for row in rows] if part.column else (),
        )
        for rows in (np.flatnonzero(~held).tolist(), np.flatnonzero(held).tolist())
    )
    return train, heldout


def _numbers(source: Source, part: _Stored, names: tuple[str, ...]) -> NDArray[np.int64]:
    number = {name: i for i, name in enumerate(names)}
    if unknown := set(part.labels) - number.keys():
        raise ValueError(
            f"{source}: the label {min(unknown)!r} is not among those of the run, "
            f"{', '.join(names)}"
        )
    return np.array([number[name] for name in part.labels], dtype=np.int64)


def _stored_parts(source: Source) -> tuple[_Stored, _Stored | None]:
    """Return the training part of a source, and its held-out part if it has one."""
    parts = _load(source)
    train = parts.get("train") or (next(iter(parts.values())) if len(parts) == 1 else None)
    if train is None:
        raise ValueError(f"{source}: it has no part 'train', only {', '.join(parts)}")
    heldout = next((parts[name] for name in HELDOUT if name in parts), None)
    has_heldout = heldout is not None and heldout is not train
    return _read_rows(source, train), _read_rows(source, heldout) if has_heldout else None


def _load(source: Source) -> Mapping[str, Any]:
    path = Path(source.source).expanduser().resolve()
    if path.exists():
        return _local_parts(source, path)
    name, _, config = source.source.partition(":")
    with _loading(source):
        return dict(load_dataset(name, config or None, streaming=source.streaming))


def _local_parts(source: Source, path: Path) -> Mapping[str, Any]:
    """Return the parts of a file or folder as streams: no copy of private images in a cache."""
    with _loading(source):
        opened = (
            load_dataset_builder("parquet", data_files=glob.escape(str(path)))
            if path.is_file()
            else load_dataset_builder(str(path))
        )
    parts: dict[Any, list[str]] = opened.config.data_files or {}
    files = [Path(file) for part in parts.values() for file in part if Path(file).is_file()]
    empty = {*files} - {*without_empty(source, files)}
    for name, part in [*parts.items()]:
        part[:] = [file for file in part if Path(file) not in empty]
        if not part:
            del parts[name]
    with _loading(source):
        return dict(opened.as_streaming_dataset())


@contextmanager
def _loading(source: Source) -> Iterator[None]:
    try:
        with quiet():
            yield
    except Exception as error:
        wrong = ValueError(
            f"{source}: neither `builtin`, nor a Parquet file or a folder of images here, nor a "
            f"data set that could be loaded ({one_line(error)})"
        )
        raise cache_error(error, wrong) from error


def _read_rows(source: Source, part: Any) -> _Stored:
    if part.features is None:
        raise ValueError(
            f"{source}: the columns of this stream are unknown; set data.streaming=false"
        )
    columns = {
        "image_field": _column(source, part.features, "image_field", source.image_field, _is_image),
        "label_field": _column(source, part.features, "label_field", source.label_field, _is_label),
    }
    if source.column:
        columns["partition"] = _column(source, part.features, "partition", source.column, _is_label)
    part = part.select_columns(list(dict.fromkeys(columns.values())))
    image, label = columns["image_field"], part.features[columns["label_field"]]
    if isinstance(part.features[image], Image):
        part = part.cast_column(image, Image(decode=False))
    missing = MissingValues(source, columns)
    found: dict[str, list[Any]] = {setting: [] for setting in columns}
    try:
        with quiet():
            for row in part:
                values = {
                    setting: _value(part.features[column], row[column])
                    for setting, column in columns.items()
                }
                if not missing.found(**values):
                    for setting, value in values.items():
                        found[setting].append(value)
    except Exception as error:
        wrong = ValueError(f"{source}: cannot be read ({one_line(error)})")
        raise cache_error(error, wrong) from error
    missing.refuse()
    labels, column = (
        [name_of(value) for value in found.get(setting, [])]
        for setting in ("label_field", "partition")
    )
    names = tuple(label.names) if isinstance(label, ClassLabel) else ()
    return _Stored(found["image_field"], labels, column, names)


def _value(feature: object, value: Any) -> Any:
    """Return a value as it is stored, of a class label its name."""
    if not isinstance(feature, ClassLabel):
        return value
    return None if value is None or value < 0 else feature.names[value]  # below zero: none


def _column(
    source: Source,
    features: Features,
    setting: str,
    named: str,
    fits: Callable[[object], bool],
) -> str:
    """Return the column that a setting names, otherwise the only one that fits."""
    if named:
        if named not in features:
            raise ValueError(
                f"{stated(setting, named)}: {source} has no such column; it has "
                f"{', '.join(features)}"
            )
        return named
    found = [str(name) for name, feature in features.items() if fits(feature)]
    # A class label is meant as one; a number or a text may be anything.
    found = [name for name in found if isinstance(features[name], ClassLabel)] or found
    if len(found) != 1:
        raise ValueError(
            f"data.{setting}: {source} has {len(found) or 'no'} columns that could be it; name one "
            f"of {', '.join(found or features)}"
        )
    return found[0]


def _is_image(feature: object) -> bool:
    rows = isinstance(feature, List) and isinstance(feature.feature, List)
    return rows or isinstance(feature, Image | Array2D | Array3D)


def _is_label(feature: object) -> bool:
    kinds = ("int", "uint", "string", "large_string", "bool")
    valued = isinstance(feature, Value) and feature.dtype.startswith(kinds)
    return valued or isinstance(feature, ClassLabel)
