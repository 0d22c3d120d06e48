"""`desloc toy`: the paper's toy problem, in two figures and a table."""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.toy.problem import SPLITS
from examples.toy.runs import NUM_PARTS, Size, run_all
from examples.toy.search import (
    Grid,
    Row,
    best,
    groups,
    num_parts,
    search,
    verdicts,
    where_all_hold,
    write,
)
from examples.toy.setting import METHODS, Setting
from examples.toy.tables import best_table, ends, ends_table, verdicts_table
from flower_desloc.cli.terminal import FAILED, USAGE, exit_on_signals, fail
from flower_desloc.setup.preflight.machine import cores

T = TypeVar("T")


def toy(
    output_dir: Annotated[
        Path, typer.Option(help="Where the figures and numbers go.", file_okay=False)
    ] = Path("runs/toy"),
    workers: Annotated[int, typer.Option(min=1, help="Clients.")] = Size.workers,
    rounds: Annotated[
        int,
        typer.Option(min=1, help="Rounds through Flower, 192 local steps of every client each."),
    ] = Size.rounds,
    transcribed: Annotated[
        int, typer.Option(min=1, help="Rounds of the transcription, which takes seconds.")
    ] = Size.transcribed,
    seeds: Annotated[int, typer.Option(min=1, help="Runs with other noise.")] = Size.seeds,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate.")] = Setting.lr,
    beta1: Annotated[float, typer.Option(min=0, help="Of the first moment.")] = Setting.betas[0],
    beta2: Annotated[float, typer.Option(min=0, help="Of the second moment.")] = Setting.betas[1],
    clip: Annotated[
        float, typer.Option(min=0, help="Bound of every coordinate of a gradient; 0: none.")
    ] = Setting.clip or 0.0,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes; by default one for each CPU core.")
    ] = None,
    searching: Annotated[
        bool,
        typer.Option(
            "--search",
            help="Instead, search optimizers, betas, learning rates and clipping, transcribed: "
            "map.png, search.csv. Several minutes; of these options it heeds --workers and --jobs.",
        ),
    ] = False,
) -> None:
    """Reproduce the paper's toy problem: states that are averaged, kept or reset.

    256 workers descend Rosenbrock's function on noisy gradients, IID and not, by DES-LOC, Local
    Adam, and with parameters alone averaged. Every method goes through the strategy and the
    clients of a real run; its further course is transcribed, all workers in one tensor.
    """
    if beta1 >= 1 or beta2 >= 1:
        fail(USAGE, f"--beta1 {beta1:g} --beta2 {beta2:g}: both must be below 1")
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(USAGE, f"--output-dir {output_dir}: {error.strerror}; give a folder that can be made")
    console = Console() if sys.stdout.isatty() else Console(width=140)  # a log wraps nothing
    with exit_on_signals("nothing is left of it"):
        if searching:
            grid = Grid(workers=workers)
            _search(grid, output_dir, jobs or cores(), console)
        else:
            setting = Setting(lr=lr, betas=(beta1, beta2), clip=clip or None)
            size = Size(workers=workers, rounds=rounds, transcribed=transcribed, seeds=seeds)
            _run(setting, size, output_dir, jobs or cores(), console)


def _run(setting: Setting, size: Size, folder: Path, jobs: int, console: Console) -> None:
    console.print(f"{setting.describe()}; {size.workers} workers, {size.seeds} seeds")
    from flower_desloc.flower.federation import FederationError  # Flower takes seconds

    try:
        *_, ways = _watched(run_all(setting, size, jobs), NUM_PARTS, "runs", console)
    except FederationError as error:
        fail(FAILED, f"{error}; here that is --lr {setting.lr:g}")
    found = ends(ways)
    results = {
        "setting": asdict(setting),
        "size": asdict(size),
        "ends": [asdict(end) for end in found],
    }
    (folder / "toy.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console.print(ends_table(found, ways))
    from examples.toy.picture import draw  # matplotlib takes a second

    for path in draw(ways, folder):
        _say(path, console)


def _search(grid: Grid, folder: Path, jobs: int, console: Console) -> None:
    rows: list[Row] = []
    for more in _watched(search(grid, jobs), num_parts(grid), "lines", console):
        rows += more
    write(rows, folder / "search.csv")
    named = [(name, verdict) for name, some in groups(rows) for verdict in verdicts(some)]
    console.print(verdicts_table(named))
    all_hold = where_all_hold(rows)
    total = len(rows) // len(METHODS) // len(SPLITS)
    console.print(f"All of it on both splits: at {len(all_hold)} of {total} settings")
    for setting in all_hold:
        console.print(f"  {setting.describe()}", highlight=False)
    console.print(best_table(best(rows)))
    from examples.toy.picture import draw_map

    _say(folder / "search.csv", console)
    _say(draw_map(rows, folder, like=Setting()), console)


def _watched(parts: Iterable[T], total: int, what: str, console: Console) -> Iterator[T]:
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        yield from progress.track(parts, total=total)


def _say(path: Path, console: Console) -> None:
    console.print(str(path), markup=False, highlight=False, soft_wrap=True)
