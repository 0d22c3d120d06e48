"""One run in Flower's simulation: the `flwr run` command, what it prints, how it ended."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import typer

from flower_desloc.config import Config
from flower_desloc.sites.deployment.environment import as_argument
from flower_desloc.tools.engines.superlink import (
    CONNECTION,
    RunStatus,
    SuperLink,
    private_superlink,
)


def federation(config: Config, *, workers: int | None, cores: int) -> dict[str, int | float]:
    """Return Flower's settings for simulating ``config`` on ``cores`` CPU cores."""
    clients = config.federation
    settings: dict[str, int | float] = {
        "num-supernodes": clients.num_clients,
        "client-resources-num-cpus": clients.client_cpus,
        "client-resources-num-gpus": float(clients.client_gpus),
    }
    # Left alone, Ray starts an actor, with a PyTorch of its own, for every core there is, however
    # few the clients are; and none, which is an error, where a client wants more cores than that.
    if workers is None and clients.num_clients * clients.client_cpus < cores:
        workers = clients.num_clients
    if workers is None and clients.client_cpus > cores:
        workers = 1
    if workers is not None:
        settings["init-args-num-cpus"] = workers * clients.client_cpus
    return settings


def flwr_run(
    app: Path,
    run_config: Mapping[str, str],
    federation: Mapping[str, int | float] | None = None,
) -> list[str]:
    """Return the command line that submits one run of ``app``.

    ``federation`` is for a simulation; of SuperNodes there are as many as there are.
    """
    simulated = ["--federation-config", as_argument(federation)] if federation else []
    return [
        *("flwr", "run", str(app), CONNECTION),
        *simulated,
        *("--run-config", as_argument(run_config)),
        *("--format", "json"),
    ]


def simulate(command: Sequence[str], *, verbose: bool) -> RunStatus:
    """Run a `flwr run` command on a SuperLink of its own and print what it says as it comes."""
    with private_superlink() as superlink:
        run_id = superlink.submit(command)
        typer.echo(f"run {run_id} is submitted; the app and its clients are starting")
        return follow(superlink, run_id, verbose=verbose)


def follow(superlink: SuperLink, run_id: str, *, verbose: bool) -> RunStatus:
    """Print what a run says as it comes; return how it ended."""
    told = 0

    def news() -> Iterator[str]:
        nonlocal told
        for number, line in enumerate(superlink.log(run_id), start=1):
            if number > told:
                told = number
                yield line

    while True:
        for line in news() if verbose else without_flower(news()):
            typer.echo(line)
        # Not finished: the log broke off, and can only be had again from its start.
        if (status := superlink.status(run_id)).finished:
            return status


_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_FROM_FLOWER = re.compile(
    r"(\(\w+ pid=\d+\) )?(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) [ \d:,-]*: "
)
_NOISE = (
    "Using SuperLink: ",
    "default simulated SuperNodes changed",
    "Successfully installed ",
    "Manually terminating ClientAppActor",
)


def without_flower(lines: Iterable[str]) -> Iterator[str]:
    """Yield the app's lines, and of Flower's those that warn.

    The app's lines are those without a level of Flower's logger in front: print(), rich, logging
    of one's own, tracebacks.
    """
    leaving = False
    for line in lines:
        text = _COLOUR.sub("", line)
        flower = _FROM_FLOWER.match(text)
        # From here it only says, in five lines, that there was the exception it has just shown.
        leaving = leaving or (flower is not None and "Exit Code: " in text)
        if leaving or any(noise in text for noise in _NOISE):
            continue
        if not flower or flower["level"] not in ("DEBUG", "INFO"):
            yield line
