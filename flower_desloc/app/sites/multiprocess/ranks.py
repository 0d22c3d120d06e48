"""Starts a client's other ranks, calls a method on all ranks at once, notices when one ends.

A rank that dies leaves the others waiting in a collective. So rank 0 watches each rank's process.
When one ends, it kills the others; then its own collective fails, and it reports why. The other
ranks notice the end of rank 0 themselves.

Not torchrun's elastic agent (``torch.distributed.launcher``): it runs every rank as a child of its
own, but rank 0 must be the process that has the message. Its ``start_processes`` alone would watch
the children, but needs a folder of log and error files and does not end them with rank 0.
"""

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist

from flower_desloc.app.sites.multiprocess.parallelism import Parallelism
from flower_desloc.app.sites.multiprocess.rank import LOOPBACK, join, open_store
from flower_desloc.app.sites.multiprocess.rank_worker import RankWorker
from flower_desloc.app.sites.supervisor import describe_exit, on_exit, start_module

_MODULE = "flower_desloc.app.sites.multiprocess.rank"
_EXIT_TIMEOUT = 5.0  # seconds between a failed collective and the end of the process that caused it


class RankError(RuntimeError):
    """A rank of this client has failed or died; all other ranks were ended."""


class Ranks:
    """The processes of one client; this process is rank 0, and has one living instance at most.

    ``reference`` names, as ``module:function``, what builds each process's ``RankWorker`` from
    a device, a ``Parallelism`` and ``argument``. With the device ``cuda``, rank i has
    ``cuda:i``.

    Raises ``RankError`` when a process ends before it has joined.
    """

    def __init__(
        self, reference: str, argument: str, parallelism: Parallelism, device: torch.device
    ) -> None:
        if str(device) != device.type:
            raise ValueError(f"device={device}: for several processes give the type only, 'cuda'")
        self.parallelism = parallelism
        self._calls = 0
        self._lock = threading.Lock()
        self._alive, self._ended = True, False
        self._dead: tuple[int, int] | None = None  # rank and exit code of the first that died
        self._death = threading.Event()
        listener = socket.create_server((LOOPBACK, 0))
        self._port = listener.getsockname()[1]
        self._store = open_store(parallelism.processes, self._port, listener)
        settings = {
            "reference": reference,
            "argument": argument,
            "parallelism": [parallelism.processes, parallelism.mode],
            "device": device.type,
            "threads": torch.get_num_threads(),
        }
        others = range(1, parallelism.processes)
        self._store.set("settings", json.dumps(settings))
        self.processes = {
            rank: start_module(_MODULE, rank, parallelism.processes, self._port, os.getpid())
            for rank in others
        }
        for rank, process in self.processes.items():
            on_exit(process.pid, partial(self._on_death, rank))
        with self._all_or_none():
            self._store.wait([f"ready/{rank}" for rank in others])
            self._require_alive()
            own_device = join(self._store, 0, parallelism.processes, device.type)
            self.worker: RankWorker = resolve_name(reference)(own_device, parallelism, argument)
            dist.barrier()

    @property
    def alive(self) -> bool:
        """Whether no process has ended."""
        with self._lock:
            return self._alive

    def call(self, method: str, *arguments: Any, **rank_0: Any) -> Any:
        """Call a ``RankWorker`` method on all ranks; return what it returns on rank 0.

        ``rank_0`` are further arguments, on rank 0 only.
        """
        with self._all_or_none():
            self._store.set(f"call/{self._calls}", json.dumps([method, arguments]))
            result = getattr(self.worker, method)(*arguments, **rank_0)
            dist.barrier()
            self._store.delete_key(f"call/{self._calls}")
            self._calls += 1
            return result

    def end(self) -> None:
        """End the other processes; nothing is lost, because they keep no state."""
        with self._lock:
            self._alive = False
        for process in self.processes.values():
            process.kill()
            process.wait()
        if not self._ended and dist.is_initialized():
            dist.destroy_process_group()
        self._ended = True

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """End all ranks if one fails: they are no longer at the same point."""
        try:
            yield
            self._require_alive()
        except BaseException as error:
            # A collective can fail before the end of the process that made it fail is known.
            if isinstance(error, RuntimeError | OSError):
                self._death.wait(_EXIT_TIMEOUT)
            cause = self._cause_of_death()
            self.end()
            if cause is not None:
                raise RankError(cause) from error
            raise

    def _require_alive(self) -> None:
        if self._dead is not None:
            raise RuntimeError("a rank has died")

    def _cause_of_death(self) -> str | None:
        if self._dead is None:
            return None
        rank, code = self._dead
        cause = describe_exit(code)
        if self._store.check([f"error/{rank}"]):
            cause = f"failed: {self._store.get(f'error/{rank}').decode()}"
        return f"rank {rank} of this client's {self.parallelism.processes} processes {cause}"

    def _on_death(self, rank: int) -> None:
        code = self.processes[rank].wait()
        with self._lock:
            if not self._alive:
                return
            self._alive = False
            self._dead = (rank, code)
        for other in self.processes.values():
            other.kill()
        if dist.is_initialized() and dist.get_backend() == "nccl":
            # Unlike a socket, a GPU keeps waiting for a process that has ended.
            dist.distributed_c10d._abort_process_group()
        self._death.set()
        # Rank 0 may be waiting for all to be ready, which blocks its own connection to the store.
        store = open_store(self.parallelism.processes, self._port)
        for other_rank in self.processes:
            store.set(f"ready/{other_rank}", "")


class RankLauncher:
    """Starts a client's ranks when it needs them, and keeps them for its next messages.

    A process has one process group, so it needs one launcher: that of its ClientApp.
    """

    def __init__(self) -> None:
        self.ranks: Ranks | None = None
        """Those that were started last."""
        self._built_from: tuple[str, str, Parallelism, torch.device] | None = None

    def get(
        self, reference: str, argument: str, parallelism: Parallelism, device: torch.device
    ) -> Ranks:
        """Return ranks that ``Ranks`` builds from these: the last if they are alive, or new ones.

        The last are ended before new ones are started.
        """
        built_from = (reference, argument, parallelism, device)
        if self.ranks is not None and self.ranks.alive and self._built_from == built_from:
            return self.ranks
        self.end()
        self.ranks, self._built_from = Ranks(*built_from), built_from
        return self.ranks

    def end(self) -> None:
        """End the ranks, if there are any."""
        if self.ranks is not None:
            self.ranks.end()
        self.ranks = None
