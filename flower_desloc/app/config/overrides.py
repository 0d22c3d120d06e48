"""Overrides: `key=value`, as on the command line."""

import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from flower_desloc.app.config.schema import Config
from flower_desloc.app.config.yaml12 import YAMLError, inline, read

_BRACKETS_AND_QUOTES = tuple("[{'\"")
_SETTING = re.compile(rf"({'|'.join(each.name for each in fields(Config))})(\.[^\s=]*)?=")


def split(text: str) -> list[str]:
    """Return the overrides in a text, which are separated by blanks.

    Blanks inside the brackets or quotes around a value belong to the value.

    >>> split("data.domains=[a b, c]  run.seed=3")
    ['data.domains=[a b, c]', 'run.seed=3']
    """
    return [override for _, override in _split(text)]


def split_arguments(arguments: Iterable[str]) -> list[str]:
    r"""Return one override per item; an argument, as of a command, may hold several.

    Where no setting follows a blank, the blank belongs to the value.

    >>> split_arguments(["run.seed=3 run.steps=4", "data.source=my data/a=b"])
    ['run.seed=3', 'run.steps=4', 'data.source="my\\u0020data/a=b"']
    """
    overrides: list[str] = []
    for argument in arguments:
        found: list[str] = []
        for blank, part in _split(argument):
            if found and not _SETTING.match(part):
                found[-1] += blank + part
            else:
                found.append(part)
        for each in found:
            key, _, value = each.partition("=")
            overrides.append(each if split(each) == [each] else override(key, value))
    return overrides


def _split(text: str) -> list[tuple[str, str]]:
    """Return the overrides in a text, each with the blanks before it."""
    parts = ["", *re.split(r"(\s+)", text.strip())]  # each second one is white space
    overrides = []
    while parts[1:2] not in ([], [""]):
        ends = range(2, len(parts) + 1, 2)
        end = next((n for n in ends if _is_complete("".join(parts[1:n]))), 2)
        overrides.append((parts[0], "".join(parts[1:end])))
        parts = parts[end:]
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
