"""The command line of the toy problem: ``python -m examples.toy``, or ``desloc toy``."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console

from examples.toy.figures import draw, draw_map
from examples.toy.problem import SPLITS
from examples.toy.runs import final_distances, run_all
from examples.toy.search import (
    CONVERGED,
    MARGIN,
    SearchGrid,
    best,
    groups,
    search,
    verdict,
    where_all_hold,
)
from examples.toy.setting import NUM_WORKERS, ToySetting
from flower_desloc.app.cli.terminal import FAILED, USAGE, exit_on_signals, fail
from flower_desloc.app.setup.machine import cores
from flower_desloc.flower.failures import FederationError

SETTING = ToySetting()
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def toy(
    output_dir: Annotated[
        Path, typer.Option(help="Folder of the figures and numbers.", file_okay=False)
    ] = Path("runs/toy"),
    workers: Annotated[int, typer.Option(min=1, help="Clients.")] = NUM_WORKERS,
    rounds: Annotated[
        int,
        typer.Option(min=1, help="Rounds through Flower, 192 local steps of every client each."),
    ] = 4,
    transcribed: Annotated[
        int, typer.Option(min=1, help="Rounds of the transcription, which takes seconds.")
    ] = 48,
    seeds: Annotated[int, typer.Option(min=1, help="Runs with different noise.")] = 8,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate.")] = SETTING.lr,
    beta1: Annotated[float, typer.Option(min=0, help="Decay of u.")] = SETTING.betas[0],
    beta2: Annotated[float, typer.Option(min=0, help="Decay of v.")] = SETTING.betas[1],
    clip: Annotated[
        float, typer.Option(min=0, help="Bound of every coordinate of a gradient; 0: none.")
    ] = SETTING.clip or 0.0,
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
            size = {"workers": workers, "rounds": rounds}
            size |= {"transcribed": transcribed, "seeds": seeds}
            run_figures(setting, size, output_dir, jobs or cores(), console)


def run_figures(
    setting: ToySetting, size: dict[str, int], folder: Path, jobs: int, console: Console
) -> None:
    """Run every method; write ``toy.json`` and both figures."""
    print(f"{setting.describe()}; {size['workers']} workers, {size['seeds']} seeds")
    try:
        runs = run_all(setting, size, jobs, console)
    except FederationError as error:
        fail(FAILED, f"{error}; the learning rate is --lr {setting.lr:g}")
    ends = final_distances(runs)
    content = {"setting": asdict(setting), "size": size, "ends": ends}
    (folder / "toy.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print("Distance to the optimum, mean and std over seeds:")
    print(_table(ends))
    for path in draw(runs, setting, size["workers"], folder):
        print(path)


def run_search(grid: SearchGrid, folder: Path, jobs: int, console: Console) -> None:
    """Search ``grid``; write ``search.csv`` and ``map.png``."""
    rows = search(grid, jobs, console)
    rows.to_csv(folder / "search.csv", index=False, float_format="%.4g")
    print(
        f"Settings at which DES-LOC ends within {CONVERGED:g} of the optimum; of those, settings "
        f"at which another method ends more than {MARGIN:.0%} farther or closer:"
    )
    print(
        _table(
            {"settings": name, "split": split, **verdict(some, split)}
            for name, some in groups(rows)
            for split in SPLITS
        )
    )
    all_hold = where_all_hold(rows)
    total = sum(map(len, grid.batches()))
    print(f"All claims on both splits: at {len(all_hold)} of {total} settings")
    for setting in all_hold:
        print(f"  {setting.describe()}")
    print(f"Closest over all settings:\n{best(rows).to_string(index=False)}")
    print(folder / "search.csv")
    print(draw_map(rows, folder, like=SETTING))


def _table(rows: Iterable[dict[str, Any]]) -> str:
    """Return rows as text; a pair is a mean and a standard deviation."""
    table = pd.DataFrame(rows).map(
        lambda cell: "{:.3f} ± {:.3f}".format(*cell) if isinstance(cell, tuple) else cell
    )
    return str(table.to_string(index=False))


if __name__ == "__main__":
    app(prog_name="python -m examples.toy")
