"""Scripts of the repository that are no package, loaded as modules."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESEARCH = ROOT / "research"
sys.path.append(str(RESEARCH))  # they import each other


def load_script(name: str) -> Any:
    """Return ``research/NAME.py`` as a module."""
    spec = importlib.util.spec_from_file_location(name, RESEARCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
