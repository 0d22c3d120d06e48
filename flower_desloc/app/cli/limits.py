"""Numeric options that state their limits when they are exceeded."""

import math
from collections.abc import Callable
from typing import Any

import typer

from flower_desloc.app.cli.terminal import USAGE, fail


def option(text: str, limits: str, holds: Callable[[float], bool], **more: Any) -> Any:
    """Return an option for finite numbers for which ``holds``, which ``limits`` says in words."""

    def check(param: typer.CallbackParam, value: float | None) -> float | None:
        if value is not None and not (math.isfinite(value) and holds(value)):
            fail(USAGE, f"{param.opts[0]}={value:g}: must be {limits}")
        return value

    return typer.Option(callback=check, help=text, **more)


def at_least_zero(text: str) -> Any:
    """Return an option of at least 0."""
    return option(text, "at least 0", lambda value: value >= 0)


def at_least_one(text: str, **more: Any) -> Any:
    """Return an option of at least 1."""
    return option(text, "at least 1", lambda value: value >= 1, **more)


def positive(text: str) -> Any:
    """Return an option above 0."""
    return option(text, "above 0", lambda value: value > 0)
