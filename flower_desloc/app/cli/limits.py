"""Numeric options that state their limits when they are exceeded."""

from typing import Any, Final

import typer

from flower_desloc.app.cli.terminal import USAGE, fail

LEAST: Final = 1e-12
"""Of what must be above 0."""
MOST: Final = 10**24
"""Both are far outside of what there is; ratios and products of a few such numbers are finite."""


def option(text: str, least: float, most: float = MOST, **more: Any) -> Any:
    """Return an option for numbers from ``least`` to ``most``."""

    def check(param: typer.CallbackParam, value: float | None) -> float | None:
        if value is not None and not least <= value <= most:  # nor is nan
            stated = f"{value:g}" if isinstance(value, float) else value
            fail(USAGE, f"{param.opts[0]}={stated}: must be from {least:g} to {most:g}")
        return value

    return typer.Option(callback=check, help=text, **more)


def at_least_zero(text: str) -> Any:
    """Return an option of at least 0."""
    return option(text, 0)


def at_least_one(text: str, **more: Any) -> Any:
    """Return an option of at least 1."""
    return option(text, 1, **more)


def positive(text: str, most: float = MOST) -> Any:
    """Return an option above 0."""
    return option(text, LEAST, most)
