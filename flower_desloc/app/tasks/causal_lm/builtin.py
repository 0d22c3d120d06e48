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

_PACKAGES = {"dist-packages", "site-packages"}
_SKIPPED_FOLDERS = {
    "__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"
}  # fmt: skip

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

_STRING_OR_COMMENT = re.compile(
    r"""(\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}"""
    r"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|[ \t]*\#[^\n]*""",
    re.DOTALL,
)
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")


def _descriptions() -> Iterator[str]:
    """Yield the long descriptions (READMEs, mostly) of the installed distributions.

    This package's own is left out: an edit of its README would change every run. So are those
    inside another package, which Ray adds to the path of a simulation and of no other process.
    """
    found = {}
    paths = [path for path in sys.path if not _PACKAGES & {*Path(path).parent.parts}]
    for distribution in metadata.distributions(path=paths):
        message = cast(Message, distribution.metadata)
        if message["Name"] == "flower-desloc":
            continue
        description = str(message.get_payload() or message.get("Description", ""))
        found[str(message["Name"])] = _well_formed(description)
    yield from (found[name] for name in sorted(found, key=lambda name: (name.lower(), name)))


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
