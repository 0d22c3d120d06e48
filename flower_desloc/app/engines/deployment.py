"""One run in a deployment on this machine: a SuperLink over TLS, and a SuperNode for each site."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import typer

from flower_desloc.app.engines.simulation import brief, follow
from flower_desloc.app.engines.superlink import RunStatus, SuperLink, private_superlink
from flower_desloc.app.sites.deployment.credentials import make_key
from flower_desloc.app.sites.deployment.environment import HERE, Host, private_home
from flower_desloc.app.sites.deployment.supernode import KEY, SuperNode, supernode
from flower_desloc.app.sites.supervisor import TAIL_LINES

NodeConfig = Mapping[str, str | int]


def deploy(
    command: Sequence[str],
    sites: Sequence[NodeConfig],
    threads: int,
    *,
    verbose: bool,
    hosts: Sequence[Host] = (),
) -> RunStatus:
    """Run a `flwr run` command on a deployment of its own, and print the run's output as it comes.

    ``threads`` are those of each SuperNode's ClientApp. If the run fails, the end of the log of
    every SuperNode with an error is printed. ``hosts`` are those of ``deployment``.
    """
    with deployment(sites, threads, hosts) as (superlink, nodes):
        typer.echo(
            f"SuperLink at https://{superlink.address}, {len(nodes)} SuperNodes online, each "
            "registered with its key"
        )
        run_id = superlink.submit(command)
        typer.echo(f"run {run_id} is submitted; the app is starting")
        status = follow(superlink, run_id, verbose=verbose)
        for number, node in enumerate(nodes):
            if not status.completed and node.has_errors:
                log = node.log().splitlines()
                ends = (log if verbose else [*brief(log)])[-TAIL_LINES:]
                text = "\n".join(["", f"the log of SuperNode {number} ends with", *ends])
                typer.echo(text, err=True)
    return status


@contextmanager
def deployment(
    sites: Sequence[NodeConfig], threads: int, hosts: Sequence[Host] = ()
) -> Iterator[tuple[SuperLink, list[SuperNode]]]:
    """Start a SuperLink and a SuperNode for each site; end them on exit.

    ``hosts`` are the SuperLink's and those of the sites, in their order; by default all run here.
    """
    server, *at_sites = hosts or [HERE] * (1 + len(sites))
    # By default OpenMP threads of the server busy-wait for a thread that a site keeps from running:
    # measured, 0.4 of the server's 2.5 CPU-seconds a window with four sites on two cores.
    policy = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    with (
        private_superlink(simulation=False, host=server, add=policy) as superlink,
        ExitStack() as stack,
    ):
        assert superlink.certificates is not None
        nodes = []
        for site, host in zip(sites, at_sites, strict=True):
            home = stack.enter_context(private_home())
            superlink.register(make_key(home / KEY))
            address, ca = host.superlink or superlink.address, superlink.certificates.ca
            started = supernode(home, address, ca, site, threads=threads, enter=host.enter)
            nodes.append(stack.enter_context(started))
        for node in nodes:
            node.wait_until_online()
        yield superlink, nodes
