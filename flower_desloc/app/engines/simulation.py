"""One run in Flower's simulation: the `flwr run` command, its output, its status."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path

import typer

from flower_desloc.app.config import Config
from flower_desloc.app.engines.superlink import (
    CONNECTION,
    RunStatus,
    SuperLink,
    private_superlink,
)
from flower_desloc.app.sites.deployment.environment import as_argument
from flower_desloc.flower.client_state import STATE_SHARED


def federation_config(
    config: Config, *, workers: int | None, cores: int | None
) -> dict[str, int | float]:
    """Return Flower's federation config for simulating ``config`` on ``cores`` CPU cores.

    None: on a Ray cluster that is running, whose own number of cores Ray knows.
    """
    clients = config.simulation
    settings: dict[str, int | float] = {
        "num-supernodes": clients.num_clients,
        "client-resources-num-cpus": clients.client_cpus,
        "client-resources-num-gpus": float(clients.client_gpus),
    }
    if cores is None:
        return settings
    # By default Ray starts one actor per core, each with its own PyTorch, even for few clients. It
    # starts none, which is an error, if a client needs more cores than there are.
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

    ``federation`` is the federation config of a simulation.
    """
    simulated = ["--federation-config", as_argument(federation)] if federation else []
    return [
        *("flwr", "run", str(app), CONNECTION),
        *simulated,
        *("--run-config", as_argument(run_config)),
        *("--format", "json"),
    ]


def on_cluster(address: str, clients: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a simulation whose clients run on a Ray cluster.

    The clients inherit nothing from this process: Ray hands its driver's runtime environment on,
    and with it what is in ``clients``.
    """
    clients = {**clients, STATE_SHARED: "1"}
    return {
        "RAY_ADDRESS": address,
        "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"env_vars": clients}}),
    }


def simulate(
    command: Sequence[str], *, verbose: bool, environment: Mapping[str, str] | None = None
) -> RunStatus:
    """Run a `flwr run` command on a private SuperLink and print the run's output as it comes."""
    with private_superlink(add=environment or {}) as superlink:
        run_id = superlink.submit(command)
        typer.echo(f"run {run_id} is submitted; the app and its clients are starting")
        return follow(superlink, run_id, verbose=verbose)


def follow(superlink: SuperLink, run_id: str, *, verbose: bool) -> RunStatus:
    """Print a run's output as it comes; return its final status."""
    printed = 0

    def new_lines() -> Iterator[str]:
        nonlocal printed
        for line in islice(superlink.log(run_id), printed, None):
            printed += 1
            yield line

    while True:
        for line in new_lines() if verbose else brief(new_lines()):
            typer.echo(line)
        # Not finished: the log broke off; it can only be read again from its start.
        if (status := superlink.status(run_id)).finished:
            return status


def brief(lines: Iterable[str]) -> Iterator[str]:
    """Yield what is shown of a log unless it is asked for: ``without_flower``, and briefer errors.

    In place of a traceback there is a line with the error and where it was raised, once for each.
    """
    block: list[str] = []
    said = set[str]()
    for line in chain(without_flower(lines), (None,)):
        text = "" if line is None else _plain(line)
        begins = text.startswith(_BEGINNINGS)
        if line is not None and block and _goes_on(block, text, begins=begins):
            block.append(text)
            continue
        if block:
            error, where = _cause(block)
            if error not in said:
                yield f"ERROR: {error} ({where}-v shows the traceback)"
            said.add(error)
            block = []
        if begins:
            block.append(text)
        elif line is not None:
            yield line


def _goes_on(block: Sequence[str], text: str, *, begins: bool) -> bool:
    """Return whether ``text`` belongs to the traceback whose lines so far are ``block``."""
    chained = ("The above exception ", "During handling of ")
    if begins:
        return any(line.startswith(chained) for line in block[-2:])
    is_error = block[-1].startswith(" ")  # what follows the lines of code
    more = (" ", "Exception ClientAppException ", *chained)
    return is_error or not text.strip() or text.startswith(more)


def _cause(block: Sequence[str]) -> tuple[str, str]:
    """Return the first error of a traceback, and the place in the code that raised it."""
    where = ""
    for text in block:
        if frame := _FRAME.match(text):
            where = "{}, line {}, in {}; ".format(*frame.groups())
        elif text.strip() and not text.startswith((" ", *_BEGINNINGS)) and "ray::" not in text:
            return text, where
    return "an error without a text", where


def _plain(line: str) -> str:
    """Return a line without colours, and without what Ray and a logger write before an error."""
    text = _COLOUR.sub("", line)
    flower = _FROM_FLOWER.match(text)
    return text[flower.end() :].lstrip() if flower else _ACTOR.sub("", text)


_BEGINNINGS = ("Traceback (most recent call last):", "ray::")
_FRAME = re.compile(r'\s*File "(.+)", line (\d+), in (.+)')
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_ACTOR = re.compile(r"\(\w+ pid=\d+\) ")
_FROM_FLOWER = re.compile(
    rf"({_ACTOR.pattern})?(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) [ \d:,-]*: "
)
_NOISE = (
    "Using SuperLink: ",
    "default simulated SuperNodes changed",
    "Successfully installed ",
    "Manually terminating ClientAppActor",
)


def without_flower(lines: Iterable[str]) -> Iterator[str]:
    """Yield the app's lines, and Flower's warnings and errors.

    The app's lines are those that do not start with a level of Flower's logger: print(), rich, its
    own logging, tracebacks.
    """
    ending = False
    for line in lines:
        text = _COLOUR.sub("", line)
        flower = _FROM_FLOWER.match(text)
        # The rest, five lines, repeats the exception that was just printed.
        ending = ending or (flower is not None and "Exit Code: " in text)
        if ending or any(noise in text for noise in _NOISE):
            continue
        if not flower or flower["level"] not in ("DEBUG", "INFO"):
            yield line
