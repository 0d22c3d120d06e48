"""Images and labels of a source, in a training and a held-out part."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flower_desloc.tasks.image_classification import builtin, columns
from flower_desloc.tasks.image_classification.examples import Examples
from flower_desloc.tasks.image_classification.source import Source


@dataclass(frozen=True, eq=False)
class Part:
    """Images and, for each, the number of its label."""

    examples: Examples
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Corpus:
    """A source, read; ``names`` are the labels'."""

    names: tuple[str, ...]
    train: Part
    heldout: Part


@lru_cache(maxsize=4)
def read(source: Source, names: tuple[str, ...] = ()) -> Corpus:
    """Return the images of a source, read once a process.

    Their labels are numbered by ``names``, or if there are none by the source's own order.

    Raises ``ValueError``, naming the setting, where the source or a column is missing, a label is
    not among ``names``, or there is nothing to train on or to hold out.
    """
    train, heldout = (
        (builtin.digits(), None) if source.name == "builtin" else columns.examples(source)
    )
    names = names or tuple(train.names) or _sorted({*train.labels, *(heldout or train).labels})
    numbers = _numbers(source, train, names)
    if heldout is None:
        kept = _held_out(numbers, source.validation_fraction)
        parts = _rows(train, numbers, ~kept), _rows(train, numbers, kept)
    else:
        parts = Part(train, numbers), Part(heldout, _numbers(source, heldout, names))
    for part, what in zip(parts, ("to train on", "held out"), strict=True):
        if not len(part):
            raise ValueError(
                f"{source}: no image is {what}; use more images, or another "
                f"data.validation_fraction than {source.validation_fraction}"
            )
    return Corpus(names, *parts)


def _held_out(labels: NDArray[np.int64], fraction: float) -> NDArray[np.bool_]:
    """Return which examples are held out: of each label the same fraction, whatever the seed."""
    rng = np.random.default_rng(0)
    kept = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        kept[rows[: round(fraction * len(rows))]] = True
    return kept


def _rows(examples: Examples, numbers: NDArray[np.int64], chosen: NDArray[np.bool_]) -> Part:
    rows = np.flatnonzero(chosen).tolist()
    return Part(
        Examples([examples.images[row] for row in rows], [examples.labels[row] for row in rows]),
        numbers[rows],
    )


def _numbers(source: Source, part: Examples, names: tuple[str, ...]) -> NDArray[np.int64]:
    number = {name: i for i, name in enumerate(names)}
    if strange := set(part.labels) - number.keys():
        raise ValueError(
            f"{source}: the label {min(strange)!r} is not among those of the run, "
            f"{', '.join(names)}"
        )
    return np.array([number[name] for name in part.labels], dtype=np.int64)


def _sorted(names: set[str]) -> tuple[str, ...]:
    """Return labels in order: 2 before 10."""
    return tuple(
        sorted(names, key=lambda name: (0, int(name), "") if _is_int(name) else (1, 0, name))
    )


def _is_int(name: str) -> bool:
    return name.removeprefix("-").isdecimal()
