"""The four methods, and the hyper-parameters that the paper does not state."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch.optim import Adam, Optimizer

from flower_desloc.core.schedule import NEVER, PARAMS, RESET, Period, SyncSchedule
from flower_desloc.optim import ADOPT

Rule = Literal["adam", "adopt"]

NUM_WORKERS: Final = 256
K_X: Final = 192
"""Local steps per round, after which parameters are averaged."""
K_V: Final = 692
"""DES-LOC's period of the second moment: its half-life at beta2 = 0.999."""


@dataclass(frozen=True)
class ToyMethod:
    """Periods of the optimizer's states; parameters are averaged every K_x steps."""

    name: str
    exp_avg: Period
    exp_avg_sq: Period

    def schedule(self) -> SyncSchedule:
        """Return the periods of all streams."""
        return SyncSchedule({PARAMS: K_X, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq})


METHODS: Final = {
    "desloc": ToyMethod("DES-LOC", K_X, K_V),
    "local_adam": ToyMethod("Local Adam", K_X, K_X),
    "favg_keep_opt": ToyMethod("states kept", NEVER, NEVER),
    "favg_reset_opt": ToyMethod("states reset", RESET, RESET),
}


@dataclass(frozen=True)
class ToySetting:
    """An optimizer with its hyper-parameters, and the clipping of its gradients.

    ``clip`` is the bound rho of every coordinate, as in the paper's listings; None: no clipping.
    """

    rule: Rule = "adam"
    lr: float = 0.3
    betas: tuple[float, float] = (0.995, 0.999)
    clip: float | None = 5.0

    @property
    def eps(self) -> float:
        """The optimizer's own default."""
        return 1e-8 if self.rule == "adam" else 1e-6

    def optimizer(self, params: Iterable[torch.nn.Parameter]) -> Optimizer:
        """Return the optimizer of a client."""
        if self.rule == "adam":
            # Fused: fewer calls of the same arithmetic.
            return Adam(params, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)
        return ADOPT(params, lr=self.lr, betas=self.betas, eps=self.eps)

    def describe(self, *, lr: bool = True) -> str:
        """Return the setting in words, with or without its learning rate and beta1."""
        name = {"adam": "Adam", "adopt": "ADOPT"}[self.rule]
        first, second = self.betas
        numbers = f"lr {self.lr:g}, β₁ {first:g}, β₂ {second:g}" if lr else f"β₂ {second:g}"
        clip = "no clipping" if self.clip is None else f"gradients clipped to ±{self.clip:g}"
        return f"{name}, {numbers}, {clip}"
