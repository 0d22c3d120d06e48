"""The graph of imports between the files of a source tree, from their syntax alone."""

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

_DOTTED = re.compile(r"\w+(\.\w+)+(:\w+)?")


def modules(root: Path, packages: list[str]) -> dict[str, Path]:
    """Return the file of each module of ``packages``, by dotted name."""
    files = (path for package in packages for path in sorted((root / package).rglob("*.py")))
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in files
    }


def imported_names(path: Path) -> Iterator[str]:
    """Yield the dotted name of every import of a file, also of those inside functions.

    ``from a import b`` yields ``a.b``. A string that is a dotted name, with ``:`` before its last
    part or without, counts as an import: of ``import_module``, ``resolve_name``, ``python -m``.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                assert level == 0, f"{path}: imports are absolute"
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.Constant(value=str(text)) if _DOTTED.fullmatch(text):
                yield text.replace(":", ".")


def import_graph(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return which of the modules each module imports."""
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        graph[module] = set()
        for name in imported_names(path):
            # `from a.b import C` names a module, or something in the module a.b.
            target = name if name in files else name.rpartition(".")[0]
            if target in files and target != module:
                graph[module].add(target)
    return graph


def cycle(graph: Mapping[str, set[str]]) -> set[str]:
    """Return modules that import each other in a circle; none where there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return set(error.args[1])
    return set()
