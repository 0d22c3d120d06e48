"""How a command of ours ends."""

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
    """Say what went wrong and exit."""
    typer.secho(f"error: {message}", err=True, fg=typer.colors.RED)
    raise typer.Exit(code)


@contextmanager
def exit_on_signals(
    left: str = "what the run has recorded so far stays in its folder",
) -> Iterator[None]:
    """Let Ctrl-C, `kill` and a closed terminal leave every block in good order.

    ``left`` says what becomes of the work. The exit code is the shell's for it, 128 + the signal's
    number.
    """

    def leave(number: int, _frame: FrameType | None) -> Never:
        name = signal.Signals(number).name
        typer.secho(
            f"stopped by {name}; {left}",
            err=True,
            fg=typer.colors.RED,
        )
        sys.exit(128 + number)

    before = {
        number: signal.signal(number, leave)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        # Not where the caller has it ignored, as nohup does with SIGHUP.
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
