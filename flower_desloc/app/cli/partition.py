"""`desloc partition`: the data of each client, before anything is trained."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from flower_desloc.app.cli.run_arguments import Overrides, Preset
from flower_desloc.app.cli.terminal import USAGE, failing
from flower_desloc.app.config import load
from flower_desloc.app.config.units import TEXT, percent_text, size_text
from flower_desloc.app.runs.terminal import number_table
from flower_desloc.app.setup.initial import with_init_from
from flower_desloc.app.tasks import Site, build_task

_SHOWN = 20
"""Clients in the table; the figure shows all of them."""


def partition(
    preset: Preset,
    overrides: Overrides = None,
    plot: Annotated[
        Path, typer.Option(dir_okay=False, help="The figure, a .png, .pdf or .svg file.")
    ] = Path("partition.png"),
) -> None:
    """Show and draw how a configuration partitions the data; nothing is trained.

    PRESET names a file in `configs/` or is the path of a .yaml file; KEY=VALUE changes single
    settings: `desloc partition digits data.alpha=0.1 simulation.num_clients=20`
    """
    # matplotlib takes a second to import.
    from flower_desloc.app.runs.figures.partition import draw_partition, title, total_variation_text

    with failing(USAGE, ValueError):
        config = with_init_from(load(preset, overrides or []))
        task, number = build_task(config), config.simulation.num_clients
        data = {
            f"client-{i}": dict(task.client_data(Site(i, number)).description)
            for i in range(number)
        }
    Console(width=100, highlight=False).print(_table(data, config.task))
    typer.echo(total_variation_text(data, config.task))
    with failing(USAGE, OSError, ValueError, where=f"--plot {plot}"):
        draw_partition(data, plot, task=config.task, title=title(config))
    typer.echo(f"figure: {plot}")


def _table(data: Mapping[str, Mapping[str, int]], task: str) -> Table:
    rows = []
    for client, counts in [*data.items()][:_SHOWN]:
        total = sum(counts.values())
        name = max(counts, key=lambda name: counts[name])
        part = f"{name} {percent_text(counts[name] / total)}"
        rows.append([client, size_text(total, task), str(len(counts)), part])
    if len(data) > _SHOWN:
        rows.append([f"and {len(data) - _SHOWN} more"])
    parts = "domains" if task == TEXT else "labels"
    return number_table(["client", "size", parts, "largest part"], rows)
