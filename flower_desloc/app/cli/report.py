"""`desloc report`: one or several runs as one HTML file."""

import threading
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from flower_desloc.app.cli.limits import at_least_zero, positive
from flower_desloc.app.cli.terminal import FAILED, USAGE, fail, failing
from flower_desloc.app.plan.wall_clock import MBIT, REPORTED, Link


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option(
            help="The HTML file. By default report.html in the run's folder; for several runs, in "
            "this one.",
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    bandwidth: Annotated[float, positive("Bandwidth of the modelled link, in Mbit/s.")] = (
        REPORTED.bandwidth / MBIT
    ),
    latency: Annotated[float, at_least_zero("Latency of a message, in milliseconds.")] = (
        1000 * REPORTED.latency
    ),
    live: Annotated[
        bool,
        typer.Option("--live", help="Serve the report while the run goes on; Ctrl-C ends it."),
    ] = False,
    port: Annotated[int, typer.Option(help="The port of --live.", min=1, max=65535)] = 6007,
) -> None:
    """Write the report of a run, or a comparison of several.

    RUN is the folder of a run, or a folder with runs in it, at any depth. Runs that differ only in
    their seed are one line, mean ± standard deviation. A folder with the name of the HTML file
    holds the figures as PNGs.
    """
    if live and output is not None:
        fail(USAGE, "--live writes no file: leave out --output, or --live")
    # matplotlib takes a second to import.
    from flower_desloc.app.runs.report import NoRunError, write_report
    from flower_desloc.app.runs.report.live import serving

    link = Link(bandwidth=bandwidth * MBIT, latency=latency / 1000)
    if live:
        taken = failing(FAILED, OSError, where=f"--port {port}")
        with failing(USAGE, NoRunError), taken, serving(runs, port, link) as url:
            typer.echo(f"report: {url}")
            with suppress(KeyboardInterrupt):
                threading.Event().wait()
        return
    not_written = failing(FAILED, OSError, where="the report was not written")
    with failing(USAGE, NoRunError), not_written:
        page = write_report([*runs], output, link=link)
    typer.echo(f"report: {page.resolve()}")
