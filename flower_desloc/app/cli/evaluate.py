"""`desloc evaluate`: zero-shot scores of a model, through lm-eval."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from flower_desloc.app.cli.terminal import FAILED, USAGE, fail, failing
from flower_desloc.app.config.units import percent_text
from flower_desloc.app.runs.terminal import number_table

if TYPE_CHECKING:
    from flower_desloc.app.models.evaluate import TaskScore


def evaluate(
    source: Annotated[str, typer.Argument(metavar="MODEL", show_default=False)],
    tasks: Annotated[
        str, typer.Option(help="Names of lm-eval tasks, separated by commas.")
    ] = "arc_challenge,arc_easy,piqa,hellaswag",
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the questions, TASK.jsonl; by default lm-eval downloads its own.",
            file_okay=False,
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=2, help="Only the first LIMIT questions of each task.")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(min=1, help="Longest input in tokens; by default the length of training."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Answers per batch.")] = 16,
    json: Annotated[
        Path | None, typer.Option(help="Also write the scores into this file.", dir_okay=False)
    ] = None,
) -> None:
    """Score a language model on multiple-choice questions, zero-shot.

    MODEL is a run's folder, one of its checkpoints, an exported folder, any other folder
    of transformers, or a name on the hub. lm-eval asks the questions and scores the answers;
    install it with `pip install 'flower-desloc[eval]'`. acc takes the likeliest answer, acc_norm
    the likeliest for its length.
    """
    # transformers takes seconds to import.
    from flower_desloc.app.models.evaluate import evaluate as score
    from flower_desloc.app.models.evaluate import require_lm_eval, to_json
    from flower_desloc.app.models.model import load

    if json is not None and not (json.parent.is_dir() and os.access(json.parent, os.W_OK)):
        fail(USAGE, f"--json {json}: there is no writable folder {json.parent}")
    with failing(USAGE, ValueError):
        require_lm_eval()
        model, tokenizer = load(source)
        scores = score(
            model,
            tokenizer,
            [name for name in tasks.split(",") if name],
            data=data,
            limit=limit,
            batch_size=batch_size,
            window=window,
        )
    Console(highlight=False).print(_table(scores))
    if cut := {name: score.cut for name, score in scores.items() if score.cut}:
        typer.echo(
            "longer than the model's input, so the question lost its beginning: "
            + ", ".join(f"{count} answers of {name}" for name, count in cut.items())
        )
    if json is not None:
        try:
            json.write_text(to_json(scores, source), encoding="utf-8")
        except OSError as error:
            fail(FAILED, f"--json {json}: {error.strerror}")


def _table(scores: Mapping[str, "TaskScore"]) -> Table:
    rows = [
        [
            name,
            str(score.questions),
            _percent(score.acc, score.acc_stderr),
            _percent(score.acc_norm, score.acc_norm_stderr),
            percent_text(score.chance),
        ]
        for name, score in scores.items()
    ]
    return number_table(["task", "questions", "acc", "acc_norm", "chance"], rows)


def _percent(share: float | None, error: float | None) -> str:
    if share is None or error is None:
        return percent_text(share)
    return f"{100 * share:.1f} ± {percent_text(error)}"
