"""Processes in tests: their output, default signals, waiting for events, finding what is left."""

import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psutil

DEFAULT_SIGNALS = (
    "import signal\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
)
"""First lines of a program that a test sends signals to: a shell that starts a job in the
background, or nohup, makes every process below ignore them."""


def output_of(command: Sequence[object], **options: Any) -> str:
    """Return what a command prints; if it fails, show that and its errors."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait_until(
    condition: Callable[[], object],
    report: Callable[[], object] = lambda: "nothing to report",
    limit: float = 600,
) -> None:
    """Wait for ``condition``; after ``limit`` seconds fail with ``report``."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"not in {limit} s: {report()}"
        time.sleep(0.05)


def command_line(process: psutil.Process) -> str:
    """Return a process's command line, "" if it has ended."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Return a process's environment, empty if it has ended."""
    with suppress(psutil.Error):
        return process.environ()
    return {}


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """Return the processes that have a variable in their environment."""
    return [p for p in psutil.process_iter() if environment_of(p).get(name) == value]


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended, even if nobody has asked for its status yet."""
    with suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True
