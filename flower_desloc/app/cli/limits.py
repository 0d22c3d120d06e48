"""Numeric options that state their limits when they are exceeded."""

import math
from collections.abc import Callable
from typing import Any

import typer

from flower_desloc.app.cli.terminal import USAGE, fail

_LEAST, _MOST = 1e-12, 1e24
"""Far outside of what there is; ratios and products of a few such numbers are finite."""


def option(text: str, limits: str, holds: Callable[[float], bool], **more: Any) -> Any:
    """Return an option for finite numbers for which ``holds``, which ``limits`` says in words."""

    def check(param: typer.CallbackParam, value: float | None) -> float | None:
        if value is not None and not (math.isfinite(value) and holds(value)):
            fail(USAGE, f"{param.opts[0]}={value:g}: must be {limits}")
        return value

    return typer.Option(callback=check, help=text, **more)


def at_least_zero(text: str) -> Any:
    """Return an option of at least 0."""
    return option(text, f"at least 0 and at most {_MOST:g}", lambda value: 0 <= value <= _MOST)


def at_least_one(text: str, **more: Any) -> Any:
    """Return an option of at least 1."""
    return option(text, f"at least 1 and at most {_MOST:g}", lambda v: 1 <= v <= _MOST, **more)


def positive(text: str) -> Any:
    """Return an option above 0."""
    limits = f"above 0, from {_LEAST:g} to {_MOST:g}"
    return option(text, limits, lambda value: _LEAST <= value <= _MOST)
