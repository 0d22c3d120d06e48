"""PyTorch's own Adam, AdamW and AMSGrad; their states are described in ``core.states``."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Final

from torch.optim import Adam, AdamW, Optimizer

from flower_desloc.core import states
from flower_desloc.optim.description import Description

_SETTINGS: Final = {"betas": (0.95, 0.95), "eps": 1e-8, "weight_decay": 0.0}


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
    weight_decay="gradient",
)
ADAMW: Final = Description(
    name="adamw",
    make=_fused(AdamW),
    settings=_SETTINGS,
    states=states.ADAMW,
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
