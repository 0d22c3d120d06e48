"""The command `desloc`: what Flower has no verb for, one file a verb."""

import os
from importlib.metadata import version
from typing import Annotated

import typer

from flower_desloc import __version__
from flower_desloc.cli import (
    evaluate,
    export,
    federate,
    generate,
    partition,
    plan,
    report,
    run,
    study,
    supernode,
    toy,
)
from flower_desloc.config.imports import IMPORT_FROM

__all__ = ["app"]

app = typer.Typer(
    name="desloc",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    # A traceback is for a bug of ours, and goes into a report: plain text.
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
    """Train one model across organisations, every tensor family on a clock of its own."""
    os.environ[IMPORT_FROM] = os.getcwd()  # noqa: PTH109  # for the processes of a run too


app.command()(run.run)
app.command()(federate.federate)
app.command()(report.report)
app.command()(partition.partition)
app.command()(plan.plan)
app.command()(study.study)
app.command()(toy.toy)
app.command()(export.export)
app.command()(evaluate.evaluate)
app.command()(generate.generate)
app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(supernode.supernode)
