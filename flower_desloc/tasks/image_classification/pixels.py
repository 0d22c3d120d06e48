"""Images to arrays of bytes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import datasets
import numpy as np
import PIL.Image
import torch
from torch import Tensor

from flower_desloc.tasks.image_classification.examples import Image


@dataclass(frozen=True)
class Shape:
    """What all images of a run have in common."""

    channels: int
    height: int
    width: int

    @classmethod
    def of(cls, image: Image, side: int | None) -> "Shape":
        """Return the shape of ``image``, resized to a square of ``side`` pixels unless None."""
        picture = _picture(image)
        width, height = (side, side) if side else picture.size
        return cls(1 if picture.mode == "L" else 3, height, width)

    def __str__(self) -> str:
        return f"{self.width} x {self.height} pixels"


def decode(images: Iterable[Image], shape: Shape, *, resize: bool) -> Tensor:
    """Return the images, uint8 of (image, channel, row, column), in grey or colour as ``shape``.

    Raises ``ValueError`` for an image of another size, unless it is to be resized.
    """
    mode, size = ("L" if shape.channels == 1 else "RGB"), (shape.width, shape.height)
    arrays = []
    for image in images:
        picture = _picture(image).convert(mode)
        if picture.size != size:
            if not resize:
                raise ValueError(
                    f"data.image_size=null: there is an image of {picture.width} x "
                    f"{picture.height} pixels beside one of {shape}; set it to the side that all "
                    "shall have"
                )
            picture = picture.resize(size, PIL.Image.Resampling.BILINEAR)
        arrays.append(np.asarray(picture).reshape(shape.height, shape.width, shape.channels))
    # A copy, for a view of a transposed array is slow to take batches from.
    return torch.from_numpy(np.stack(arrays).transpose(0, 3, 1, 2).copy())


def _picture(image: Image) -> PIL.Image.Image:
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
