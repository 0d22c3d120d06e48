"""Tasks and optimizers of one's own, which a configuration names by ``module:name``."""

import os
import sys
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any, Final

from flower_desloc.app.config.errors import ConfigError, one_line
from flower_desloc.core.exits import exits_as_errors

IMPORT_FROM: Final = "DESLOC_IMPORT_FROM"
"""Environment variable: a folder that may be imported from as well, the one where `desloc` was
called. It comes last, so that no file in it hides a library."""


def is_path(name: str) -> bool:
    """Return whether ``name`` is an import path; the names of this package's own have no colon."""
    return ":" in name


def make_importable() -> None:
    """Put the folder in which `desloc` was called last on ``sys.path``."""
    folder = os.environ.get(IMPORT_FROM)
    if folder and folder not in sys.path:
        sys.path.append(folder)


def imported(path: str, key: str) -> Any:
    """Return what ``module:name``, the value of the setting ``key``, names.

    Raises ``ConfigError`` with the reason when it cannot be imported.
    """
    make_importable()
    try:
        with exits_as_errors():
            return resolve_name(path)
    except Exception as error:  # a module may do anything while it is imported
        what = f"{key}={path}: it cannot be imported here ({type(error).__name__}: {error})"
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        missing = missing and missing.partition(".")[0]
        if missing and find_spec(missing) is None:  # the module itself, or what it imports
            what += (
                f"; call desloc in the folder that holds {missing}, or install it, at every site"
            )
        raise ConfigError(one_line(what)) from error
