"""Records made up in the form of a real one, by which it is seen what a model keeps of others."""

from collections.abc import Callable, Iterator, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def stand_ins(record: Any) -> Iterator[Any]:
    """Yield two records in the form of ``record``: whole numbers in tensors are zero, then one.

    Other numbers are different fractions between zero and one. What is not in tensors stays. Whole
    numbers may name tokens, classes or places, where zero always exists; masks are better one.
    """
    yield _filled(record, lambda t: _fractions(t) if _has_fractions(t) else torch.zeros_like(t))
    yield _filled(record, lambda t: _fractions(t) if _has_fractions(t) else torch.ones_like(t))


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _fractions(like: Tensor) -> Tensor:
    number = like.numel()
    each = torch.arange(1, number + 1, dtype=torch.float64, device="cpu") / (number + 1)
    return each.reshape(like.shape).to(like)


def _filled(value: Any, fill: Callable[[Tensor], Tensor]) -> Any:
    """Return ``value`` with other tensors."""
    if isinstance(value, Tensor):
        return fill(value)
    if isinstance(value, MutableMapping):
        filled = copy(value)
        filled.update({key: _filled(each, fill) for key, each in value.items()})
        return filled
    if isinstance(value, tuple | list):
        inside = [_filled(each, fill) for each in value]
        is_named = hasattr(value, "_fields")
        return type(value)(*inside) if is_named else type(value)(inside)
    if is_dataclass(value) and not isinstance(value, type):
        held = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        return replace(value, **{name: _filled(each, fill) for name, each in held.items()})
    return value
