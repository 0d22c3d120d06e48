"""The command line of the toy problem: ``python -m examples.toy``, or ``desloc toy``."""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

import pandas as pd
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.toy.figures import draw, draw_map
from examples.toy.problem import SPLITS
from examples.toy.runs import NUM_PARTS, ToySize, run_all
from examples.toy.search import SearchGrid, search, where_all_hold, write
from examples.toy.setting import METHODS, ToySetting
from examples.toy.tables import best_table, distances_table, final_distances, verdicts_table
from flower_desloc.cli.terminal import FAILED, USAGE, exit_on_signals, fail
from flower_desloc.flower.engine import FederationError
from flower_desloc.setup.machine import cores

T = TypeVar("T")
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def toy(
    output_dir: Annotated[
        Path, typer.Option(help="Folder of the figures and numbers.", file_okay=False)
    ] = Path("runs/toy"),
    workers: Annotated[int, typer.Option(min=1, help="Clients.")] = ToySize.workers,
    rounds: Annotated[
        int,
        typer.Option(min=1, help="Rounds through Flower, 192 local steps of every client each."),
    ] = ToySize.rounds,
    transcribed: Annotated[
        int, typer.Option(min=1, help="Rounds of the transcription, which takes seconds.")
    ] = ToySize.transcribed,
    seeds: Annotated[int, typer.Option(min=1, help="Runs with different noise.")] = ToySize.seeds,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate.")] = ToySetting.lr,
    beta1: Annotated[
        float, typer.Option(min=0, help="Decay of the first moment.")
    ] = ToySetting.betas[0],
    beta2: Annotated[
        float, typer.Option(min=0, help="Decay of the second moment.")
    ] = ToySetting.betas[1],
    clip: Annotated[
        float, typer.Option(min=0, help="Bound of every coordinate of a gradient; 0: none.")
    ] = ToySetting.clip or 0.0,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes; by default one for each CPU core.")
    ] = None,
    searching: Annotated[
        bool,
        typer.Option(
            "--search",
            help="Instead, search optimizers, betas, learning rates and clipping by transcription: "
            "map.png, search.csv. Takes minutes; uses only --output-dir, --workers and --jobs.",
        ),
    ] = False,
) -> None:
    """Reproduce the paper's toy problem: states that are averaged, kept or reset.

    256 workers descend Rosenbrock's function on noisy gradients, IID and not, by DES-LOC, Local
    Adam, and with only the parameters averaged. Every method runs through the strategy and the
    clients of a real run; a vectorised transcription runs more rounds.
    """
    if beta1 >= 1 or beta2 >= 1:
        fail(USAGE, f"--beta1 {beta1:g} --beta2 {beta2:g}: both must be below 1")
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(USAGE, f"--output-dir {output_dir}: {error.strerror}; give another folder")
    console = Console() if sys.stdout.isatty() else Console(width=140)  # no wrapped lines in a log
    with exit_on_signals("nothing was written"):
        if searching:
            run_search(SearchGrid(workers=workers), output_dir, jobs or cores(), console)
        else:
            setting = ToySetting(lr=lr, betas=(beta1, beta2), clip=clip or None)
            size = ToySize(workers=workers, rounds=rounds, transcribed=transcribed, seeds=seeds)
            run_figures(setting, size, output_dir, jobs or cores(), console)


def run_figures(
    setting: ToySetting, size: ToySize, folder: Path, jobs: int, console: Console
) -> None:
    """Run every method; write ``toy.json`` and both figures."""
    console.print(f"{setting.describe()}; {size.workers} workers, {size.seeds} seeds")
    try:
        *_, results = _with_bar(run_all(setting, size, jobs), NUM_PARTS, "runs", console)
    except FederationError as error:
        fail(FAILED, f"{error}; the learning rate is --lr {setting.lr:g}")
    found = final_distances(results)
    content = {
        "setting": asdict(setting),
        "size": asdict(size),
        "ends": [asdict(end) for end in found],
    }
    (folder / "toy.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    console.print(distances_table(found, results))
    for path in draw(results, folder):
        _print_path(path, console)


def run_search(grid: SearchGrid, folder: Path, jobs: int, console: Console) -> None:
    """Search ``grid``; write ``search.csv`` and ``map.png``."""
    parts = _with_bar(search(grid, jobs), len(grid.batches()) * len(METHODS), "batches", console)
    rows = pd.DataFrame([row for part in parts for row in part])
    write(rows, folder / "search.csv")
    console.print(verdicts_table(rows))
    all_hold = where_all_hold(rows)
    total = len(rows) // len(METHODS) // len(SPLITS)
    console.print(f"All claims on both splits: at {len(all_hold)} of {total} settings")
    for setting in all_hold:
        console.print(f"  {setting.describe()}", highlight=False)
    console.print(best_table(rows))
    _print_path(folder / "search.csv", console)
    _print_path(draw_map(rows, folder, like=ToySetting()), console)


def _with_bar(parts: Iterable[T], total: int, what: str, console: Console) -> Iterator[T]:
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        yield from progress.track(parts, total=total)


def _print_path(path: Path, console: Console) -> None:
    console.print(str(path), markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    app(prog_name="python -m examples.toy")
