"""The optimizers that ``optimizer.name`` knows, and what each needs from the configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, kw_only=True)
class KnownOptimizer:
    """Properties of an optimizer that are needed before it is built."""

    defaults: Mapping[str, Any]
    """Settings it takes besides ``lr`` and clipping, with their defaults; by the same names, its
    arguments."""
    decay_in_gradient: bool = False
    """True if weight decay is added to the clipped gradient, which then has no bound."""
    elementwise: bool = True
    """True if it treats every value by itself, so that it can work on shards of tensors."""


_ADOPT = {"betas": [0.95, 0.9999], "eps": 1e-6, "weight_decay": 0.0}
_ADAM = {"betas": [0.95, 0.95], "eps": 1e-8, "weight_decay": 0.0}

OPTIMIZERS: Final = {
    "adopt": KnownOptimizer(defaults=_ADOPT),
    "adam": KnownOptimizer(defaults=_ADAM, decay_in_gradient=True),
    "adamw": KnownOptimizer(defaults=_ADAM),
    "amsgrad": KnownOptimizer(defaults=_ADAM, decay_in_gradient=True),
    "sgdm": KnownOptimizer(defaults={"momentum": 0.9, "weight_decay": 0.0}, decay_in_gradient=True),
    "paper_adam": KnownOptimizer(defaults={key: _ADAM[key] for key in ("betas", "eps")}),
}
_ALIKE = {"adam", "adamw", "amsgrad"}

SETTINGS: Final = frozenset[str]().union(*(known.defaults for known in OPTIMIZERS.values()))
"""Settings that not every optimizer has."""


def share_rates(one: str, other: str) -> bool:
    """Return True if a learning rate that was tuned for one optimizer is good for the other."""
    return one == other or {one, other} <= _ALIKE
