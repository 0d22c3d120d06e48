"""PyTorch's own Adam, AdamW, AMSGrad and Muon; their states are described in ``core.states``."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Final

import torch
from torch.optim import Adam, AdamW, Optimizer

from flower_desloc.core import states
from flower_desloc.optim.description import Description

_SETTINGS: Final = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


def _fused(cls: Callable[..., Optimizer], **fixed: Any) -> Callable[..., Optimizer]:
    """Return a constructor of ``cls`` whose step is one fused kernel, where there is one."""

    def make(params: Iterable[Any], **settings: Any) -> Optimizer:
        params = list(params)  # or parameter groups
        tensors = chain.from_iterable(p["params"] if isinstance(p, dict) else [p] for p in params)
        fused = all(p.device.type in ("cpu", "cuda") for p in tensors)
        return cls(params, **settings, **fixed, fused=fused)

    return make


ADAM: Final = Description(
    name="adam",
    make=_fused(Adam),
    settings=_SETTINGS,
    states=states.ADAM,
    family="Adam",
    weight_decay="gradient",
)
ADAMW: Final = Description(
    name="adamw",
    make=_fused(AdamW),
    settings=_SETTINGS,
    states=states.ADAMW,
    family="Adam",
    weight_decay="decoupled",
    rate_of="adam",
)
AMSGRAD: Final = Description(
    name="amsgrad",
    make=_fused(Adam, amsgrad=True),
    settings=_SETTINGS,
    states=states.AMSGRAD,
    weight_decay="gradient",
    rate_of="adam",
)


def _muon(params: Iterable[Any], **settings: Any) -> Optimizer:
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(
            f"torch.optim.Muon is in PyTorch 2.9 and later, and this is {torch.__version__}"
        )
    return torch.optim.Muon(params, **settings)


MUON: Final = Description(
    name="muon",
    make=_muon,
    # Scaled as Liu et al. do (arXiv:2502.16982), its steps suit AdamW's rate and decay.
    settings={"momentum": 0.95, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"},
    states=states.MUON,
    weight_decay="decoupled",
    elementwise=False,
    others=ADAMW,
    rate_of="adam",
)
