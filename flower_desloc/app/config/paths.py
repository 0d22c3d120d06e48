"""Paths in a configuration that are relative to the folder where a command was called."""

import re
from pathlib import Path
from typing import Any

from flower_desloc.app.config.errors import ConfigError
from flower_desloc.app.config.schema import AUTO, Config

_A_PATH = re.compile(r"(\.{0,2}|~\w*)/|[^/:]+/[^/]+/")
"""A name on the Hub has one slash at most, and does not begin with it."""


def absolute_paths(config: Config) -> dict[str, Any]:
    """Return the settings that name files by relative paths, with absolute paths.

    The app runs in another folder, and a study may be resumed from another one. In ``task_options``
    a path has a slash. Raises ``ConfigError`` for what must be a path and does not exist.
    """
    named = {
        "data.source": config.data.source,
        "data.tokenizer": config.data.tokenizer,
        "run.resume": config.run.resume,
        "run.init_from": config.run.init_from,
    }
    found: dict[str, Any] = {}
    for key, value in named.items():
        if value in ("", "builtin", "bytes", AUTO):
            continue
        absolute = _absolute(value)
        found |= {key: absolute} if absolute != value else {}
        if _A_PATH.match(value) and not Path(absolute).exists():
            raise ConfigError(f"{key}={value}: there is no such file or folder")
    for key, value in config.task_options.items():
        absolute = _absolute_in(value)
        found |= {f"task_options.{key}": absolute} if absolute != value else {}
    return found


def _absolute(value: str) -> str:
    path = Path(value).expanduser()
    return str(path.resolve()) if path.exists() else value


def _absolute_in(value: Any) -> Any:
    match value:
        case str():
            return _absolute(value) if "/" in value else value
        case list():
            return [_absolute_in(item) for item in value]
        case dict():
            return {key: _absolute_in(item) for key, item in value.items()}
    return value
