"""Digests of the code that runs, by which the sites, a resumed run and a study notice a change."""

import ast
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from flower_desloc.core.errors import SiteRefusedError

PACKAGE = "flower_desloc"
"""The entry of this package in a mapping of digests."""

_SENT = {PACKAGE, "client_app", "server_app"}
"""Compared as a whole, and sent by Flower."""
_INSTALLED = {"site-packages", "dist-packages"}


@cache
def fingerprint() -> str:
    """Return a digest of this package's source.

    In a simulation another copy may be imported than the one that was sent.
    """
    return digest_of(Path(__file__).resolve().parents[1])


def digest_of(package: Path) -> str:
    """Return a digest of a package's source, without the app's that a wheel of this one holds.

    That app, in the folder ``flower_app``, is always the one that was sent.
    """
    digest = hashlib.sha256()
    for path in sorted({*package.rglob("*.py")} - {*package.glob("flower_app/**/*.py")}):
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(_digest(path.read_bytes()).encode())
    return digest.hexdigest()[:16]


def code_of(modules: Iterable[str]) -> dict[str, str]:
    """Return a digest of each source file of ``modules``, and of what they import near them.

    That is whatever their import statements name in the same folder of ``sys.path``; in a folder
    of installed packages, in the same package. Files are named relative to that folder, so that
    two sites agree. Nothing is imported, except the packages that a dotted name is in.
    """
    found: dict[str, str] = {}
    for module in modules:
        top = module.partition(".")[0]
        if (root := folder_of(top)) is not None:
            own = {top} if is_installed(root) else None
            _collect(root, module, own, found)
    return dict(sorted(found.items()))


def differing(code: Mapping[str, str]) -> dict[str, Path]:
    """Return the files that ``code_of`` found elsewhere and that differ here or are missing.

    By their names in ``code``.

    A module that cannot be found here at all is left to its import, which says why. Raises
    ``ValueError`` for any other file: an answer would tell what is in it.
    """
    files = {}
    for name, digest in code.items():
        path = PurePosixPath(name)
        if path.suffix != ".py" or not all(
            part.isidentifier() for part in path.with_suffix("").parts
        ):
            raise ValueError(f"the server asks for the digest of {name!r}, which is no module")
        top = path.parts[0].removesuffix(".py")
        if (root := folder_of(top)) is not None:
            file = root / name
            if not file.is_file() or _digest(file.read_bytes()) != digest:
                files[name] = file
    return files


def require_same_code(server: Mapping[str, str], client: str) -> None:
    """Raise ``SiteRefusedError`` unless a client's code is the ``server``'s, given its digests."""
    code = dict(server)
    if code.pop(PACKAGE, "") != fingerprint():
        raise SiteRefusedError(
            f"{client} runs other code than the server: another version of flower-desloc is "
            "installed here, or the SuperLink or SuperNode was started in a folder that holds a "
            "copy of the app; install the server's version, and start it in an empty folder",
            f"the code here is in {Path(__file__).parents[1]}",
        )
    if files := differing(code):
        more = f", and {len(files) - 3} more" if len(files) > 3 else ""
        raise SiteRefusedError(
            f"{client} runs other code than the server: it has another version, or none, of "
            f"{', '.join([*files][:3])}{more}; copy the server's version there",
            f"here they are {', '.join(map(str, files.values()))}",
        )


def folder_of(top: str) -> Path | None:
    """Return the folder from which a top-level module is imported; None if there is none."""
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):  # the latter of a module without a spec
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:  # a package
        return Path(next(iter(spec.submodule_search_locations))).parent
    return Path(spec.origin).parent if spec.has_location and spec.origin else None


def is_installed(folder: Path) -> bool:
    """Return whether a folder of ``sys.path`` is one of installed packages."""
    return folder.name in _INSTALLED


def _collect(root: Path, module: str, own: set[str] | None, found: dict[str, str]) -> None:
    """Add the digests of a module and what it imports in ``root``; ``own`` limits the packages."""
    names, seen = [module], set[str]()
    while names:
        name = names.pop()
        top = name.partition(".")[0]
        if name in seen or top in _SENT or not (top in own if own else folder_of(top) == root):
            continue
        seen.add(name)
        names += [name.rpartition(".")[0]] if "." in name else []  # Python imports it first
        stem = root.joinpath(*name.split("."))
        for file in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")):
            if file.is_file():
                source = file.read_bytes()
                found[file.relative_to(root).as_posix()] = _digest(source)
                package = name if file.stem == "__init__" else name.rpartition(".")[0]
                names += _imported(source, package)
                break


def _imported(source: bytes, package: str) -> Iterator[str]:
    """Yield the modules that import statements may name, also those inside functions."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # the import itself reports it
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            within = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*within, *([node.module] if node.module else [])])
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def _digest(source: bytes) -> str:
    # A checkout may convert the ends of lines.
    return hashlib.sha256(source.replace(b"\r\n", b"\n")).hexdigest()[:16]
