"""`desloc supernode`: Flower's SuperNode with a shorter polling interval."""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence

import typer

from flower_desloc.app.cli.terminal import FAILED, USAGE, failing
from flower_desloc.app.sites.deployment.node import COMMAND
from flower_desloc.app.sites.supervisor import ProcessError, require_unix
from flower_desloc.core.errors import SiteRefusedError


def supernode(context: typer.Context) -> None:
    """Run a SuperNode: `flower-supernode` with a shorter polling interval.

    All arguments are those of `flower-supernode`; `desloc supernode --help` shows them.
    """
    with failing(FAILED, ProcessError):
        require_unix()
    with failing(USAGE, SiteRefusedError):
        _check_node_config(context.args)
    sys.stdout.flush()
    # Replaces this process, and with it everything that the command line has imported.
    os.execv(COMMAND[0], [*COMMAND, *context.args])  # noqa: S606


def _check_node_config(arguments: Sequence[str]) -> None:
    """Raise ``SiteRefusedError`` for a misspelt ``accept-app``, which no app can notice.

    Everything else that is wrong with the arguments is left to `flower-supernode`, and other keys
    to the app that they are for.
    """
    parser = ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--node-config", nargs="?", default=None)
    stated = parser.parse_known_args(arguments)[0].node_config
    if not stated:
        return
    # `desloc --help` does not wait for these.
    from flower_desloc.app.sites.required import check_keys
    from flower_desloc.flower.internals import parse_config_args
    from flower_desloc.flower.protection import ACCEPT_APP

    try:
        node = parse_config_args([stated])
    except Exception:  # whatever it is, Flower says it
        return
    check_keys(node, (ACCEPT_APP,))
