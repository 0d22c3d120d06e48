"""The local optimizers: ours, and PyTorch's own by the same door."""

from torch.optim import Adam, AdamW

from flower_desloc.optim.adopt import ADOPT
from flower_desloc.optim.paper_adam import PaperAdam
from flower_desloc.optim.sgdm import SGDM

__all__ = ["ADOPT", "SGDM", "Adam", "AdamW", "PaperAdam"]
