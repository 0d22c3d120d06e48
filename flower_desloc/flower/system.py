"""The system's folders and proxies, as its environment variables name them."""

import ctypes
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from logging import WARNING
from pathlib import Path
from typing import Final

from flower_desloc.flower.internals import log

_CACHE: Final = "XDG_CACHE_HOME"
_LONGEST_SOCKET: Final = 103
"""Bytes in the path of a Unix socket: 107 on Linux, 103 on macOS."""
_SOCKET: Final = "0123456789abcdef.sock"
"""As long as the name of a socket."""
_LEAST_SPACE: Final = 50_000_000
"""Bytes for the app, logs and databases of Flower's processes, and Ray's logs."""
_SHORT_FOLDERS: Final = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108


def return_memory() -> None:
    """Return freed memory to the operating system; glibc may keep it for later allocations."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def cannot_write(folder: Path) -> str | None:
    """Return why no file can be made in ``folder``, which may not exist yet; None if one can."""
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    if not existing.is_dir():
        return f"{existing} is not a folder"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} is not writable"
    return None


def home_folder() -> Path:
    """Return the user's home folder; raises ``FileNotFoundError`` if none is known."""
    try:
        return Path.home()
    except RuntimeError:
        raise FileNotFoundError(
            "this user has no home folder: set the environment variable HOME"
        ) from None


def flower_home() -> Path:
    """Return Flower's home folder; raises ``FileNotFoundError`` if none is known."""
    named = os.environ.get("FLWR_HOME")
    return Path(named) if named else home_folder() / ".flwr"


def temporary_folder() -> Path:
    """Return the folder for temporary files; raises ``FileNotFoundError`` if there is none."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        raise FileNotFoundError(
            "there is no folder for temporary files: TMPDIR, /tmp, /var/tmp and the current folder "
            "are full or not writable; set TMPDIR to a folder with free space"
        ) from None


def new_temporary_folder(longest: int) -> Path:
    """Make a temporary folder for files and sockets; return a path of it that is short.

    Where the folder for temporary files has a path of more than ``longest`` bytes, which sockets
    have no room for, it is a link. ``remove`` deletes both.

    Raises ``FileNotFoundError`` if there is no folder for temporary files, or for the link, and
    ``OSError`` if its disk is nearly full.
    """
    parent = temporary_folder()
    if (free := shutil.disk_usage(parent).free) < _LEAST_SPACE:
        raise OSError(
            f"the folder for temporary files, {parent}, has {free // 1_000_000} MB free, and "
            f"Flower and Ray need {_LEAST_SPACE // 1_000_000}; set TMPDIR to one with free space"
        )
    folder = Path(tempfile.mkdtemp(prefix="desloc-", dir=parent)).resolve()
    if len(os.fsencode(folder.parent)) <= longest:
        return folder
    for short in _SHORT_FOLDERS:
        with suppress(OSError):
            link = Path(short, folder.name)
            link.symlink_to(folder)
            return link
    folder.rmdir()
    raise FileNotFoundError(
        f"TMPDIR={parent}: sockets need a path of at most {longest} characters, and none of "
        f"{', '.join(_SHORT_FOLDERS)} is writable, for a link; set TMPDIR to a shorter path"
    )


def remove(folder: Path) -> None:
    """Delete a folder that ``new_temporary_folder`` made, if it is still there."""
    shutil.rmtree(folder.resolve(), ignore_errors=True)
    with suppress(OSError):
        folder.unlink()


def socket_folder() -> Path:
    """Return the folder for the sockets of this user's processes; raises ``OSError``."""
    for parent in (temporary_folder(), *map(Path, _SHORT_FOLDERS)):
        folder = private_folder(parent)
        if len(os.fsencode(folder / _SOCKET)) <= _LONGEST_SOCKET:
            return folder
    raise AssertionError


def private_folder(parent: Path) -> Path:
    """Return the folder in ``parent`` that only this user can enter; raises ``OSError``."""
    if not hasattr(os, "getuid"):
        raise PermissionError("this system cannot tell whose a folder is")
    folder = parent / f"desloc-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder that only this user can enter")
    return folder


def cache_folder() -> Path:
    """Return the folder of this package's files that can be computed again."""
    return _caches() / "flower-desloc"


def use_writable_caches() -> None:
    """Let this package and Hugging Face's keep their caches in a folder that is writable.

    Call it before theirs are imported, which read the environment variables then.
    """
    try:
        caches = _caches()
        reason = cannot_write(caches)
    except FileNotFoundError as error:
        caches, reason = None, str(error).partition(":")[0]
    if reason is None:
        return
    try:
        instead = private_folder(temporary_folder()) / "cache"
    except OSError:  # what needs a cache reports it
        return
    os.environ[_CACHE] = str(instead)
    if caches is not None and (models := caches / "huggingface" / "hub").is_dir():
        os.environ.setdefault("HF_HUB_CACHE", str(models))  # they can still be read
    log(
        WARNING,
        "caches are in %s: %s; set HOME or %s to keep them",
        instead,
        reason,
        _CACHE,
    )


def described() -> str:
    """Return the folders and proxies that this process uses, in a line."""
    try:
        caches, temporary = str(_caches()), str(temporary_folder())
    except FileNotFoundError as error:
        return str(error)
    ends = {name: name.lower().rpartition("_") for name in os.environ}
    proxies = [n for n, (what, _, end) in sorted(ends.items()) if end == "proxy" and what != "no"]
    return (
        f"caches: {caches}; temporary files: {temporary}; "
        f"proxies: {', '.join(proxies) or 'none'}, never for 127.0.0.1"
    )


def _caches() -> Path:
    named = os.environ.get(_CACHE)
    return Path(named) if named else home_folder() / ".cache"


def direct_on_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of Flower processes that also talk to each other on this machine.

    Flower's client applies the proxy variables to 127.0.0.1. With a SOCKS proxy it ends at once,
    whatever address it is for, unless `httpx` can use one.
    """
    kept = dict(environment)
    for name in _unusable_proxies(environment):
        del kept[name]
        log(WARNING, "%s is not used: a SOCKS proxy needs `pip install httpx[socks]`", name)
    own = filter(None, [environment.get("no_proxy"), environment.get("NO_PROXY")])
    direct = ",".join([*own, "127.0.0.1", "localhost"])
    return kept | {"NO_PROXY": direct, "no_proxy": direct}


def _unusable_proxies(environment: Mapping[str, str]) -> Iterator[str]:
    if find_spec("socksio") is not None:
        return
    for name, value in environment.items():
        if name.lower().endswith("_proxy") and value.lower().startswith("socks"):
            yield name
