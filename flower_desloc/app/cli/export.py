"""`desloc export`: the model of a checkpoint as a folder."""

from pathlib import Path
from typing import Annotated

import typer

from flower_desloc.app.cli.terminal import FAILED, USAGE, failing


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", show_default=False)],
    folder: Annotated[Path | None, typer.Argument(metavar="[FOLDER]", show_default=False)] = None,
) -> None:
    """Write the model of a checkpoint into FOLDER, as a run writes its `final/`.

    RUN is a checkpoint or a run's folder. For a run that is not complete, its last checkpoint is
    used; for one that is complete, `final/` is copied. FOLDER is by default `export` in the run's
    folder.
    """
    # transformers takes seconds to import.
    from flower_desloc.app.runs.export import export as write

    not_written = failing(FAILED, OSError, where="the model was not exported")
    with failing(USAGE, ValueError), not_written:
        written = write(run, folder)
    typer.echo(f"model: {written}")
