"""Paths in a configuration that are relative to the folder where a command was called."""

import re
from pathlib import Path

from flower_desloc.app.config.errors import ConfigError
from flower_desloc.app.config.schema import AUTO, Config

_A_PATH = re.compile(r"(\.{0,2}|~\w*)/")


def absolute_paths(config: Config) -> dict[str, str]:
    """Return the settings that name a file by a relative path, with its absolute path.

    The app runs in another folder, and a study may be resumed from another one. Raises
    ``ConfigError`` for what must be a path and does not exist.
    """
    named = {
        "data.source": config.data.source,
        "data.tokenizer": config.data.tokenizer,
        "run.resume": config.run.resume,
        "run.init_from": config.run.init_from,
        **{
            f"task_options.{key}": value
            for key, value in config.task_options.items()
            if isinstance(value, str) and "/" in value
        },
    }
    found: dict[str, str] = {}
    for key, value in named.items():
        if value in ("", "builtin", "bytes", AUTO):
            continue
        path = Path(value).expanduser()
        if path.exists():
            absolute = str(path.resolve())
            found |= {key: absolute} if absolute != value else {}
        elif _A_PATH.match(value) and not key.startswith("task_options."):
            raise ConfigError(f"{key}={value}: there is no such file or folder")
    return found
