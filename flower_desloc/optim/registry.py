"""The optimizers that a configuration can name."""

from collections.abc import Mapping
from typing import Final

from flower_desloc.optim import adopt, paper_adam, pytorch, sgdm
from flower_desloc.optim.description import Description

OPTIMIZERS: Final[Mapping[str, Description]] = {
    description.name: description
    for description in (
        adopt.DESCRIPTION,
        pytorch.ADAM,
        pytorch.ADAMW,
        pytorch.AMSGRAD,
        sgdm.DESCRIPTION,
        paper_adam.DESCRIPTION,
    )
}
"""By name; the first is the default."""
