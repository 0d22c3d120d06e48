"""The local optimizers: ours, and PyTorch's own by the same door."""

from torch.optim import Adam, AdamW

from flower_desloc.optim.adopt import ADOPT
from flower_desloc.optim.description import Description
from flower_desloc.optim.paper_adam import PaperAdam
from flower_desloc.optim.registry import OPTIMIZERS
from flower_desloc.optim.sgdm import SGDM

__all__ = ["ADOPT", "OPTIMIZERS", "SGDM", "Adam", "AdamW", "Description", "PaperAdam"]
