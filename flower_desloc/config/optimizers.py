"""The optimizers that ``optimizer.name`` knows, and what each needs from the configuration."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class KnownOptimizer:
    """Properties of an optimizer that are needed before it is built."""

    settings: frozenset[str]
    """Settings it takes besides ``lr`` and clipping; by the same names, its arguments."""
    decay_in_gradient: bool = False
    """True if weight decay is added to the clipped gradient, which then has no bound."""
    elementwise: bool = True
    """True if it treats every value by itself, so that it can work on shards of tensors."""


_ADAM = frozenset({"betas", "eps", "weight_decay"})

OPTIMIZERS: Final = {
    "adopt": KnownOptimizer(settings=_ADAM | {"mix"}),
    "adam": KnownOptimizer(settings=_ADAM | {"mix"}, decay_in_gradient=True),
    "adamw": KnownOptimizer(settings=_ADAM | {"mix"}),
    "amsgrad": KnownOptimizer(settings=_ADAM, decay_in_gradient=True),
    "sgdm": KnownOptimizer(
        settings=frozenset({"momentum", "weight_decay"}), decay_in_gradient=True
    ),
    "paper_adam": KnownOptimizer(settings=frozenset({"betas", "eps"})),
}
