"""A SuperExec whose ClientApp processes do not import Flower, or unpack the app, again.

Flower's SuperExec starts a program for every message, which imports Flower for a second of a core
and unpacks the app before it does anything. Here one process has imported it, and is forked for
every message; the first of these unpacks the app for all. It holds no thread, no connection and
none of the app's modules; it is the parent of the SuperExec, and ends with it. ``desloc supernode``
runs this file in place of ``flower-superexec``.
"""

import gc
import hashlib
import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

COMMAND = (sys.executable, "-P", "-m", "flower_desloc.app.sites.deployment.superexec")
"""Runs this file; -P keeps modules in the working directory from being imported."""

_CLIENTAPP = "flwr-clientapp"


def main() -> None:
    """Run `flower-superexec` with the arguments of the command line."""
    # What a warm client imports besides; neither has threads, as PyTorch does.
    import multiprocessing.connection  # noqa: F401

    import httpx
    import psutil  # noqa: F401

    from flower_desloc.flower.internals import (
        flower_superexec,
        flwr_clientapp,
        run_clientapp,
        subprocess_executor,
    )

    # The first client imports the rest of its package, and takes a fifth of a second to learn which
    # classes are mappings; this one connects to nothing.
    httpx.Client(verify=False).close()  # noqa: S501
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        # Flower offers no other hook: this is its own name for starting a process.
        subprocess_executor.subprocess = SimpleNamespace(  # type: ignore[attr-defined, assignment]
            **vars(subprocess) | {"Popen": popen_by_fork(writer)}
        )
        sys.argv[0] = "flower-superexec"
        flower_superexec()
        return
    os.close(writer)
    run_clientapp.install_from_fab = once_for_all(run_clientapp.install_from_fab)  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the SuperExec, and so this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps ended children
    for module in [name for name in sys.modules if name.partition(".")[0] == "flower_desloc"]:
        del sys.modules[module]  # a run brings its own copy
    gc.collect()
    gc.freeze()  # a collection in a forked process would write to, and so copy, every object
    with os.fdopen(reader) as lines:
        if forked_for(lines):
            flwr_clientapp()


def once_for_all(install: Callable[..., Path]) -> Callable[..., Path]:
    """Return a function that unpacks an app, which does nothing where that was the last one.

    It knows so also in a process that is forked before an app is unpacked in another.
    """
    shared = mmap.mmap(-1, mmap.PAGESIZE)

    def proof(fab: bytes, path: bytes) -> bytes:
        return hashlib.sha256(hashlib.sha256(fab).digest() + path).hexdigest().encode()

    def install_once(fab: bytes, **options: Any) -> Path:
        stated, _, path = shared[:].rstrip(b"\0").partition(b" ")
        if stated == proof(fab, path) and (done := Path(os.fsdecode(path))).is_dir():
            return done
        done = install(fab, **options)
        path = os.fsencode(done)
        line = proof(fab, path) + b" " + path
        if len(line) <= len(shared):
            shared[:] = line.ljust(len(shared), b"\0")
        return done

    return install_once


def popen_by_fork(writer: int) -> Any:
    """Return a ``Popen`` that writes the command lines of ClientApps to a pipe, one per line."""

    def start(command: list[str], **how: Any) -> object:
        if command[0] != _CLIENTAPP or how:
            return subprocess.Popen(command, **how)  # noqa: S603
        return os.write(writer, f"{json.dumps(command)}\n".encode())

    return start


def forked_for(lines: Iterable[str]) -> bool:
    """Fork for each of ``lines``: return True in the forked processes, and False at the end.

    A forked process has the command line of the line.
    """
    for line in lines:
        if os.fork() == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            sys.argv = json.loads(line)
            return True
    return False


if __name__ == "__main__":
    main()
