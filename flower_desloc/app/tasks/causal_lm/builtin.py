"""Text that every Python installation contains, in four naturally different domains."""

import ast
import gc
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from email.message import Message
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path
from typing import cast

from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

_PACKAGES = {"dist-packages", "site-packages"}
_SKIPPED_FOLDERS = {
    "__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"
}  # fmt: skip

_ROOTS = ("flwr", "torch", "transformers", "datasets", "scikit-learn", "matplotlib", "pandas")
"""Packages whose descriptions are text, with those of all that they require."""

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

_STRING_OR_COMMENT = re.compile(
    r"""(\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}"""
    r"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|[ \t]*\#[^\n]*""",
    re.DOTALL,
)
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")


def _descriptions() -> Iterator[str]:
    """Yield the long descriptions (READMEs, mostly) of what the project depends on.

    Not of whatever is installed: another package would change every run. So would an edit of this
    package's own. Those inside another package, which Ray adds to the path of a simulation and of
    no other process, are left out.
    """
    paths = [path for path in sys.path if not _PACKAGES & {*Path(path).parent.parts}]
    installed = {
        canonicalize_name(found.metadata["Name"]): found
        for found in metadata.distributions(path=paths)
    }
    wanted, known = [canonicalize_name(root) for root in _ROOTS], set[NormalizedName]()
    while wanted:
        name = wanted.pop()
        if name in known or name not in installed:
            continue
        known.add(name)
        for line in installed[name].requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted.append(canonicalize_name(requirement.name))
    for name in sorted(known):
        message = cast(Message, installed[name].metadata)
        yield _well_formed(str(message.get_payload() or message.get("Description", "")))


def _topics() -> Iterator[str]:
    """Yield the chapters of the language reference that ``help()`` shows."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    yield from (topics[name] for name in sorted(topics))


def _standard_library(part: int) -> Iterator[str]:
    for path in _library_files():
        if text := _code_and_docstrings(path)[part]:
            yield text


@lru_cache(maxsize=1)
def _library_files() -> list[Path]:
    """Return the Python files of the standard library, sorted by path."""
    files: list[Path] = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        # Pruned during the walk: site-packages is usually inside, and large.
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        files.extend(Path(folder, name) for name in names if name.endswith(".py"))
    return sorted(files)


@lru_cache(maxsize=1024)  # one parse serves two domains
def _code_and_docstrings(path: Path) -> tuple[str, str]:
    """Return a module's code without docstrings and comments, and its docstrings."""
    source = path.read_bytes()
    try:
        lines: list[str | None] = [*source.decode().split("\n")]
        found = _docstrings(source)
    except (SyntaxError, ValueError):  # some files of the library are broken on purpose
        return "", ""
    docstrings = []
    for first, last, docstring in found:
        docstrings.append(docstring)
        lines[first - 1 : last] = [None] * (last + 1 - first)
    code = "\n".join(line for line in lines if line is not None)
    code = _STRING_OR_COMMENT.sub(lambda match: match[1] or "", code)
    return _BLANK_LINES.sub("\n\n", code).strip(), _well_formed("\n\n".join(docstrings))


def _docstrings(source: bytes) -> list[tuple[int, int, str]]:
    """Return the first and last line and the text of every docstring, in the order of the file."""
    # A syntax tree has many nodes and no cycles: collecting them takes twice as long as the parse.
    enabled = gc.isenabled()
    gc.disable()
    try:
        return [
            (node.body[0].lineno, node.body[0].end_lineno or node.body[0].lineno, docstring)
            for node, docstring in _documented(ast.parse(source))
        ]
    finally:
        if enabled:
            gc.enable()


def _documented(node: ast.AST) -> Iterator[tuple[_Documented, str]]:
    if isinstance(node, _Documented) and (docstring := ast.get_docstring(node)):
        yield node, docstring
    for statement in getattr(node, "body", ()):
        # Statements only: expressions are most of the tree and have no docstrings.
        if isinstance(statement, _Documented | ast.If | ast.Try):
            yield from _documented(statement)


def _well_formed(text: str) -> str:
    """Return ``text`` with Unix line ends, without surrogates that UTF-8 cannot encode."""
    return text.encode(errors="replace").decode().replace("\r\n", "\n")


BUILTIN: dict[str, Callable[[], Iterator[str]]] = {
    "docs": _descriptions,
    "code": partial(_standard_library, 0),
    "docstrings": partial(_standard_library, 1),
    "reference": _topics,
}
"""Texts by domain. Their order is fixed: clients get domains by it."""
