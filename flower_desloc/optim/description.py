"""The description of an optimizer: everything that other parts need to know of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer

from flower_desloc.core.states import State

Family = Literal["Adam", "ADOPT", "other"]
"""Optimizers that share measured rules for their periods."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """An optimizer that a configuration names by ``optimizer.name``.

    Those of the project are in ``flower_desloc.optim.OPTIMIZERS``. One that is named by its import
    path is described by what its class says: ``states``, as in ``core.states``, and
    ``elementwise``.
    """

    name: str
    make: Callable[..., Optimizer]
    """Called with the parameters, ``lr`` and the settings, all by name."""
    settings: Mapping[str, Any]
    """The settings besides ``lr``, with their defaults. A setting that the section ``optimizer`` of
    a configuration has no field for is one of ``optimizer.options``."""
    states: tuple[State, ...]
    weight_decay: Literal["none", "gradient", "decoupled", "unknown"]
    """Whether it is added to the clipped gradient, which then has no bound, or taken off the
    parameters."""
    elementwise: bool = True
    """Whether every value is treated by itself, so that shards of tensors can be."""
    others: "Description | None" = None
    """Of an optimizer of hidden matrices only, that of all other parameters; the section
    ``optimizer`` has the settings of both. None: it takes any parameter."""
    family: Family = "other"
    """Whose measured rules ``desloc plan`` gives; other: those of the paper."""
    rate_of: str = ""
    """The optimizer whose tuned learning rate suits this one; by default its own only."""

    @property
    def parts(self) -> tuple["Description", ...]:
        """It, and that of other parameters than its own."""
        return (self,) if self.others is None else (self, self.others)

    @property
    def all_settings(self) -> Mapping[str, Any]:
        """Its settings and those of ``others``."""
        return {**self.others.settings, **self.settings} if self.others else self.settings

    @property
    def all_states(self) -> tuple[State, ...]:
        """Its states and those of ``others``."""
        return tuple(state for part in self.parts for state in part.states)

    @property
    def whole_window_states(self) -> tuple[State, ...]:
        """Its states that need all steps of all clients in every window."""
        return tuple(state for state in self.all_states if state.averaged != "any time")

    def shares_rate(self, other: "Description") -> bool:
        """Return whether a learning rate that was tuned for one suits the other."""
        return (self.rate_of or self.name) == (other.rate_of or other.name)
