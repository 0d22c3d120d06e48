"""Laws of the house: which way imports point, and which names there are."""

import ast
import doctest
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "flower_desloc"
CORE = [
    *sorted((PACKAGE / "core").glob("*.py")),
    *sorted((PACKAGE / "optim").glob("*.py")),
]
CORE_MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in CORE
}
# Its doors to the machine: C, or nothing where there is no compiler; and large pages.
DOORS = "flower_desloc.native"
# Pure Python that neither reads nor writes: no logging, os, pathlib, json, time, ...
PURE = {
    "collections",
    "dataclasses",
    "functools",
    "hashlib",
    "itertools",
    "math",
    "random",
    "statistics",
    "typing",
}


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute"
            names.add(node.module or "")
    return names


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_the_core_imports_pytorch_pure_python_and_itself(path):
    for name in imported(path):
        top = name.partition(".")[0]
        allowed = top in PURE | {"torch"} or name in CORE_MODULES or name.startswith(DOORS)
        assert allowed, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_the_core_neither_reads_nor_writes_nor_prints(path):
    assert not names_in(path) & {"open", "print", "input", "exec", "eval", "__import__"}
    text = path.read_text(encoding="utf-8")
    assert not [
        call for call in ("torch.save", "torch.load", "manual_seed", "warn(") if call in text
    ]


def fresh(code: str) -> str:
    """Run ``code`` in an interpreter that has imported nothing yet."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_core_imports_pytorch_but_neither_flower_nor_a_library_of_the_edge():
    core = ", ".join(sorted(CORE_MODULES))
    modules = set(json.loads(fresh(f"import {core}, json, sys; print(json.dumps([*sys.modules]))")))
    edge = {"flwr", "omegaconf", "transformers", "datasets", "flower_desloc.config", "ray", "typer"}
    assert "torch" in modules
    assert not modules & edge


def test_the_strategy_is_imported_when_asked_for():
    code = "from flower_desloc import DesLoc; from flwr.serverapp.strategy import Strategy; "
    assert fresh(code + "print(issubclass(DesLoc, Strategy))").strip() == "True"


@pytest.mark.parametrize("name", ["flower_desloc", "flower_desloc.optim", "flower_desloc.config"])
def test_all_is_the_public_names(name):
    package = importlib.import_module(name)
    imported_for_itself = {"TYPE_CHECKING", "Any", "import_module"}
    lazy = {key for names in vars(package).get("_HOMES", {}).values() for key in names}
    assert all(hasattr(package, key) for key in lazy)
    public = {
        key
        for key, value in vars(package).items()
        if not key.startswith("_") and not isinstance(value, ModuleType)
    }
    assert (public - imported_for_itself) | lazy == set(package.__all__)
    assert len(set(package.__all__)) == len(package.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error():
    import flower_desloc

    with pytest.raises(AttributeError, match="'flower_desloc' has no attribute 'Desloc'"):
        flower_desloc.Desloc  # noqa: B018


def test_the_examples_in_the_cores_docstrings_are_true():
    results = [doctest.testmod(importlib.import_module(name)) for name in sorted(CORE_MODULES)]
    assert sum(result.attempted for result in results) > 0
    assert sum(result.failed for result in results) == 0


def test_every_module_opens_with_a_sentence():
    for path in PACKAGE.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path


def test_the_oracle_imports_nothing_of_ours():
    names = {name.partition(".")[0] for name in imported(ROOT / "tests" / "reference.py")}
    assert names <= PURE | {"torch"}
