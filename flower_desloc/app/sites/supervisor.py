"""Start a process, capture its output, and end its whole process tree when its owner goes away.

``supervised`` runs a command under a supervisor: a small process of its own, which is this file
run as a script. The supervisor ends the command and everything the command has started as soon as
its standard input closes. The process that called ``supervised`` holds the other end of that
pipe, so the pipe closes however that process ends, SIGKILL included.

The script imports psutil and the standard library only, so it starts at once. ``start_module``,
``on_exit`` and ``describe_exit`` are for processes that watch each other without one.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import psutil

_LOG = "log"  # file in the home folder that the command writes to
_EXITED = "supervisor: the process ended with exit code"
TAIL_LINES = 20
_START_TIMEOUT = 120.0  # seconds
_RESTART_DELAY = 2.0  # seconds
_TERMINATE_TIMEOUT = 1.0  # seconds between SIGTERM and SIGKILL
SAVES_STATE = "--saves-state"
"""In the command line of a process that may write a client's state after SIGTERM."""
SAVE_TIMEOUT = 60.0
"""Seconds that such a process may take for it."""


Process = subprocess.Popen[bytes]


class ProcessError(RuntimeError):
    """A Flower program did not start, refused a request, or ended unexpectedly."""


@dataclass(frozen=True)
class Supervised:
    """A command that runs under a supervisor."""

    home: Path
    supervisor: Process

    def log(self) -> str:
        """Return what the command has written so far."""
        with suppress(FileNotFoundError):  # the supervisor is just starting
            return (self.home / _LOG).read_text(encoding="utf-8", errors="replace")
        return ""

    def log_tail(self) -> str:
        """Return the last lines that the command has written."""
        return "\n".join(self.log().splitlines()[-TAIL_LINES:])

    @property
    def has_exited(self) -> bool:
        """True if the command has ended by itself, even if it was restarted since."""
        return _EXITED in self.log() or self.supervisor.poll() is not None

    def wait_for_log(self, text: str, what: str) -> None:
        """Wait until the log contains ``text``.

        Raises ``ProcessError`` with the end of the log if the command ends first, even if it
        is restarted, or takes longer than two minutes.
        """
        deadline = time.monotonic() + _START_TIMEOUT
        while text not in self.log():
            if self.has_exited or time.monotonic() > deadline:
                raise ProcessError(f"{what}; its log ends with\n{self.log_tail()}")
            time.sleep(0.05)


def require_unix() -> None:
    """Raise ``ProcessError`` on Windows, where no Flower process can be supervised."""
    if sys.platform == "win32":  # select() only takes sockets there, and there is no SIGKILL
        raise ProcessError(
            "Flower's processes: this needs Linux or macOS; `desloc run --engine inprocess` trains "
            "without them"
        )


@contextmanager
def supervised(
    home: Path, command: Sequence[str], environment: Mapping[str, str], *, restart: bool = False
) -> Iterator[Supervised]:
    """Run ``command`` in ``home/cwd`` with its output in ``home/log``; end its tree on exit.

    ``environment`` must set FLWR_HOME to ``home``: the process tree is recognised by it. With
    ``restart`` the command is started again whenever it ends by itself.
    """
    flags = ["--restart"] if restart else []
    # Some clusters provide packages by PYTHONPATH, psutil among them. An empty entry of it is the
    # current folder, from which the supervisor imports nothing.
    path = os.pathsep.join(filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)))
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-P", __file__, *flags, str(home), *command],
        env={**environment, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        yield Supervised(home, process)
    finally:
        process.stdin.close()
        process.wait()
        end_all(home)  # finds something only if the supervisor itself was killed


def end_all(home: Path) -> None:
    """End every process that was started for ``home``: SIGTERM, then SIGKILL after a second.

    A process that ``SAVES_STATE`` gets a minute more.
    """
    known = processes = _started_for(home)
    saving = {p for p in processes if _saves_state(p)}
    _signal(processes, signal.SIGTERM)
    deadline = time.monotonic() + _TERMINATE_TIMEOUT
    while processes:
        late = time.monotonic() - deadline
        if late > SAVE_TIMEOUT:
            _signal(processes, signal.SIGKILL)
        elif late > 0:
            _signal(processes - saving, signal.SIGKILL)
        time.sleep(0.05)
        # Ray, or a client with a message, may just have started another one. It is in a list that
        # is made after its parent has ended.
        processes = {p for p in known if _is_running(p)}
        processes |= _started_for(home) - known
        known |= processes
        found = {p for p in processes - saving if _saves_state(p)}
        _signal(found, signal.SIGTERM)
        saving |= found


def end_savers(owner: int) -> None:
    """End the processes that save a state and have the pid ``owner`` as an argument.

    Returns when they have ended, at most a minute later.
    """
    found = {p for p in psutil.process_iter() if _saves_state(p, str(owner))}
    _signal(found, signal.SIGTERM)
    deadline = time.monotonic() + SAVE_TIMEOUT
    while any(map(_is_running, found)) and time.monotonic() < deadline:
        time.sleep(0.05)


def _started_for(home: Path) -> set[psutil.Process]:
    """Return the processes with FLWR_HOME=home in their environment, and their descendants.

    A process group or session does not contain them all: Flower starts its SuperExec in a session
    of its own. Nor do they end each other: after its parent is killed, a simulation notices, but
    its main thread waits for the ServerApp and continues to train. The environment is inherited all
    the way down, except that Ray's agents overwrite theirs with a title; those are found as
    descendants.
    """
    processes = list(psutil.process_iter(["environ", "ppid"]))
    mark = str(home)
    found = {p for p in processes if (p.info["environ"] or {}).get("FLWR_HOME") == mark}
    found = {p for p in found if p.pid != os.getpid()}
    while more := {p for p in processes if p.info["ppid"] in {f.pid for f in found}} - found:
        found |= more
    return found


def _is_running(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _saves_state(process: psutil.Process, *arguments: str) -> bool:
    with suppress(psutil.Error):
        return {SAVES_STATE, *arguments} <= {*process.cmdline()}
    return False


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def start_module(module: str, *arguments: object, pass_fds: Sequence[int] = ()) -> Process:
    """Start ``python -m module`` with everything that this process can import.

    Ctrl-C in a terminal is for this process: the other has a session of its own.
    """
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-P", "-m", module, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        pass_fds=pass_fds,
        start_new_session=True,
    )


def can_watch() -> bool:
    """Return whether ``on_exit`` works here.

    Some builds of Python lack ``os.pidfd_open``, for example conda's; so do Linux before 5.3 and
    containers that do not allow the system call.
    """
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def on_exit(pid: int, action: Callable[[], None]) -> None:
    """Call ``action``, in a thread of its own, once the process has ended (Linux only).

    Not ``psutil.Process.wait``: for a process that is not a child it also waits until the parent
    has reaped it, which a container without an init process never does.

    Raises ``ProcessLookupError`` if there is no such process. ``can_watch`` tells where it works.
    """
    process = os.pidfd_open(pid)

    def wait() -> None:
        try:
            ended = select.poll()
            ended.register(process, select.POLLIN)
            ended.poll()
        finally:
            os.close(process)
        action()

    try:
        threading.Thread(target=wait, daemon=True).start()
    except RuntimeError:  # no more threads
        os.close(process)
        raise


def describe_exit(code: int) -> str:
    """Return how a process ended, from its exit code, as the end of a sentence."""
    if code >= 0:
        return f"ended with status {code}"
    name = signal.Signals(-code).name
    return f"was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def main(home: Path, command: list[str], *, restart: bool) -> int:
    """Return 0 when asked to stop, 1 when the command ended by itself and is not restarted."""
    with (home / _LOG).open("wb") as log:
        stop = _run(command, home, log)
        # A SuperNode that was killed is refused for up to a minute, until the SuperLink has missed
        # its heartbeats: keep trying, as a service manager would.
        while restart and not stop:
            stop = _stdin_closed(_RESTART_DELAY) or _run(command, home, log)
    if stop:
        shutil.rmtree(home.resolve(), ignore_errors=True)  # it may be a link
        home.unlink(missing_ok=True)
    return 0 if stop else 1


def _run(command: list[str], home: Path, log: BinaryIO) -> bool:
    """Run the command; return True if standard input closed, False if the command ended first."""
    process = subprocess.Popen(  # noqa: S603
        command, cwd=home / "cwd", stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )
    stop = False
    while not stop and process.poll() is None:
        stop = _stdin_closed(0.2)
    if not stop:
        log.write(f"{_EXITED} {process.returncode}\n".encode())
        log.flush()
    # Also before a restart: two ClientApps would write the same state file.
    end_all(home)
    process.wait()
    return stop


def _stdin_closed(seconds: float) -> bool:
    return bool(select.select([sys.stdin], [], [], seconds)[0])


if __name__ == "__main__":
    _restart = sys.argv[1] == "--restart"
    _home, *_command = sys.argv[1 + _restart :]
    sys.exit(main(Path(_home), _command, restart=_restart))
