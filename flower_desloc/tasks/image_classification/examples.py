"""What every source of images holds: images and the names of their labels, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Image = Any
"""An image as its source stores it: an encoded file's bytes or path, or an array."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Labelled images, decoded only when they are used."""

    images: Sequence[Image]
    labels: Sequence[str]
    names: Sequence[str] = ()
    """All labels in their order, where the source states it."""

    def __len__(self) -> int:
        return len(self.labels)
