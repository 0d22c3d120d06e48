"""`desloc federate`: one run through a real SuperLink and SuperNodes, all on this machine."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from flower_desloc.app.cli.run import estimating, resume_hint, tell
from flower_desloc.app.cli.run_arguments import (
    OutputDir,
    Overrides,
    Preset,
    RunArguments,
    require_writable,
)
from flower_desloc.app.cli.terminal import FAILED, USAGE, exit_on_signals, fail, failing
from flower_desloc.app.config import ConfigError
from flower_desloc.app.config.app_folder import APP_FOLDER
from flower_desloc.app.engines.deployment import NodeConfig, deploy
from flower_desloc.app.engines.simulation import flwr_run
from flower_desloc.app.runs.client_files import client_files, client_keys, clients_folder
from flower_desloc.app.runs.resume import begun_in, file_to_resume
from flower_desloc.app.setup.machine import default_device
from flower_desloc.app.setup.preflight import Needs, federation_on_this_machine
from flower_desloc.app.sites.deployment.environment import free_port
from flower_desloc.app.sites.supervisor import ProcessError


def federate(
    preset: Preset = "",
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="SuperNodes, each with a client.")] = 3,
    output_dir: OutputDir = Path("runs"),
    data_path: Annotated[
        list[Path] | None,
        typer.Option(
            help="A node's private data, in place of a partition of data.source; once per node. "
            "A task of your own that does not state reads_data_path is refused.",
            exists=True,
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(help="Device, such as cpu or cuda:1; once, or once per node."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also show Flower's log lines, and tracebacks.")
    ] = False,
) -> None:
    """Run the app once as a deployment: a SuperLink and SuperNodes, with TLS and a key for each.

    PRESET and KEY=VALUE are those of `desloc run`. simulation.num_clients is --nodes, and so is
    federation.min_clients unless it is set; federation.data_address is a free port of this machine.
    A SuperNode that dies is restarted. No process is left behind; the exit code is that of
    `desloc run`.
    """
    arguments = RunArguments.parse(preset, overrides or [], nodes)
    output_dir = begun_in(arguments.config, output_dir.expanduser().resolve())
    with failing(USAGE, ConfigError):
        file_to_resume(arguments.config, output_dir)
        sites = _node_configs(nodes, data_path or [], device or [], clients_folder(output_dir))
    require_writable(output_dir)
    config = arguments.config
    devices = [torch.device(str(site.get("device", default_device()))) for site in sites]
    with estimating(), failing(USAGE, ConfigError):
        needs = Needs(config)
        needs.check()
        tell(config, federation_on_this_machine(needs, devices, output_dir))
    with failing(FAILED, ProcessError):
        here = with_data_address(arguments)
    command = flwr_run(APP_FOLDER, here.run_config(output_dir))
    typer.echo(shlex.join(command))
    words = [w for w in arguments.overrides if not w.startswith("simulation.num_clients=")]
    again = ["desloc", "federate", arguments.preset, *words, "--nodes", str(nodes)]
    for path in data_path or []:
        again += ["--data-path", str(path.expanduser().resolve())]
    again += [part for name in device or [] for part in ("--device", name)]
    with (
        resume_hint(again, config, output_dir),
        exit_on_signals(),
        failing(FAILED, ProcessError, ConfigError),
        client_files(output_dir) as folder,
        client_keys(config, nodes, folder) as keys,
    ):
        if keys:
            sites = [{**site, "secure-keys": str(keys)} for site in sites]
        status = deploy(command, sites, config.simulation.client_cpus, verbose=verbose)
        if not status.completed:
            fail(FAILED, status.error)


def with_data_address(arguments: RunArguments) -> RunArguments:
    """Return a run whose sites, which are on this machine, exchange tensors at a free port of it.

    A run that sets ``federation.data_address``, also to null, keeps it.
    """
    key = "federation.data_address"
    is_set = any(word.partition("=")[0] == key for word in arguments.overrides)
    if is_set or arguments.config.federation.data_address is not None:
        return arguments
    word = f"{key}=127.0.0.1:{free_port()}"
    return replace(arguments, overrides=[*arguments.overrides, word])


def _node_configs(
    nodes: int, data_paths: Sequence[Path], devices: Sequence[str], state_dir: Path
) -> Sequence[NodeConfig]:
    if data_paths and len(data_paths) != nodes:
        raise ConfigError(f"--data-path is given {len(data_paths)} times for --nodes {nodes}")
    if len(devices) not in (0, 1, nodes):
        raise ConfigError(f"--device is given {len(devices)} times for --nodes {nodes}")
    for name in devices:
        try:
            torch.device(name)
        except RuntimeError as error:
            raise ConfigError(f"--device {name}: {str(error).splitlines()[0]}") from error
    configs: list[dict[str, str | int]] = []
    for node in range(nodes):
        own: dict[str, str | int] = {"partition-id": node, "num-partitions": nodes}
        own["state-dir"] = str(state_dir)
        if data_paths:
            own["data-path"] = str(data_paths[node].expanduser().resolve())
        if devices:
            own["device"] = devices[node % len(devices)]
        configs.append(own)
    return configs
