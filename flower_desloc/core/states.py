"""What is known of an optimizer's states: kinds, decays, and the start of a newcomer's.

An optimizer says it in an attribute ``states`` of its class. PyTorch's Adam, AdamW, RAdam and Muon
are described here; of any other optimizer only the kinds of PyTorch's names are known. Where
several are one (``MultiOptimizer``), every parameter group has the states of its own.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer, RAdam

from flower_desloc.core.kinds import Kind
from flower_desloc.core.multi import parts_of
from flower_desloc.core.streams import group_of
from flower_desloc.core.types import Stream

Group = Mapping[str, Any]
"""One of ``optimizer.param_groups``."""


@dataclass(frozen=True)
class State:
    """One state of an optimizer, which is one stream; all values are zero before the first step."""

    name: str
    kind: Kind
    decay: Callable[[Group], float] | None = None
    """The factor beta of ``s <- beta s + (what does not depend on s)``; None: there is none, or it
    changes. Late averages and weights by steps need it."""
    seed: Callable[[Tensor, Group], Tensor] | None = None
    """Value for a client that starts at a later step and has no average of this state, from a
    parameter with its first gradient; None: zero. The other clients' second moments have grown
    since their first step, and a newcomer with one of zero would divide their first moment by
    almost nothing."""
    divided_by: str = ""
    """Of a first moment: the second moment of the same gradients by whose root a step divides it.
    Their decays bound it (``flower_desloc.optim.bounds``). Where a parameter group has no bound, a
    client that joins before all states were averaged starts with zeros in all of them."""
    ceiling: Callable[[int], float] | None = None
    """Bound on the values in a run of so many steps, for gradients of any size; None: there is no
    bound, or clipped gradients give one."""
    averaged: Literal["any time", "with params", "never"] = "any time"
    """When it may be averaged. Unless at any time, all clients must take all steps of a window."""


def beta1(group: Group) -> float:
    """Return the decay of a first moment under PyTorch's name."""
    return float(group["betas"][0])


def beta2(group: Group) -> float:
    """Return the decay of a second moment under PyTorch's name."""
    return float(group["betas"][1])


def squared_gradient(p: Tensor, group: Group) -> Tensor:
    """Return the square of a parameter's gradient, with weight decay that is added to it.

    An optimizer that always decouples its decay, and has no such key in its groups, needs another.
    """
    assert p.grad is not None
    decoupled = group.get("decouple") or group.get("decoupled_weight_decay")  # ours, PyTorch's
    decay = 0.0 if decoupled else group.get("weight_decay", 0.0)
    sign = -1 if group.get("maximize") else 1
    return (sign * p.grad).add(p, alpha=decay).square()


ADAM: Final = (
    State("exp_avg", Kind.FIRST_MOMENT, beta1, divided_by="exp_avg_sq"),
    State("exp_avg_sq", Kind.SECOND_MOMENT, beta2, squared_gradient),
)
"""The states of Adam in all its forms."""


def _square(p: Tensor, _: Group) -> Tensor:
    assert p.grad is not None
    return p.grad.square()


# Before PyTorch 2.7 the groups of AdamW do not say that its weight decay is decoupled.
ADAMW: Final = (ADAM[0], replace(ADAM[1], seed=_square))

_MAXIMUM: Final = State("max_exp_avg_sq", Kind.MAXIMUM)
AMSGRAD: Final = (*ADAM, _MAXIMUM)

MUON: Final = (
    State("momentum_buffer", Kind.FIRST_MOMENT, decay=lambda group: float(group["momentum"])),
)

_PYTORCH: Final[Mapping[type[Optimizer], tuple[State, ...]]] = {
    Adam: AMSGRAD,  # which it is with amsgrad=True
    AdamW: (*ADAMW, _MAXIMUM),
    RAdam: ADAM,
    # Since PyTorch 2.9.
    **({torch.optim.Muon: MUON} if hasattr(torch.optim, "Muon") else {}),
}


def states_of(optimizer: Optimizer | type[Optimizer]) -> dict[str, State]:
    """Return by name what is known of the states of an optimizer; of some there may be nothing.

    Of states that several optimizers in one have under the same name, those of the first.
    """
    if isinstance(optimizer, type):
        return _described(optimizer)
    found: dict[str, State] = {}
    for states in states_by_group(optimizer):
        found = {**states, **found}
    return found


def states_by_group(optimizer: Optimizer) -> list[dict[str, State]]:
    """Return for each of ``optimizer.param_groups`` what is known of its states, by name."""
    return [_described(type(part)) for part in parts_of(optimizer) for _ in part.param_groups]


def _described(kind: type[Optimizer]) -> dict[str, State]:
    for base in kind.__mro__:
        own = vars(base).get("states")
        found = own if isinstance(own, tuple) else _PYTORCH.get(base, ())
        if found and all(isinstance(state, State) for state in found):
            return {state.name: state for state in found}
    return {}


def kinds_of(optimizer: Optimizer) -> dict[str, Kind]:
    """Return the kinds of the states that an optimizer describes.

    Raises ``ValueError`` where several in one give a state of the same name different kinds.
    """
    kinds: dict[str, Kind] = {}
    for states in states_by_group(optimizer):
        for name, state in states.items():
            if kinds.setdefault(name, state.kind) is not state.kind:
                raise ValueError(
                    f"{name!r} is a {kinds[name]} of one optimizer and a {state.kind} of another, "
                    "and a stream holds one of them; choose others to be one"
                )
    return kinds


def state_decays(optimizer: Optimizer, names: Collection[str]) -> dict[str, dict[int, float]]:
    """Return what one step multiplies the named states of ``optimizer`` by: beta1, beta2.

    Each has one value for every parameter group that has the state, by the group's index.

    Raises ``ValueError`` for a state that states no decay, such as AMSGrad's maximum.
    """
    decays: dict[str, dict[int, float]] = {name: {} for name in names}
    unknown: dict[str, str] = {}
    groups = [(part, group) for part in parts_of(optimizer) for group in part.param_groups]
    for index, (part, group) in enumerate(groups):
        states = _described(type(part))
        for name in names:
            decay = states[name].decay if name in states else None
            if decay is not None:
                decays[name][index] = decay(group)
            elif name in states or any(name in part.state.get(p, {}) for p in group["params"]):
                unknown[name] = type(part).__name__
    nowhere = {name: type(optimizer).__name__ for name in names if not decays[name]}
    unknown = nowhere | unknown
    if unknown:
        what = next(iter(unknown.values()))
        raise ValueError(
            f"{what}'s {' and '.join(unknown)} has no constant decay factor, which late averages "
            f"and weights by steps need; if it has one, state it in {what}.states "
            "(flower_desloc.State)"
        )
    return decays


def needs_seed(
    module: nn.Module,
    optimizer: Optimizer,
    streams: Mapping[str, Stream],
    afresh: Collection[str] = (),
) -> dict[str, set[str]]:
    """Return by stream the tensors that are zero and must not be.

    They are all tensors of a stream of zeros, and of the others those in ``afresh``.
    """
    groups, by_group = group_of(module, optimizer), states_by_group(optimizer)
    found = {}
    for name in states_of(optimizer):
        if name not in streams:
            continue
        states = {key: by_group[groups[key]].get(name) for key in streams[name]}
        seeded = {key for key, state in states.items() if state and state.seed is not None}
        is_zero = seeded and not any(tensor.any() for tensor in streams[name].values())
        if keys := seeded if is_zero else seeded.intersection(afresh):
            found[name] = keys
    return found


@torch.no_grad()
def seed_states(optimizer: Optimizer, names: Iterable[str]) -> None:
    """Set the named states from the present gradients; without one a state stays as it is."""
    names = list(names)
    for group, states in zip(optimizer.param_groups, states_by_group(optimizer), strict=True):
        for name in names:
            if name not in states or (seed := states[name].seed) is None:
                continue
            for p in group["params"]:
                if p.grad is not None:
                    optimizer.state[p][name].copy_(seed(p, group))
