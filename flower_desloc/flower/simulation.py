"""The end of a simulation whose clients are still busy."""

import gc
import logging
import threading
import time
from logging import WARNING
from typing import Any, cast

from flwr.serverapp import Grid

from flower_desloc.flower import internals
from flower_desloc.flower.internals import is_grid, log

_INTERVAL = 0.5  # seconds
_AFFECTED = ("raybackend", "vce_api")
"""Flower's modules that print a traceback for a Ray worker that was killed."""


def end_busy_clients(grid: Grid) -> None:
    """End the clients of a simulation that still serve a request, now that the server has ended.

    Flower 1.41 ends a simulation only once every client has replied, so one that hangs would keep
    it for ever. Its Ray worker is killed; its files are complete at any moment.
    """
    if is_grid(grid, "InMemoryGrid"):
        threading.Thread(target=_kill_busy_workers, daemon=True).start()


def _kill_busy_workers() -> None:
    # Here: an installation for deployments alone has no Ray.
    from flower_desloc.flower import worker_pool

    ray, kind = internals.ray, internals.BasicActorPool
    # By type(): some proxies warn when they are asked for their class.
    pools = [each for each in gc.get_objects() if issubclass(type(each), kind)]
    logging.getLogger("flwr").addFilter(lambda record: record.module not in _AFFECTED)
    for pool in pools:
        worker_pool.end(pool)
    while ray.is_initialized():  # until the end: a worker may still begin with another request
        for pool in pools:
            for worker in list(worker_pool.busy(pool)):
                log(WARNING, "a client is still busy at the end of the run; its process is killed")
                ray.kill(cast(Any, worker))
        time.sleep(_INTERVAL)
