"""Overrides: `key=value`, as on the command line."""

import re
from collections.abc import Iterable
from typing import Any

from flower_desloc.app.config.yaml12 import YAMLError, inline, read

_BRACKETS_AND_QUOTES = tuple("[{'\"")


def split(text: str) -> list[str]:
    """Return the overrides in a text, which are separated by blanks.

    Blanks inside the brackets or quotes around a value belong to the value.

    >>> split("data.domains=[a b, c]  run.seed=3")
    ['data.domains=[a b, c]', 'run.seed=3']
    """
    parts = re.split(r"(\s+)", text.strip())  # each second one is white space
    overrides = []
    while parts and parts[0]:
        ends = range(1, len(parts) + 1, 2)
        length = next((n for n in ends if _is_complete("".join(parts[:n]))), 1)
        overrides.append("".join(parts[:length]))
        parts = parts[length + 1 :]
    return overrides


def split_arguments(arguments: Iterable[str]) -> list[str]:
    r"""Return one override per item; an argument, as of a command, may hold several.

    >>> split_arguments(["run.seed=3 run.steps=4", "data.source=my data"])
    ['run.seed=3', 'run.steps=4', 'data.source="my\\u0020data"']
    """
    overrides: list[str] = []
    for item in arguments:
        parts = split(item)
        if all("=" in part for part in parts[1:]):
            overrides += parts
        else:
            key, _, value = item.partition("=")
            overrides.append(override(key, value))
    return overrides


def override(key: str, value: Any) -> str:
    """Return one override; ``value`` is a text, or dictionaries and lists of a YAML file."""
    return f"{key}={inline(value)}"


def typed_text(value: str) -> str:
    """Return the text that ``value`` states: as it was typed, or what is in quotes around it."""
    quotes = value[:1] if len(value) > 1 and value[:1] == value[-1:] else ""
    if quotes in ("'", '"'):
        try:
            content = read(value)
        except YAMLError:
            return value
        if isinstance(content, str):
            return content
    return value


def _is_complete(override: str) -> bool:
    value = override.partition("=")[2]
    if not value.startswith(_BRACKETS_AND_QUOTES):
        return True
    try:
        read(value)
    except YAMLError:
        return False
    return True
