"""Takes a SuperLink and all it started down when the process that wanted it is gone.

Run as ``python guard.py HOME COMMAND...``, never imported: it starts COMMAND in ``HOME/cwd`` and
waits until its own standard input closes. That pipe's other end is held by ``desloc run``, so it
closes when ``desloc run`` returns, raises, is interrupted twice, or is killed by SIGKILL: one way
out instead of four. Only the standard library is imported, so that it starts at once.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path


def main(home: Path, command: list[str]) -> int:
    """Return 0 when told to stop, 1 when COMMAND ended by itself."""
    with (home / "superlink.log").open("wb") as log:
        superlink = subprocess.Popen(  # noqa: S603
            command, cwd=home / "cwd", stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    told = False
    while not told and superlink.poll() is None:
        told = bool(select.select([sys.stdin], [], [], 0.2)[0])
    _signal(home, signal.SIGTERM)
    _wait(superlink, home, seconds=2.0)
    while superlink.poll() is None or any(_started_for(home)):
        _signal(home, signal.SIGKILL)  # again and again: Ray may just have started another worker
        _wait(superlink, home, seconds=0.2)
    if told:
        shutil.rmtree(home, ignore_errors=True)
    return 0 if told else 1


def _signal(home: Path, number: signal.Signals) -> None:
    for pid in _started_for(home):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _wait(superlink: subprocess.Popen[bytes], home: Path, *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    # Polling also reaps the SuperLink; the others are init's children by now.
    while superlink.poll() is None or any(_started_for(home)):
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _started_for(home: Path) -> Iterator[int]:
    """Yield the processes whose environment says FLWR_HOME=home.

    Neither a process group nor a session holds them together: Flower starts its SuperExec, and
    Ray its workers, in sessions of their own. The environment is inherited all the way down.
    Without /proc (macOS) nothing is found and Flower's own chain has to do: SuperExec and
    simulation watch the pid of their parent, Ray's daemons that of the simulation.
    """
    mark = b"FLWR_HOME=" + os.fsencode(home)
    for entry in Path("/proc").glob("[0-9]*"):
        # A process may end while we look at it; another user's is none of our business.
        with contextlib.suppress(OSError):
            if int(entry.name) != os.getpid() and mark in (entry / "environ").read_bytes().split(
                b"\0"
            ):
                yield int(entry.name)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
