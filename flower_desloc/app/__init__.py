"""The app: configuration, tasks, runs, reports, studies and the command line.

It needs the extra ``app``. Python code imports ``run``, ``load_run`` and ``compare`` from here.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from flower_desloc.core.extras import to_install

if find_spec("transformers") is None:
    raise ImportError(
        f"flower_desloc.app and the command desloc need the extra app: {to_install('app')}"
    )

_OF_NOTEBOOKS = ("RunResult", "compare", "load_run", "run")


def __getattr__(name: str) -> Any:
    if name in _OF_NOTEBOOKS:
        return getattr(import_module(f"{__name__}.engines.notebook"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
