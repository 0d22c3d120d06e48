"""Decay factors of optimizer states."""

from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

from torch.optim import Adam, AdamW, Optimizer


@runtime_checkable
class Linear(Protocol):
    """An optimizer whose states are linear in what enters them."""

    def decays(self, group: Mapping[str, Any]) -> Mapping[str, float]:
        """Return, by state, the factor beta of ``s <- beta s + (a function of the gradient)``."""


def state_decays(optimizer: Optimizer, names: Collection[str]) -> dict[str, float]:
    """Return what one step multiplies the named states of ``optimizer`` by: beta1, beta2.

    Known for this project's optimizers, for PyTorch's Adam and AdamW, and for those with a method
    ``decays(group)``, a group being one of ``optimizer.param_groups``.

    Raises ``ValueError`` for a state that is not linear in what enters it (AMSGrad's maximum), for
    an optimizer that does not state its decays, and for parameter groups that differ in them.
    """
    what = type(optimizer).__name__
    found = [dict(_decays(optimizer, group)) for group in optimizer.param_groups]
    if any(decays != found[0] for decays in found):
        raise ValueError(f"{what}'s parameter groups have different decays: {found}")
    if unknown := [name for name in names if name not in found[0]]:
        raise ValueError(
            f"{what}'s {' and '.join(unknown)} has no constant decay factor, which late averages "
            "and weights by steps need"
        )
    return {name: found[0][name] for name in names}


def _decays(optimizer: Optimizer, group: Mapping[str, Any]) -> Mapping[str, float]:
    if isinstance(optimizer, Linear):
        return optimizer.decays(group)
    if type(optimizer) in (Adam, AdamW):
        return dict(zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True))
    raise ValueError(
        f"{type(optimizer).__name__} does not state its states' decays; give it a method "
        "decays(group) that returns them by the states' names"
    )
