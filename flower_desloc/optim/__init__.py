"""The local optimizers, ours and PyTorch's own, and the table of those a configuration can name."""

from collections.abc import Mapping
from typing import Final

from torch.optim import Adam, AdamW

from flower_desloc.core.multi import MultiOptimizer
from flower_desloc.optim import adopt, paper_adam, pytorch, sgdm
from flower_desloc.optim.adopt import ADOPT
from flower_desloc.optim.description import Description
from flower_desloc.optim.paper_adam import PaperAdam
from flower_desloc.optim.sgdm import SGDM

__all__ = [
    "ADOPT",
    "OPTIMIZERS",
    "SGDM",
    "Adam",
    "AdamW",
    "Description",
    "MultiOptimizer",
    "PaperAdam",
]

OPTIMIZERS: Final[Mapping[str, Description]] = {
    description.name: description
    for description in (
        adopt.DESCRIPTION,
        pytorch.ADAM,
        pytorch.ADAMW,
        pytorch.AMSGRAD,
        pytorch.MUON,
        sgdm.DESCRIPTION,
        paper_adam.DESCRIPTION,
    )
}
"""By name; the first is the default."""
