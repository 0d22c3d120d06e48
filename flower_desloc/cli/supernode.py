"""`desloc supernode`: Flower's SuperNode, asking for messages as often as it is sent any."""

import os
import sys

import typer

from flower_desloc.sites.deployment.node import COMMAND


def supernode(context: typer.Context) -> None:
    """Run a SuperNode: `flower-supernode`, with shorter pauses between its looks for messages.

    All arguments are those of `flower-supernode`; `desloc supernode --help` shows them.
    """
    sys.stdout.flush()
    # In this process's place, without what the command line has imported.
    os.execv(COMMAND[0], [*COMMAND, *context.args])  # noqa: S606
