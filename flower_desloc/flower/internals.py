"""What this package uses of Flower besides its public modules.

``flwr.app``, ``flwr.clientapp``, ``flwr.serverapp`` and ``flwr.simulation`` are public. The names
here are not, and move between versions. Each is imported when it is first used; one that is not
where it was raises an ``ImportError`` that says so.
"""

import logging
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr.common import serde as serde
    from flwr.common.config import parse_config_args as parse_config_args
    from flwr.proto import message_pb2 as message_pb2
    from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend as RayBackend
    from flwr.simulation.ray_transport.ray_actor import BasicActorPool as BasicActorPool
    from flwr.simulation.ray_transport.ray_actor import (
        pool_size_from_resources as pool_size_from_resources,
    )
    from flwr.supercore.cli.flower_superexec import flower_superexec as flower_superexec
    from flwr.supercore.exit import add_exit_handler as add_exit_handler
    from flwr.supercore.inflatable.inflatable_utils import pull_objects as pull_objects
    from flwr.supercore.run import Run as Run
    from flwr.supercore.superexec.executor import subprocess_executor as subprocess_executor
    from flwr.supercore.task_identity import TaskIdentity as TaskIdentity
    from flwr.superlink.grid import HttpGrid as HttpGrid
    from flwr.superlink.grid import InMemoryGrid as InMemoryGrid
    from flwr.superlink.grid import http_grid as http_grid
    from flwr.supernode import start_client_internal as start_client_internal
    from flwr.supernode.cli import flower_supernode as flower_supernode
    from flwr.supernode.cli import flwr_clientapp as flwr_clientapp
    from flwr.supernode.runtime import run_clientapp as run_clientapp
    from flwr.supernode.servicer.runtime import runtime_handlers as runtime_handlers

    ray: Any
    DecodeError: type[Exception]

log = logging.getLogger("flwr").log
"""Flower's own log."""

_MODULES = {
    "HttpGrid": "flwr.superlink.grid",  # a deployment's connection to the clients
    "InMemoryGrid": "flwr.superlink.grid",  # a simulation's,
    "BasicActorPool": "flwr.simulation.ray_transport.ray_actor",  # its Ray workers,
    "RayBackend": "flwr.server.superlink.fleet.vce.backend.raybackend",  # dead ones are replaced
    "pool_size_from_resources": "flwr.simulation.ray_transport.ray_actor",
    "ray": "flwr.simulation.ray_transport.ray_actor",  # the library, which Flower depends on
    "Run": "flwr.supercore.run",  # what an in-process grid returns
    "TaskIdentity": "flwr.supercore.task_identity",  # needed to make a Message outside of Flower
    "flower_supernode": "flwr.supernode.cli",  # `desloc supernode` runs it,
    "parse_config_args": "flwr.common.config",  # after a look at its node config,
    "runtime_handlers": "flwr.supernode.servicer.runtime",  # with other waits
    "start_client_internal": "flwr.supernode",
    "add_exit_handler": "flwr.supercore.exit",  # waits for trainers
    "flower_superexec": "flwr.supercore.cli",  # a SuperNode starts it,
    "subprocess_executor": "flwr.supercore.superexec.executor",  # with another way to start
    "flwr_clientapp": "flwr.supernode.cli",  # a process for a message,
    "run_clientapp": "flwr.supernode.runtime",  # which need not unpack the app again
    "DecodeError": "flwr.supercore.protobuf.translation",  # of objects in a reply
    "http_grid": "flwr.superlink.grid",  # the server asks for arriving objects more often
    "pull_objects": "flwr.supercore.inflatable.inflatable_utils",
    "message_pb2": "flwr.proto",  # a warm client forwards messages
    "serde": "flwr.common",
}


def is_grid(grid: object, name: str) -> bool:
    """Return whether ``grid`` is Flower's ``HttpGrid`` or ``InMemoryGrid``; neither is imported.

    Their imports take a second, which a run in one process or the command line need not spend.
    """
    return any(each.__name__ == name for each in type(grid).__mro__)


# Flower takes no argument for the following: `Message()` reads the task from a class, an `HttpGrid`
# its download from its module, and a simulation makes its `RayBackend` itself. So each is set for
# the whole process. No two runs share one: Flower starts a process for each simulation and each
# ServerApp that it is sent, and what an in-process grid sets is the same for all of them.


def set_task(run_id: int, node_id: int, task_id: int) -> None:
    """Set the task whose messages this process makes, as Flower's runtimes do for an app."""
    identity = __getattr__("TaskIdentity")
    identity.run_id, identity.node_id, identity.task_id = run_id, node_id, task_id


def set_pull_objects(pull_objects: Callable[..., dict[str, bytes]]) -> None:
    """Set how the grids of deployments download the objects of a reply."""
    __getattr__("http_grid").pull_objects = pull_objects


def set_process_message(process_message: Callable[..., Any]) -> None:
    """Set the method by which the backends of simulations serve a message."""
    __getattr__("RayBackend").process_message = process_message


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(_MODULES[name])
        if hasattr(module, name):
            return getattr(module, name)
        return import_module(f"{_MODULES[name]}.{name}")
    except ImportError as error:
        raise ImportError(
            f"Flower {version('flwr')} has no {_MODULES[name]}.{name}, which this version of "
            "flower-desloc needs; install a version of flwr of docs/reference/dependencies.md"
        ) from error
