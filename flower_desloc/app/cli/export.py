"""`desloc export`: a run's model and its card as a folder."""

from pathlib import Path
from typing import Annotated

import typer

from flower_desloc.app.cli.terminal import FAILED, USAGE, failing


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", show_default=False)],
    folder: Annotated[Path | None, typer.Argument(metavar="[FOLDER]", show_default=False)] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model exported there before.")
    ] = False,
) -> None:
    """Write a run's model and a model card into FOLDER.

    FOLDER is by default `export` in the run's folder. RUN is a run's folder or one of its
    checkpoints; for a run that is not complete, its last checkpoint is used. A language model is
    config, tokenizer, and safetensors in the run's dtype, for
    `AutoModelForCausalLM.from_pretrained`; that of a task of your own is what its `save` writes.
    The card describes the training, and names no client, path or domain.
    """
    # transformers takes seconds to import.
    from flower_desloc.app.models.export import export as write

    not_written = failing(FAILED, OSError, where="the model was not exported")
    with failing(USAGE, ValueError), not_written:
        written = write(run, folder, overwrite=overwrite)
    typer.echo(f"model: {written}")
