"""The command `desloc`, one file for each verb."""

import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from flower_desloc import __version__
from flower_desloc.flower.system import temporary_folder

try:
    temporary_folder()
except FileNotFoundError as error:  # the imports below would end with a traceback
    sys.exit(f"error: {error}")

from flower_desloc.app.cli import (
    export,
    federate,
    members,
    partition,
    plan,
    report,
    run,
    study,
    supernode,
    toy,
)
from flower_desloc.app.config.imports import IMPORT_FROM

__all__ = ["app"]

app = typer.Typer(
    name="desloc",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    # Tracebacks of bugs are pasted into reports: plain text.
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"desloc {__version__} (Flower {version('flwr')})")
        raise typer.Exit


@app.callback()
def desloc(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Train one model across organisations; each tensor family has its own averaging period."""
    os.environ[IMPORT_FROM] = os.getcwd()  # noqa: PTH109  # also for the processes of a run


for verb in (
    *(run.run, federate.federate, report.report, partition.partition, plan.plan, study.study),
    *(export.export, members.members),
):
    app.command()(verb)
for wrapper in (toy.toy, supernode.supernode):  # they pass their arguments on
    app.command(
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(wrapper)
