"""Digests of what a gradient depends on: what a module holds, and records."""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flower_desloc.core.errors import SiteRefusedError
from flower_desloc.core.streams import digest

_PLAIN = (bool, int, float, str, bytes, type(None))
_WITHOUT_VALUES = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, partial)


def of_weights(module: nn.Module) -> str:
    """Return a digest of a module's parameters and persistent buffers, alike in each process.

    Raises ``SiteRefusedError`` for a tensor that cannot be compared.
    """
    held = module.state_dict(keep_vars=True).items()
    tensors = {id(t): (name, t) for name, t in held if isinstance(t, Tensor)}  # tied ones once
    return _compared(module, tensors.values())


def of_buffers(module: nn.Module) -> str:
    """Return a digest of a module's buffers; raises as ``of_weights``."""
    return _compared(module, module.named_buffers())


def of_attributes(module: nn.Module) -> str:
    """Return a digest of the tensors, numbers, texts and generators in a module's attributes.

    Objects are looked into, functions are not. It may be another in another process. Raises
    ``SiteRefusedError`` for a tensor that cannot be compared.
    """
    seen: dict[int, object] = {id(part): part for part in module.modules()}
    return _compared(
        module,
        chain.from_iterable(
            _values(f"{name!r}.{key}", value, seen)
            for name, part in module.named_modules()
            for key, value in vars(part).items()
            if key not in ("_modules", "_parameters") and not _is_hooks(key)
        ),
    )


def _compared(module: nn.Module, held: Iterable[tuple[str, Any]]) -> str:
    try:
        return _digest(held)
    except RuntimeError as error:  # PyTorch's, for a layout or device that has no bytes to read
        raise SiteRefusedError(
            f"differential privacy: {type(module).__name__} has a tensor that cannot be compared, "
            "such as a sparse one"
        ) from error


def of_records(records: Mapping[int, Any]) -> str:
    """Return a digest of records by number.

    Raises ``SiteRefusedError`` for one of other things than ``Examples.of`` may return.
    """
    return _digest(chain.from_iterable(_leaves(str(n), each) for n, each in records.items()))


def _digest(named: Iterable[tuple[str, Any]]) -> str:
    """Return a text that differs for other tensors, numbers or texts, or other names of them."""
    tensors: dict[str, Tensor] = {}
    others = []
    for name, value in named:
        if isinstance(value, Tensor):
            tensors[name] = value
        else:
            others.append((name, value))
    return f"{others} {digest(tensors)}"


def _is_hooks(key: str) -> bool:
    return key.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))


def _values(name: str, value: Any, seen: dict[int, object]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, numbers and texts in ``value``, by name, but of objects ``seen`` none."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, np.ndarray | np.generic):
        yield name, (str(value.dtype), value.shape, value.tobytes())
    elif isinstance(value, (*_PLAIN, Enum, torch.dtype, torch.device)):
        yield name, value
    elif isinstance(value, set | frozenset):
        yield name, sorted(map(repr, value))
    elif id(value) not in seen:
        seen[id(value)] = value  # or another could get its id
        held = _held(value)
        if held is not None:
            yield name, (type(value).__qualname__, len(held))
            for key, each in held.items():
                yield from _values(f"{name}.{key!r}", each, seen)


def _held(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list | tuple | deque):
        return dict(enumerate(value))
    if isinstance(value, torch.Generator):
        return {"state": value.get_state()}
    if isinstance(value, np.random.Generator):
        return dict(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return dict(enumerate(value.get_state()))
    if isinstance(value, random.Random):
        return {"state": value.getstate()}
    if isinstance(value, _WITHOUT_VALUES) or not hasattr(value, "__dict__"):
        return None
    return {key: each for key, each in vars(value).items() if not _is_hooks(key)}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a record consists of, by name: tensors, numbers, texts, and what holds them."""
    is_tensor = isinstance(value, Tensor) and value.layout is torch.strided
    if type(value) in _PLAIN or (is_tensor and not value.is_quantized):
        yield name, value
        return
    inside: Mapping[Any, Any]
    if isinstance(value, Mapping):
        inside = value
    elif isinstance(value, tuple | list):
        inside = dict(enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        inside = {field.name: getattr(value, field.name) for field in fields(value)}
    else:
        raise SiteRefusedError(
            "differential privacy needs examples of tensors, numbers and texts, or lists, tuples, "
            f"dictionaries and dataclasses of them; got a {type(value).__name__}"
        )
    yield name, (type(value).__qualname__, [repr(key) for key in inside])
    for key, each in inside.items():
        yield from _leaves(f"{name}.{key!r}", each)
