"""End of a command: errors, exit codes, signals."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, Never

import typer

FAILED: Final = 1
USAGE: Final = 2


def fail(code: int, message: str) -> Never:
    """Print an error and exit."""
    typer.secho(f"error: {message}", err=True, fg=typer.colors.RED)
    raise typer.Exit(code)


@contextmanager
def failing(code: int, *errors: type[Exception], where: str = "") -> Iterator[None]:
    """Exit with ``code`` and the error's message if the block raises one of ``errors``.

    ``where`` is printed before the message.
    """
    try:
        yield
    except errors as error:
        fail(code, f"{where}: {error}" if where else str(error))


@contextmanager
def exit_on_signals(
    left: str = "what the run has recorded so far stays in its folder",
) -> Iterator[None]:
    """Turn Ctrl-C, `kill` and a closed terminal into SystemExit, so that blocks clean up.

    ``left`` states what is kept of the work. The exit code is 128 + the signal's number, as in a
    shell.
    """

    def leave(number: int, _frame: FrameType | None) -> Never:
        name = signal.Signals(number).name
        typer.secho(f"stopped by {name}; {left}", err=True, fg=typer.colors.RED)
        sys.exit(128 + number)

    ending = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP"):  # not on Windows
        ending.append(signal.SIGHUP)
    before = {
        number: signal.signal(number, leave)
        for number in ending
        # The caller may ignore a signal, as nohup does with SIGHUP.
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
