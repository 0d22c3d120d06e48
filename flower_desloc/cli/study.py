"""`desloc study`: a grid of runs, tuned and repeated over seeds, that may be stopped any time."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flower_desloc.cli.checkout import NotACheckoutError, app_folder, opening_comments
from flower_desloc.cli.terminal import FAILED, USAGE, exit_on_signals, fail
from flower_desloc.config import ConfigError
from flower_desloc.tools.study import Study, read_study, results
from flower_desloc.tools.study.conduct import conduct, plans
from flower_desloc.tools.study.plan import Plan
from flower_desloc.tools.study.pool import Pool, default_jobs
from flower_desloc.tools.study.progress import Progress
from flower_desloc.tools.study.results import rich_table, write
from flower_desloc.tools.study.store import Store


def study(
    # Typer 0.20 loses the help of arguments with Click 8.5: they are explained below.
    file: Annotated[str, typer.Argument(show_default=False)] = "",
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    output_dir: Annotated[
        Path, typer.Option(help="Where the study's folder goes.", file_okay=False)
    ] = Path("runs"),
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Runs at the same time. By default as many as there are CPU cores and memory for.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs, and which are done; stop.")
    ] = False,
) -> None:
    """Run a grid of settings, and compare them in a table, in pictures and in a report.

    FILE is a study's YAML file, or names one in `studies/`; without it those are listed. KEY=VALUE
    changes single settings of every run.

    What is done is not repeated: a study that was stopped goes on where it was, and one that is
    complete only draws its table and pictures anew. Exits by 0 if the study is complete, by 1 if a
    run failed, by 2 if the study's file is wrong.
    """
    try:
        app = app_folder()
        if not file:
            fail(USAGE, f"which study? There are\n{_listing(opening_comments(app / 'studies'))}")
        path = Path(file) if file.endswith((".yaml", ".yml")) else app / "studies" / f"{file}.yaml"
        if not path.is_file():
            listing = _listing(opening_comments(app / "studies"))
            fail(
                USAGE, f"{file}: no such study; give the path of a .yaml file, or one of\n{listing}"
            )
        plan = read_study(path, overrides or [])
        store = Store(output_dir, plan.name)
        if dry_run:
            _print_plans(plans(plan, store), store)
            return
        with exit_on_signals("what is done stays done; the same command goes on"), store.opened():
            _run(plan, store, app, jobs)
    except (ConfigError, NotACheckoutError) as error:
        fail(USAGE, str(error))


def _run(study: Study, store: Store, app: Path, jobs: int | None) -> None:
    widest = max(c.run(study.seeds[0]).config.federation.client_cpus for c in study.cells)
    jobs = jobs or default_jobs(widest)
    console = Console() if sys.stdout.isatty() else Console(width=160)  # a log wraps nothing
    with Pool(jobs, app) as pool, Progress(study, store, jobs, console) as progress:
        failed = conduct(study, store, pool, progress)
    rows = results(study, store)
    write(rows, store.path)
    console.print(rich_table(rows))
    # Imported when wanted: matplotlib takes a second.
    from flower_desloc.runs.report import write_report
    from flower_desloc.tools.study.pictures import draw

    draw(rows, store.path)
    if runs := [done.folder.path for row in rows for done in row.runs]:
        write_report(runs, store.path / "report.html", pngs=False)
    console.print(f"folder: {store.path}", markup=False, highlight=False, soft_wrap=True)
    if failed:
        named = "".join(f"\n  {title}: {error}" for title, error in failed.items())
        fail(FAILED, f"not complete; the same command tries these again:{named}")


def _print_plans(state: Mapping[str, Plan], store: Store) -> None:
    done, missing, later = set[str](), 0, 0
    for plan in state.values():
        done |= plan.done
        missing += len(plan.missing)
        later += plan.later
        typer.echo(plan.cell.name)
        for folder in sorted(plan.done):
            typer.echo(f"  done     {Path(folder).relative_to(store.path)}")
        for run in plan.missing:
            typer.echo(f"  to run   {store.place(run).relative_to(store.path)}")
        if plan.searching and plan.cell.sweep:
            typer.echo(f"  then     more of {plan.cell.sweep.key}, and the other seeds at its best")
    more = f", and at least {later} after those" if later else ""
    typer.echo(f"{len(done)} runs done, {missing} to run{more}; folder: {store.path}")


def _listing(studies: Mapping[str, str]) -> str:
    width = max(map(len, studies), default=0)
    return "\n".join(f"  {name:<{width}}  {what}" for name, what in studies.items())
