"""`desloc run`: one run of the app, from a preset to an exit code that tells the truth."""

import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Never

import typer

from flower_desloc.cli.checkout import NotACheckoutError, app_folder, presets
from flower_desloc.cli.superlink import (
    CONNECTION,
    RunStatus,
    SuperLink,
    SuperLinkError,
    private_superlink,
)
from flower_desloc.config import Config, ConfigError, dump, load

_USAGE = 2
_FAILED = 1


class Engine(StrEnum):
    """What plays the clients."""

    SIMULATION = "simulation"
    INPROCESS = "inprocess"


def run(
    preset: Annotated[
        str,
        typer.Argument(help="A preset, or the path of a .yaml file. Without it: list the presets."),
    ] = "",
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Change single settings, as in sync.params=32."
        ),
    ] = None,
    engine: Annotated[
        Engine,
        typer.Option(
            help="simulation: Flower's, with Ray; as `flwr run`. "
            "inprocess: the same apps in this process, for debugging and small studies."
        ),
    ] = Engine.SIMULATION,
    output_dir: Annotated[
        Path, typer.Option(help="Where the run's folder goes.", file_okay=False)
    ] = Path("runs"),
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Clients simulated at the same time. By default as many as there are CPU cores "
            "and GPUs for, by federation.client_cpus and federation.client_gpus.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the whole configuration and the command; stop."),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also show what Flower says, and tracebacks.")
    ] = False,
) -> None:
    """Run the app once, on this machine, with simulated clients.

    Checks the configuration, prints the `flwr run` command it stands for, runs that on a private
    SuperLink, shows the app's output as it comes, and cleans up.

    Exits by 0 only if the run completed, by 1 if it failed, by 2 if the configuration is wrong.

    Example: desloc run quickstart run.steps=64 sync.exp_avg_sq=never
    """
    try:
        app = app_folder()
        if not preset:
            _fail(_USAGE, "which preset? " + _listing(presets(app)))
        if workers is not None and engine is not Engine.SIMULATION:
            _fail(_USAGE, "--workers is for --engine simulation")
        preset, overrides = _absolute(preset), _words(overrides or [])
        config = load(preset, overrides, presets=app / "configs")
        overrides = _words([*overrides, *_absolute_paths(config)])
    except (ConfigError, NotACheckoutError) as error:
        _fail(_USAGE, str(error))
    run_config = {
        "config": preset,
        "overrides": " ".join(overrides),
        "output-dir": str(output_dir.expanduser().resolve()),
    }
    command = flwr_run(app, run_config, federation(config, workers, cores=_cores()))
    if dry_run:
        typer.echo(dump(config))
        typer.echo(shlex.join(command))
        return
    with _exit_on_signals():
        if engine is Engine.SIMULATION:
            typer.echo(shlex.join(command))
            _simulate(command, verbose=verbose)
        else:
            _run_in_process(app, run_config, config.federation.num_clients, verbose=verbose)


def federation(config: Config, workers: int | None, *, cores: int) -> dict[str, int | float]:
    """Return Flower's settings of the simulation of ``config`` on ``cores`` CPU cores."""
    clients = config.federation
    settings: dict[str, int | float] = {
        "num-supernodes": clients.num_clients,
        "client-resources-num-cpus": clients.client_cpus,
        "client-resources-num-gpus": float(clients.client_gpus),
    }
    # Left alone, Ray starts an actor for every core, each with a PyTorch of its own, however few
    # the clients are; and none, which is an error, where one client wants more cores than there
    # are.
    if workers is None and clients.num_clients * clients.client_cpus < cores:
        workers = clients.num_clients
    if workers is None and clients.client_cpus > cores:
        workers = 1
    if workers is not None:
        settings["init-args-num-cpus"] = workers * clients.client_cpus
    return settings


def flwr_run(
    app: Path, run_config: Mapping[str, str], federation: Mapping[str, int | float]
) -> list[str]:
    """Return the command line that submits one run of ``app``."""
    return [
        "flwr",
        "run",
        str(app),
        CONNECTION,
        "--federation-config",
        " ".join(f"{key}={value}" for key, value in federation.items()),
        "--run-config",
        " ".join(f"{key}={_toml_string(value)}" for key, value in run_config.items()),
        "--format",
        "json",
    ]


def _toml_string(text: str) -> str:
    # Flower finds the end of a value by the next quotation mark, so none may stand inside, not
    # even escaped; TOML knows it by its number as well.
    special = {'"': "\\u0022", "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(special.get(char, char) for char in text) + '"'


def _simulate(command: Sequence[str], *, verbose: bool) -> None:
    try:
        with private_superlink() as superlink:
            run_id = superlink.submit(command)
            status = _follow(superlink, run_id, verbose=verbose)
    except SuperLinkError as error:
        _fail(_FAILED, str(error))
    if not status.completed:
        _fail(_FAILED, f"the run is {status.state}: {status.details}")


def _follow(superlink: SuperLink, run_id: str, *, verbose: bool) -> RunStatus:
    """Print what the run says until it has finished."""
    seen = 0

    def news() -> Iterator[str]:
        nonlocal seen
        for number, line in enumerate(superlink.log(run_id)):
            if number >= seen:
                seen = number + 1
                yield line

    while True:
        for line in news() if verbose else without_flower(news()):
            typer.echo(line)
        # A log that broke off is had again from its start.
        if (status := superlink.status(run_id)).finished:
            return status


_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_OF_FLOWER = re.compile(
    r"(\(\w+ pid=\d+\) )?(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)[ \d:,-]*: "
)
_NOISE = (
    "Using SuperLink: ",
    "Since flwr 1.32, default simulated SuperNodes changed",
    "Successfully installed ",
)


def without_flower(lines: Iterable[str]) -> Iterator[str]:
    """Yield the app's lines, and of Flower's those that warn.

    The app's lines are those without a log level of Flower's in front: print(), rich, tracebacks.
    """
    leaving = False
    for line in lines:
        text = _COLOUR.sub("", line)
        flower = _OF_FLOWER.match(text)
        # Then it only says, in five lines, that there was the exception it has just shown.
        leaving = leaving or (flower is not None and "Exit Code: " in text)
        if leaving or any(noise in text for noise in _NOISE):
            continue
        if not flower or flower["level"] not in ("DEBUG", "INFO"):
            yield line


def _run_in_process(
    app: Path, run_config: Mapping[str, str], num_clients: int, *, verbose: bool
) -> None:
    sys.path.insert(0, str(app))  # server_app and client_app are found there
    from flower_desloc.flower.inprocess import run_in_process

    try:
        run_in_process(dict(run_config), num_clients)
    except Exception as error:
        if verbose:
            traceback.print_exc()
        _fail(_FAILED, f"the run failed: {type(error).__name__}: {error}")


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Let Ctrl-C, `kill` and a closed terminal leave every block in good order, by 128 + signal."""

    def leave(number: int, _frame: FrameType | None) -> Never:
        sys.exit(128 + number)

    # Not where the caller wants a signal ignored, as nohup does SIGHUP.
    numbers = [
        n
        for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(n) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _words(overrides: Sequence[str]) -> list[str]:
    """Return the overrides as the app will see them, cut at blanks."""
    words = [word for item in overrides for word in item.split()]
    for word in words:
        if "=" not in word and word not in overrides:
            raise ConfigError(
                f"override {word!r} is not of the form key=value; blanks separate overrides, so a "
                "value has none (a list is [a,b])"
            )
    return words


def _absolute(preset: str) -> str:
    is_file = preset.endswith((".yaml", ".yml"))
    return str(Path(preset).expanduser().resolve()) if is_file else preset


def _absolute_paths(config: Config) -> list[str]:
    """Return overrides for what names a file seen from here; the app runs in another folder."""
    named = {"data.source": config.data.source, "data.tokenizer": config.data.tokenizer}
    return [
        f"{key}={Path(value).expanduser().resolve()}"
        for key, value in named.items()
        if value not in ("builtin", "bytes") and Path(value).expanduser().exists()
    ]


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _listing(presets: Mapping[str, str]) -> str:
    width = max(map(len, presets), default=0)
    return "\n".join(["there are", *(f"  {n:<{width}}  {what}" for n, what in presets.items())])


def _fail(code: int, message: str) -> Never:
    typer.secho(f"error: {message}", err=True, fg=typer.colors.RED)
    raise typer.Exit(code)
