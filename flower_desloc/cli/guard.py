"""Takes a SuperLink and all it started down when the process that wanted it is gone.

Run as ``python guard.py HOME COMMAND...``: it starts COMMAND in ``HOME/cwd`` and waits until its
own standard input closes. That pipe's other end is held by ``desloc run``, so it closes when
``desloc run`` returns, raises, is interrupted twice, or is killed by SIGKILL: one way out instead
of four. It imports the standard library alone, to be there at once.
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
    superlink.terminate()
    take_down(home)
    superlink.wait()
    if told:
        shutil.rmtree(home, ignore_errors=True)
    return 0 if told else 1


def take_down(home: Path) -> None:
    """End every process that was started for ``home``, in good order if it takes a second."""
    _signal(home, signal.SIGTERM)
    deadline = time.monotonic() + 1.0
    while any(_started_for(home)):
        if time.monotonic() > deadline:
            # Again and again: Ray may just have started another worker.
            _signal(home, signal.SIGKILL)
        time.sleep(0.02)


def _signal(home: Path, number: signal.Signals) -> None:
    for pid in _started_for(home):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _started_for(home: Path) -> Iterator[int]:
    """Yield the processes whose environment says FLWR_HOME=home.

    Neither a process group nor a session holds them together: Flower starts its SuperExec, and we
    the log, in sessions of their own. Nor does Flower's own chain, in which every part watches the
    pid of its parent: the simulation notices, but its main thread, waiting for the ServerApp, does
    not wake up, and it goes on training. The environment is inherited all the way down.

    Without /proc (macOS) there is nothing to see, and an interrupted simulation may live on.
    """
    mark = b"FLWR_HOME=" + os.fsencode(home)
    for entry in Path("/proc").glob("[0-9]*"):
        # It may end while we look at it; and another user's is none of our business.
        with contextlib.suppress(OSError):
            environment = (entry / "environ").read_bytes().split(b"\0")
            if mark in environment and int(entry.name) != os.getpid():
                yield int(entry.name)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
