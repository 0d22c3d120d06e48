"""`desloc supernode`: Flower's SuperNode with a shorter polling interval."""

import os
import sys

import typer

from flower_desloc.app.cli.terminal import FAILED, failing
from flower_desloc.app.sites.deployment.node import COMMAND
from flower_desloc.app.sites.supervisor import ProcessError, require_unix


def supernode(context: typer.Context) -> None:
    """Run a SuperNode: `flower-supernode` with a shorter polling interval.

    All arguments are those of `flower-supernode`; `desloc supernode --help` shows them.
    """
    with failing(FAILED, ProcessError):
        require_unix()
    sys.stdout.flush()
    # Replaces this process, and with it everything that the command line has imported.
    os.execv(COMMAND[0], [*COMMAND, *context.args])  # noqa: S606
