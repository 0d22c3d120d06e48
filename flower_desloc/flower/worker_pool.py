"""Replacement of dead worker processes in Flower's simulation.

Ray runs the clients of a simulation in a pool of processes. Flower 1.41 returns a process to the
pool also after it has died, and takes from the pool the one that was returned last. So after one
death most messages of the run fail at once, each as a failure of its client.
"""

import threading
import time
from logging import WARNING
from typing import Any

from flwr.app import Context, Message

from flower_desloc.flower.client_state import client_name
from flower_desloc.flower.internals import (
    log,
    pool_size_from_resources,
    ray,
    set_process_message,
)

_LOCK = threading.Lock()
_PAUSE = 0.05  # seconds


def replace_dead_workers() -> None:
    """Let the simulation in this process replace a worker process that has died.

    The new one repeats the message: a client starts every window from its state file. If that
    process also dies, the message is answered with an error, which is the client's failure.
    """
    set_process_message(_process_message)


def _process_message(backend: Any, message: Message, context: Context) -> tuple[Message, Context]:
    """Take the place of ``RayBackend.process_message``; several threads call it at once."""
    pool, client = backend.pool, client_name(context)
    partition = str(context.node_config["partition-id"])
    for attempt in (1, 2):
        worker = _idle_worker(pool)
        try:
            future = worker.run.remote(backend.app_fn, message, partition, context)
            busy(pool).append(worker)
            try:
                _, reply, updated = ray.get(future)
            finally:
                busy(pool).remove(worker)
        except ray.exceptions.RayTaskError:  # raised by the app, in a process that is still there
            raise
        except ray.exceptions.RayError as error:
            if is_ended(pool):
                worker = None
                raise
            worker = _successor(pool, worker)
            died = f"the process that simulates {client} has died ({_reason(error)})"
            if attempt == 2:
                raise RuntimeError(
                    f"{died}, as the one before it had; if memory is short, simulate fewer clients "
                    "at the same time (desloc run --workers)"
                ) from error
            log(WARNING, "%s; a new process repeats the work", died)
        else:
            return reply, updated
        finally:
            if worker is not None:
                pool.pool.append(worker)
    raise AssertionError


def busy(pool: Any) -> list[Any]:
    """Return the workers that serve a message now."""
    found: list[Any] = vars(pool).setdefault("busy_workers", [])
    return found


def end(pool: Any) -> None:
    """Let no process of the pool be replaced any more: the run is over."""
    pool.is_ended = True


def is_ended(pool: Any) -> bool:
    """Return whether ``end`` was called."""
    return getattr(pool, "is_ended", False)


def _idle_worker(pool: Any) -> Any:
    """Take a worker from the pool; there are fewer than threads once one was not replaced."""
    while pool.num_actors:
        try:
            return pool.pool.pop()
        except IndexError:
            time.sleep(_PAUSE)
    raise RuntimeError("no process is left to simulate clients, and Ray has no CPU or GPU for one")


def _successor(pool: Any, worker: Any) -> Any:
    """Return a new worker, or None if the machine that the dead one used has left the cluster."""
    ray.kill(worker)  # frees its CPUs if it is only out of reach
    with _LOCK:
        try:
            has_room = pool_size_from_resources(pool.client_resources) >= pool.num_actors
        except ValueError:  # for no worker at all
            has_room = False
        if has_room:
            return pool.create_actor_fn()
        pool.num_actors -= 1
        return None


def _reason(error: Exception) -> str:
    """Return why a process died, without Ray's description of the process."""
    return " ".join(str(error).rpartition("Worker exit detail: ")[2].split())
