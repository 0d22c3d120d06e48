"""Keeps a process of Flower's, and takes it down with all it started when nobody wants it any more.

Run as ``python guard.py HOME COMMAND...``: it starts COMMAND in ``HOME/cwd`` and waits until its
own standard input closes. That pipe's other end is held by the `desloc` command, so it closes when
that returns, raises, is interrupted twice, or is killed by SIGKILL: one way out instead of four.
It imports the standard library alone, to be there at once.

With ``--restart`` before HOME, a COMMAND that ends by itself is started again, as a service manager
would: a SuperNode that was killed is refused until the SuperLink has missed it, up to a minute.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

LOG = "log"
"""Name of the file in HOME that COMMAND writes to."""

ENDED = "guard: the process ended with exit code"

_PAUSE = 2.0  # seconds before another start


def main(home: Path, command: list[str], *, restart: bool) -> int:
    """Return 0 when told to stop, 1 when COMMAND ended by itself and is not to be started again."""
    told = False
    with (home / LOG).open("wb") as log:
        while not told:
            told = _run(command, home, log)
            if told or not restart:
                break
            told = _told_within(_PAUSE)
    if told:
        shutil.rmtree(home, ignore_errors=True)
    return 0 if told else 1


def _run(command: list[str], home: Path, log: BinaryIO) -> bool:
    """Return True when told to stop, False when COMMAND has ended."""
    process = subprocess.Popen(  # noqa: S603
        command, cwd=home / "cwd", stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )
    told = False
    while not told and process.poll() is None:
        told = _told_within(0.2)
    if not told:
        log.write(f"{ENDED} {process.returncode}\n".encode())
        log.flush()
    process.terminate()
    # What is left of it must not meet the next one: two clients would write one state file.
    take_down(home)
    process.wait()
    return told


def _told_within(seconds: float) -> bool:
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def take_down(home: Path) -> None:
    """End every process that was started for ``home``, in good order if it takes a second."""
    known = _started_for(home)
    _signal(known, signal.SIGTERM)
    deadline = time.monotonic() + 1.0
    while known := _still_there(known | _started_for(home)):
        if time.monotonic() > deadline:
            # Again and again: Ray may just have started another worker.
            _signal(known, signal.SIGKILL)
        time.sleep(0.02)


class _Process(NamedTuple):
    """A process; its number alone may be another's by now."""

    pid: int
    started: str


def _signal(processes: Iterable[_Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _started_for(home: Path) -> set[_Process]:
    """Return the processes whose environment says FLWR_HOME=home, and their descendants.

    Neither a process group nor a session holds them together: Flower starts its SuperExec, and we
    the log, in sessions of their own. Nor does Flower's own chain, in which every part watches the
    pid of its parent: the simulation notices, but its main thread, waiting for the ServerApp, does
    not wake up, and it goes on training. The environment is inherited all the way down, but Ray's
    agents write their title over theirs: those are found by their parents, while they have them.

    Without /proc (macOS) there is nothing to see, and an interrupted simulation may live on.
    """
    mark = b"FLWR_HOME=" + os.fsencode(home)
    there = dict(_processes())
    found = {process for process in there if mark in _environment(process)}
    found = {process for process in found if process.pid != os.getpid()}
    while more := {p for p, parent in there.items() if parent in {f.pid for f in found}} - found:
        found |= more
    return found


def _still_there(processes: set[_Process]) -> set[_Process]:
    return processes & dict(_processes()).keys()


def _processes() -> Iterator[tuple[_Process, int]]:
    """Yield every process that has not ended, and the pid of its parent."""
    for entry in Path("/proc").glob("[0-9]*"):
        # It may end while we look at it.
        with contextlib.suppress(OSError):
            # The name, in parentheses, may hold anything; see proc(5) for what follows it.
            state, parent, *rest = (entry / "stat").read_text().rpartition(")")[2].split()
            if state != "Z":
                yield _Process(int(entry.name), rest[17]), int(parent)


def _environment(process: _Process) -> list[bytes]:
    # It may have ended; and another user's is none of our business.
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    return []


if __name__ == "__main__":
    restart = sys.argv[1] == "--restart"
    home, *command = sys.argv[1 + restart :]
    sys.exit(main(Path(home), command, restart=restart))
