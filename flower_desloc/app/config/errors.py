"""The error of a wrong configuration, and parts of error messages."""

import difflib
from collections.abc import Iterable

from flower_desloc.core.errors import SetupError


class ConfigError(SetupError):
    """The configuration is wrong; the message names the key, its value and what is allowed."""


def one_line(error: object) -> str:
    """Return the text of an error of another library, as part of a message."""
    return " ".join(str(error).split())


def suggestion(name: object, names: Iterable[str]) -> str:
    """Return a suggestion for a name that does not exist; empty if no other is near."""
    near = difflib.get_close_matches(str(name), list(names), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
