"""Images that the ``datasets`` library reads: files here, or a data set it knows by name."""

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Array2D, Array3D, ClassLabel, Features, Image, List, Value, load_dataset

from flower_desloc.tasks.image_classification.examples import Examples
from flower_desloc.tasks.image_classification.source import Source
from flower_desloc.tasks.quiet import quiet

_HELDOUT = ("validation", "valid", "test")


def examples(source: Source) -> tuple[Examples, Examples | None]:
    """Return the training part of a source, and its held-out part where it has one.

    Raises ``ValueError``, naming the setting, where the source or a column cannot be found.
    """
    parts = _load(source)
    train = parts.get("train") or (next(iter(parts.values())) if len(parts) == 1 else None)
    if train is None:
        raise ValueError(f"{source}: it has no part 'train', only {', '.join(parts)}")
    heldout = next((parts[name] for name in _HELDOUT if name in parts), None)
    return _read(source, train), None if heldout in (None, train) else _read(source, heldout)


def _load(source: Source) -> Mapping[str, Any]:
    path = Path(source.name).expanduser().resolve()
    try:
        with quiet():
            # Files as a stream: no copy of private images in a cache.
            if path.is_file():
                parts = load_dataset("parquet", data_files=glob.escape(str(path)), streaming=True)
            elif path.is_dir():
                parts = load_dataset(str(path), streaming=True)
            else:
                name, _, config = source.name.partition(":")
                parts = load_dataset(name, config or None, streaming=source.streaming)
    except Exception as error:
        raise ValueError(
            f"{source}: neither `builtin`, nor a Parquet file or a folder of images here, nor a "
            f"data set that could be loaded ({_one_line(error)})"
        ) from error
    return dict(parts)


def _read(source: Source, part: Any) -> Examples:
    if part.features is None:
        raise ValueError(f"{source}: the columns of this stream are unknown; set data.streaming=no")
    image = _column(source, part.features, "image_field", source.image_field, _is_image)
    label = _column(source, part.features, "label_field", source.label_field, _is_label)
    part = part.select_columns([image, label])
    if isinstance(part.features[image], Image):
        part = part.cast_column(image, Image(decode=False))
    feature = part.features[label]
    try:
        with quiet():
            rows = [(row[image], row[label]) for row in part]
    except Exception as error:
        raise ValueError(f"{source}: cannot be read ({_one_line(error)})") from error
    if isinstance(feature, ClassLabel):
        rows = [(each, feature.names[number]) for each, number in rows if _is_named(source, number)]
        names = list(feature.names)
    else:
        rows = [(each, str(value)) for each, value in rows]
        names = []
    return Examples([each for each, _ in rows], [name for _, name in rows], names)


def _is_named(source: Source, number: int | None) -> bool:
    if number is None or number < 0:
        raise ValueError(f"{source}: it holds images without a label")
    return True


def _column(source: Source, features: Features, setting: str, named: str, fits: Any) -> str:
    """Return the column a setting names, or the only one that fits."""
    if named:
        if named not in features:
            raise ValueError(
                f"data.{setting}={named}: {source} has no such column; it has {', '.join(features)}"
            )
        return named
    found = [str(name) for name, feature in features.items() if fits(feature)]
    # A class label is one; a number or a text may be anything.
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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
