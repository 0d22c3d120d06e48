"""`desloc federate`: one run through a real SuperLink and SuperNodes, all on this machine."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from flower_desloc.cli.request import Request, require_writable
from flower_desloc.cli.run import telling_how_to_go_on
from flower_desloc.cli.terminal import FAILED, USAGE, exit_on_signals, fail
from flower_desloc.config import ConfigError
from flower_desloc.runs.resume import begun_in
from flower_desloc.sites.deployment.credentials import make_key
from flower_desloc.sites.deployment.environment import private_home
from flower_desloc.sites.deployment.supernode import KEY, SuperNode, supernode
from flower_desloc.sites.supervisor import ProcessError
from flower_desloc.tools.engines.in_process import clients_folder, removed_if_empty
from flower_desloc.tools.engines.simulation import flwr_run, follow
from flower_desloc.tools.engines.superlink import SuperLink, private_superlink

Site = Mapping[str, str | int]
"""The node config of a SuperNode."""


def federate(
    # Typer 0.20 loses the help of arguments with Click 8.5: they are explained below.
    preset: Annotated[str, typer.Argument(show_default=False)] = "",
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="SuperNodes, each with a client.")] = 3,
    output_dir: Annotated[
        Path, typer.Option(help="Where the run's folder goes.", file_okay=False)
    ] = Path("runs"),
    data_path: Annotated[
        list[Path] | None,
        typer.Option(
            help="A node's private data, in place of a partition of data.source; once a node.",
            exists=True,
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(help="Where to compute, such as cpu or cuda:1; once, or once a node."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also show what Flower says.")
    ] = False,
) -> None:
    """Run the app once as organisations would: a SuperLink, SuperNodes, TLS, a key for each.

    PRESET and KEY=VALUE are those of `desloc run`. federation.num_clients is --nodes, and so is
    federation.min_clients unless it is set. A SuperNode that dies is started again. No process is
    left behind; the exit code is that of `desloc run`.
    """
    request = Request.of(preset, overrides or [], lambda given: _quorum(given, nodes))
    output_dir = begun_in(request.config, output_dir.expanduser().resolve())
    try:
        sites = _sites(nodes, data_path or [], device or [], clients_folder(output_dir))
    except ConfigError as error:
        fail(USAGE, str(error))
    require_writable(output_dir)
    config = request.config
    command = flwr_run(request.app, request.run_config(output_dir))
    typer.echo(shlex.join(command))
    again = ["desloc", "federate", request.preset, *request.given, "--nodes", str(nodes)]
    for path in data_path or []:
        again += ["--data-path", str(path.expanduser().resolve())]
    again += [part for name in device or [] for part in ("--device", name)]
    with (
        telling_how_to_go_on(again, config, output_dir),
        exit_on_signals(),
        removed_if_empty(clients_folder(output_dir)),
    ):
        if wrong := _run(command, sites, config.federation.client_cpus, verbose=verbose):
            fail(FAILED, wrong)


def _quorum(words: Sequence[str], nodes: int) -> list[str]:
    """Return overrides that say how many take part; more than one is what they agree on."""
    given = {word.partition("=")[0] for word in words}
    if "federation.num_clients" in given:
        raise ConfigError("federation.num_clients: a deployment has --nodes instead")
    own = {"federation.num_clients": nodes, "federation.min_clients": nodes}
    return [f"{key}={value}" for key, value in own.items() if key not in given]


def _sites(
    nodes: int, data_paths: Sequence[Path], devices: Sequence[str], state_dir: Path
) -> Sequence[Site]:
    if data_paths and len(data_paths) != nodes:
        raise ConfigError(f"--data-path is given {len(data_paths)} times for --nodes {nodes}")
    if len(devices) not in (0, 1, nodes):
        raise ConfigError(f"--device is given {len(devices)} times for --nodes {nodes}")
    sites: list[dict[str, str | int]] = []
    for node in range(nodes):
        site: dict[str, str | int] = {
            "partition-id": node,
            "num-partitions": nodes,
            "state-dir": str(state_dir),
        }
        if data_paths:
            site["data-path"] = str(data_paths[node].expanduser().resolve())
        if devices:
            site["device"] = devices[node % len(devices)]
        sites.append(site)
    return sites


def _run(command: Sequence[str], sites: Sequence[Site], threads: int, *, verbose: bool) -> str:
    """Run to the end; return what went wrong, if anything did."""
    try:
        with federation(sites, threads) as (superlink, nodes):
            typer.echo(
                f"SuperLink at https://{superlink.address}, {len(nodes)} SuperNodes online, "
                "each known by its key"
            )
            run_id = superlink.submit(command)
            typer.echo(f"run {run_id} is submitted; the app is starting")
            status = follow(superlink, run_id, verbose=verbose)
            if status.completed:
                return ""
            _show_complaints(nodes)
    except ProcessError as error:
        return str(error)
    return f"the run is {status.state}: {status.details}"


@contextmanager
def federation(sites: Sequence[Site], threads: int) -> Iterator[tuple[SuperLink, list[SuperNode]]]:
    """Start a SuperLink over TLS and a SuperNode for each site; in the end take all down."""
    with private_superlink(simulation=False) as superlink, ExitStack() as stack:
        assert superlink.certificates is not None
        nodes = []
        for site in sites:
            home = stack.enter_context(private_home())
            superlink.register(make_key(home / KEY))
            started = supernode(
                home,
                superlink.address,
                superlink.certificates.ca,
                site,
                threads=threads,
            )
            nodes.append(stack.enter_context(started))
        for node in nodes:
            node.wait_until_online()
        yield superlink, nodes


def _show_complaints(nodes: Sequence[SuperNode]) -> None:
    for number, node in enumerate(nodes):
        if node.has_errors:
            typer.echo(f"\nthe log of SuperNode {number} ends with\n{node.log_tail()}", err=True)
