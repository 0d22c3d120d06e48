"""Names of the formats that ``flower_desloc.core.compression`` encodes and decodes."""

from collections.abc import Mapping
from typing import Final, Literal, cast, get_args

from flower_desloc.core.schedule import BUFFERS, GRADIENTS

Format = Literal["fp32", "bf16", "int8", "int4", "int2"]
"""``fp32``: not compressed, in the type of the tensors."""

EXACT: Final = "fp32"


def lossy(compression: Mapping[str, str]) -> dict[str, Format]:
    """Return the formats of the compressed streams.

    Raises ``ValueError`` for an unknown format, or one that the stream cannot have.
    """
    for name, format_ in compression.items():
        if format_ not in get_args(Format):
            known = ", ".join(get_args(Format))
            raise ValueError(f"{name}={format_}: no such format; there are {known}")
        if name in (BUFFERS, GRADIENTS) and format_ != EXACT:
            raise ValueError(f"{name}={format_}: {name} are sent as {EXACT} only")
    return {
        name: cast(Format, format_) for name, format_ in compression.items() if format_ != EXACT
    }
