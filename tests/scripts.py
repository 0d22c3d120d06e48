"""The repository: where it is, and its scripts that are no package, loaded as modules."""

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESEARCH = ROOT / "research"
sys.path.append(str(RESEARCH))  # they import each other


def without_environment(folder: Path) -> Path:
    """Return ``folder`` with what is in the repository, hidden folders left out.

    Flower looks at each file below an app, and a virtual environment has tens of thousands.
    """
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, folder)
        elif path.name[0] != "." and path.name != "runs":
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def load_script(name: str) -> Any:
    """Return ``research/NAME.py`` as a module."""
    spec = importlib.util.spec_from_file_location(name, RESEARCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
