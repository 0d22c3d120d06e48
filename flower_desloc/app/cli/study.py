"""`desloc study`: a grid of runs, tuned and repeated over seeds, resumable at any time."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flower_desloc.app.cli.run_arguments import OutputDir, Overrides, Preset, listing
from flower_desloc.app.cli.terminal import FAILED, USAGE, exit_on_signals, fail, failing
from flower_desloc.app.config import ConfigError
from flower_desloc.app.config.app_folder import STUDIES
from flower_desloc.app.runs.terminal import number_table
from flower_desloc.app.study.cells import CellState, counts, of_other_library, study_state
from flower_desloc.app.study.grid import Study
from flower_desloc.app.study.run_study import StudyProgress, run_study
from flower_desloc.app.study.store import Store
from flower_desloc.app.study.study_file import read_study, with_view
from flower_desloc.app.study.workers import WorkerPool, default_jobs


def study(
    file: Preset = "",
    overrides: Overrides = None,
    output_dir: OutputDir = Path("runs"),
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Runs at the same time. By default as many as there are CPU cores and memory for.",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(help="The metric of tables and figures, such as `accuracy`."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Show the bytes and seconds to a value, such as `accuracy=0.7`."),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="The axis value with which the others are compared: `LABEL` or `AXIS=LABEL`."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs, and which are done; stop.")
    ] = False,
) -> None:
    """Run a grid of settings, and compare them in a table, figures and a report.

    FILE is a study's YAML file, or names one in `studies/`; without it those are listed. KEY=VALUE
    changes single settings of every run.

    Finished runs are not repeated: the same command resumes a stopped study, and only redraws the
    table and figures of a complete one. The exit code is 0 if the study is complete, 1 if a run
    failed, 2 if the study's file is wrong.
    """
    with failing(USAGE, ConfigError):
        if not file:
            fail(USAGE, f"which study? There are\n{listing(STUDIES)}")
        path = Path(file) if file.endswith((".yaml", ".yml")) else STUDIES / f"{file}.yaml"
        if not path.is_file():
            known = listing(STUDIES)
            fail(USAGE, f"{file}: no such study; give the path of a .yaml file, or one of\n{known}")
        grid = with_view(read_study(path, overrides or []), metric, target, baseline)
        store = Store(output_dir, grid.name)
        if dry_run:
            _print_states(study_state(grid, store), store)
            return
        kept = "finished runs are kept; the same command resumes the study"
        with exit_on_signals(kept), store.locked():
            _run(grid, store, jobs)


def _run(study: Study, store: Store, jobs: int | None) -> None:
    client_cpus = max(c.run(study.seeds[0]).config.simulation.client_cpus for c in study.cells)
    jobs = jobs or default_jobs(client_cpus)
    console = Console() if sys.stdout.isatty() else Console(width=160)  # no wrapped lines in a log
    _note_other_library(study_state(study, store))
    with WorkerPool(jobs) as pool, StudyProgress(study, store, jobs, console) as progress:
        failed = run_study(study, store, pool, progress)
    # Matplotlib and pandas take a second to import.
    from flower_desloc.app.runs.report import write_report
    from flower_desloc.app.study.figures import draw
    from flower_desloc.app.study.results import table, write

    cells = list(study_state(study, store).values())
    write(cells, store.path)
    console.print(number_table(*table(cells), words=len(study.axes)))

    draw(cells, store.path)
    if runs := [run.folder.path for cell in cells for run in cell.runs]:
        write_report(runs, store.path / "report.html", pngs=False)
    console.print(f"folder: {store.path}", markup=False, highlight=False, soft_wrap=True)
    if failed:
        errors = "".join(f"\n  {title}: {error}" for title, error in failed.items())
        fail(FAILED, f"the study is not complete; the same command retries these:{errors}")


def _note_other_library(states: Mapping[str, CellState]) -> None:
    if other := of_other_library(states):
        finished, _, _ = counts(states)
        typer.echo(
            f"{other} of {finished} finished runs were computed by another version of "
            "flower-desloc, and are kept; delete their folders to repeat them"
        )


def _print_states(states: Mapping[str, CellState], store: Store) -> None:
    for state in states.values():
        typer.echo(state.cell.name)
        for folder in sorted(state.finished):
            typer.echo(f"  done     {folder.relative_to(store.path)}")
        for run in state.missing:
            typer.echo(f"  to run   {store.final_path(run).relative_to(store.path)}")
        if state.searching and state.cell.search:
            typer.echo(
                f"  then     more of {state.cell.search.key}, and the other seeds at its best"
            )
    _note_other_library(states)
    finished, missing, later = counts(states)
    more = f", and at least {later} after those" if later else ""
    typer.echo(f"{finished} runs done, {missing} to run{more}; folder: {store.path}")
