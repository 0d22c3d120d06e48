"""`desloc run`: one run of the app, with an exit code that states how it ended."""

import os
import shlex
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flower_desloc.app.cli.run_arguments import (
    OutputDir,
    Overrides,
    Preset,
    RunArguments,
    require_writable,
)
from flower_desloc.app.cli.terminal import FAILED, USAGE, exit_on_signals, fail, failing
from flower_desloc.app.config import Config, ConfigError, dump
from flower_desloc.app.config.app_folder import APP_FOLDER
from flower_desloc.app.config.overrides import override
from flower_desloc.app.config.run_config import app_run_config
from flower_desloc.app.engines.simulation import (
    federation_config,
    flwr_run,
    on_cluster,
    simulate,
)
from flower_desloc.app.plan.dry_run import full_report, memory_line
from flower_desloc.app.runs.client_files import client_files, client_keys, client_memory
from flower_desloc.app.runs.resume import begun_in, cut_off_since, file_to_resume
from flower_desloc.app.runs.tracking import require_installed
from flower_desloc.app.setup.machine import cores
from flower_desloc.app.setup.preflight import (
    OVERRIDE,
    Finding,
    Hardware,
    Needs,
    memory_for_states,
    on_this_machine,
)
from flower_desloc.app.sites.supervisor import ProcessError
from flower_desloc.flower.client_state import STATE_DIR
from flower_desloc.flower.policy import Policy
from flower_desloc.flower.protection import SECURE_KEYS
from flower_desloc.flower.system import described


class Engine(StrEnum):
    """Engine that runs the clients."""

    SIMULATION = "simulation"
    INPROCESS = "inprocess"

    @property
    def unused(self) -> tuple[str, ...]:
        """The settings of ``federation`` that it does not use."""
        # In one process a client's reply is there when the server first looks for it.
        waits = ("timeout", "grace") if self is Engine.INPROCESS else ()
        return ("data_address", *waits)


def run(
    preset: Preset = "",
    overrides: Overrides = None,
    engine: Annotated[
        Engine,
        typer.Option(
            help="simulation: Flower's, with Ray, as `flwr run`. "
            "inprocess: the same apps in this process, for debugging and small studies."
        ),
    ] = Engine.SIMULATION,
    output_dir: OutputDir = Path("runs"),
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Clients simulated at the same time. By default as many as the CPU cores and GPUs "
            "allow, by simulation.client_cpus and simulation.client_gpus.",
        ),
    ] = None,
    ray_address: Annotated[
        str,
        typer.Option(
            help="HOST:PORT of a running Ray cluster, whose machines share the disk of "
            "--output-dir; its clients are simulated there."
        ),
    ] = "",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the whole configuration, the command, and the memory (without "
            "activations), disk, traffic and time that the run needs; measure a step; then stop.",
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also show Flower's log lines, and tracebacks.")
    ] = False,
) -> None:
    """Run the app once, on this machine, with simulated clients.

    PRESET names a file in `configs/` or is the path of a .yaml file; without it the presets are
    listed. KEY=VALUE changes single settings: `desloc run quickstart run.steps=64 sync.params=32`

    Validates the configuration, prints the equivalent `flwr run` command, runs it on a private
    SuperLink, shows the app's output as it comes, and leaves no process behind. The exit code is 0
    only if the run completed, 1 if it failed, and 2 if the configuration is wrong.
    """
    if preset and workers is not None and engine is not Engine.SIMULATION:
        fail(USAGE, "--workers is for --engine simulation")
    if preset and ray_address and (engine is not Engine.SIMULATION or workers is not None):
        fail(
            USAGE,
            "--ray-address is for --engine simulation without --workers: the cluster's own CPUs "
            "and GPUs say how many clients run at the same time",
        )
    arguments = RunArguments.parse(preset, overrides or [])
    config = arguments.config
    output_dir = begun_in(config, output_dir.expanduser().resolve())
    with failing(USAGE, ConfigError):
        file_to_resume(config, output_dir)
        require_installed(config)
    run_config = arguments.run_config(output_dir)
    federation = federation_config(config, workers=workers, cores=None if ray_address else cores())
    command = flwr_run(APP_FOLDER, run_config, federation)
    if dry_run:
        typer.echo(dump(config))
        typer.echo(shlex.join(command))
        with failing(USAGE, ValueError):
            _preflight(config, engine, workers, output_dir, dry=True)
        typer.echo(described())
        return
    require_writable(output_dir)
    note_unused(config, engine)
    for_states = None
    with estimating():
        if ray_address:
            raise ValueError(f"its clients run on the Ray cluster at {ray_address}")
        for_states = _preflight(config, engine, workers, output_dir, dry=False)
    again = ["desloc", "run", arguments.preset, *arguments.overrides]
    again += ["--engine", engine] if engine is not Engine.SIMULATION else []
    again += ["--workers", str(workers)] if workers is not None else []
    again += ["--ray-address", ray_address] if ray_address else []
    with resume_hint(again, config, output_dir), exit_on_signals():
        if engine is Engine.SIMULATION:
            _run_simulation(
                command, config, output_dir, ray_address, for_states=for_states, verbose=verbose
            )
        else:
            _run_in_process(config, run_config, verbose=verbose)


def note_unused(config: Config, engine: Engine) -> None:
    """Name the settings of ``federation`` that are set, and that only other engines use."""
    where = "in a simulation" if engine is Engine.SIMULATION else f"by --engine {engine}"
    for name in engine.unused:
        if getattr(config.federation, name) != getattr(Policy, name):
            typer.echo(f"federation.{name} is not used {where}")


def _preflight(
    config: Config, engine: Engine, workers: int | None, output_dir: Path, *, dry: bool
) -> int:
    """Print what the run needs; unless ``dry``, end the command if it does not fit.

    Returns the bytes of memory that its clients' states may take.
    """
    needs = Needs(config)
    with failing(USAGE, ConfigError):
        needs.check()
    hardware = Hardware.of(config, in_process=engine is Engine.INPROCESS, workers=workers)
    lines = full_report(needs, hardware) if dry else [memory_line(needs, hardware)]
    for line in lines:
        typer.echo(line)
    tell(config, on_this_machine(needs, hardware, output_dir), dry=dry)
    return memory_for_states(needs, hardware)


@contextmanager
def estimating() -> Iterator[None]:
    """Say so where the block cannot estimate what a run needs, which may still fit."""
    try:
        yield
    except ValueError as error:
        typer.echo(f"cannot estimate whether this run fits: {error}")


def tell(config: Config, findings: Iterable[Finding], *, dry: bool = False) -> None:
    """Print what was found before a run; unless ``dry``, end the command if it does not fit."""
    for finding in findings:
        stops = finding.stops and (config.run.preflight == "stop" or not finding.estimated)
        if stops and not dry:
            fail(USAGE, finding.what + (f" ({OVERRIDE})" if finding.estimated else ""))
        typer.echo(f"{'it would stop here' if stops else 'beware'}: {finding.what}")


@contextmanager
def resume_hint(command: Sequence[str], config: Config, output_dir: Path) -> Iterator[None]:
    """If the block ends by an error or a signal, print the command that resumes the run.

    Nothing is printed for the run of another command, or before the first checkpoint.
    """
    began = time.time()
    try:
        yield
    except (typer.Exit, SystemExit):
        if (folder := cut_off_since(config, output_dir, began)) is not None:
            words = [word for word in command if not word.startswith("run.resume=")]
            resume = override("run.resume", str(folder))
            again = shlex.join([*words, resume, "--output-dir", str(output_dir)])
            # A task's or an optimizer's own module is imported from the current folder.
            again = f"{shlex.join(['cd', str(Path.cwd())])} && {again}"
            typer.secho(f"resume from its last checkpoint: {again}", err=True, fg=typer.colors.RED)
        raise


def _run_simulation(
    command: Sequence[str],
    config: Config,
    output_dir: Path,
    ray_address: str,
    *,
    for_states: int | None,
    verbose: bool,
) -> None:
    typer.echo(shlex.join(command))
    with (
        failing(FAILED, ProcessError, ConfigError),
        client_files(output_dir) as folder,
        client_keys(config, config.simulation.num_clients, folder) as keys,
        client_memory(folder, possible=not ray_address, limit=for_states),
    ):
        clients = {STATE_DIR: str(folder)} | ({SECURE_KEYS: str(keys)} if keys else {})
        os.environ.update(clients)  # for all processes that run clients
        environment = {}
        if ray_address:
            folder.mkdir(exist_ok=True)
            environment = on_cluster(ray_address, clients)
        status = simulate(command, verbose=verbose, environment=environment)
    if not status.completed:
        fail(FAILED, status.error)


def _run_in_process(config: Config, run_config: Mapping[str, str], *, verbose: bool) -> None:
    from flower_desloc.app.engines.in_process import run_in_process  # which imports much of Flower

    try:
        run_in_process({**app_run_config(), **run_config}, config.simulation.num_clients)
    except Exception as error:
        if verbose:
            traceback.print_exc()
        fail(FAILED, f"the run failed: {type(error).__name__}: {error}")
