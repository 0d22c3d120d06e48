"""Rank 0's side of a group: start the others, tell them, and notice when one is gone.

A rank that dies leaves the others in a collective that nobody ends. So a thread waits for each of
them, and when one is gone ends all: then rank 0's own collective fails, and it can say why. The
others notice the end of rank 0 by themselves (:mod:`flower_desloc.sites.multiprocess.process`).
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flower_desloc.core.averaging import Stream
from flower_desloc.core.local_steps import StepMetrics
from flower_desloc.flower.client import Worker
from flower_desloc.sites.multiprocess.meeting import LOOPBACK, Meeting, load
from flower_desloc.sites.multiprocess.member import Member
from flower_desloc.sites.multiprocess.settings import Node, Setting

_NOTICED = 5.0  # seconds until the end of a process is known that a collective failed of


class GroupError(RuntimeError):
    """A group has lost one of its processes, and is no more."""


class Group:
    """The ranks of one client's node; this process is rank 0.

    ``reference`` names, as ``module:function``, what makes a :class:`Member` in every process, from
    a device, a :class:`Setting` and ``about``, which is for that function alone. A process has one
    group at most. Where ``device`` is ``cuda``, rank i has the GPU ``cuda:i``.

    Raises :class:`GroupError` when a process ends before it has joined.
    """

    _current: "Group | None" = None

    def __init__(self, reference: str, about: str, setting: Setting, device: torch.device) -> None:
        if str(device) != device.type:
            raise ValueError(f"device={device}: for several processes name the kind alone, 'cuda'")
        if Group._current is not None:
            Group._current.end()
        Group._current = self
        self.sharded = setting.sharded
        self._what = (reference, about, setting, device)
        self._world = setting.processes
        self._lock = threading.Lock()
        self._alive = True
        self._gone: dict[int, int] = {}  # rank -> exit code of those that were not ended from here
        self._noticed = threading.Event()
        listener = socket.create_server((LOOPBACK, 0))
        meeting = Meeting(self._world, listener.getsockname()[1], device.type)
        self._others = [
            _Other(rank, meeting, reference, about, setting) for rank in range(1, self._world)
        ]
        self._watchers = [
            threading.Thread(target=self._watch, args=[other], daemon=True)
            for other in self._others
        ]
        for watcher in self._watchers:
            watcher.start()
        with self._ending_all():
            self._hear()  # that they have imported what they need
            meeting.join(0, listener)
            self.member: Member = load(reference)(meeting.device(0), setting, about)
            self._hear()

    @classmethod
    def of(cls, reference: str, about: str, setting: Setting, device: torch.device) -> "Group":
        """Return this process's group if it is the same and whole; else end it and start one."""
        current = cls._current
        if current is not None and current._what == (reference, about, setting, device):
            with current._lock:
                if current._alive:
                    return current
        return cls(reference, about, setting, device)

    def serve(self, node: Node) -> Worker:
        """Work for the client with that node config; return its worker as rank 0 has it."""
        with self._all("serve", node):
            return self.member.serve(node)

    def put(self, names: list[str], *, streams: Mapping[str, Stream]) -> None:
        """Write streams into all ranks."""
        with self._all("put", names):
            self.member.put(names, streams=streams)

    def take(self, names: list[str], *, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
        """Return streams from all ranks."""
        with self._all("take", names):
            return self.member.take(names, folder=folder)

    def seed(self, step: int) -> None:
        """Give ADOPT the v that its first step would have."""
        with self._all("seed", step):
            self.member.seed(step)

    def steps(self, start: int, stop: int, origin: int) -> StepMetrics:
        """Take the local steps ``start + 1 .. stop`` on all ranks."""
        with self._all("steps", start, stop, origin):
            return self.member.steps(start, stop, origin)

    def gradient(self, step: int) -> tuple[dict[str, torch.Tensor], StepMetrics]:
        """Return the gradient of the next batch."""
        with self._all("gradient", step):
            return self.member.gradient(step)

    def evaluate(self) -> Mapping[str, float]:
        """Return the client's totals, computed by all ranks together."""
        with self._all("evaluate"):
            return self.member.evaluate()

    def end(self) -> None:
        """End the other processes; nothing is lost, as they keep nothing."""
        with self._lock:
            self._alive = False
        for other in self._others:
            other.process.kill()
        for watcher in self._watchers:
            watcher.join()
        for other in self._others:
            other.line.close()
        if Group._current is self:
            Group._current = None
            if dist.is_initialized():
                dist.destroy_process_group()

    @contextlib.contextmanager
    def _all(self, act: str, *arguments: Any) -> Iterator[None]:
        """Tell the other ranks what to do, while the caller does the same, and wait for them."""
        with self._ending_all():
            for other in self._others:
                other.tell({"act": act, "arguments": arguments})
            yield
            self._hear()

    @contextlib.contextmanager
    def _ending_all(self) -> Iterator[None]:
        """End the group if something fails: its processes are not at one any more."""
        try:
            yield
        except BaseException as error:
            # One of a collective comes before the end of the process that it failed of is known.
            if isinstance(error, RuntimeError | OSError | EOFError):
                self._noticed.wait(_NOTICED)
            why = self._why()
            self.end()
            if why is not None:
                raise GroupError(why) from error
            raise

    def _hear(self) -> None:
        """Wait until every other rank has done what it was told."""
        for other in self._others:
            other.hear()

    def _why(self) -> str | None:
        with self._lock:
            gone = dict(self._gone)
        for other in self._others:
            if other.rank in gone:
                said = other.last_words() or _ending(gone[other.rank])
                return f"rank {other.rank} of this client's {self._world} processes {said}"
        return None

    def _watch(self, other: "_Other") -> None:
        code = other.process.wait()
        with self._lock:
            if not self._alive:
                return
            self._alive = False
            self._gone[other.rank] = code
        for each in self._others:
            each.process.kill()
        if dist.is_initialized() and dist.get_backend() == "nccl":
            # Unlike a socket, a GPU waits on for a process that is gone.
            dist.distributed_c10d._abort_process_group()
        self._noticed.set()


class _Other:
    """Another rank's process, and the line to it."""

    def __init__(
        self, rank: int, meeting: Meeting, reference: str, about: str, setting: Setting
    ) -> None:
        self.rank = rank
        self.failed: str | None = None
        mine, its = socket.socketpair()
        handles = [its.fileno()]
        if hasattr(os, "pidfd_open"):  # Linux alone has it
            handles.append(os.pidfd_open(os.getpid()))
        self.process = subprocess.Popen(  # noqa: S603
            [
                *(sys.executable, "-P", "-m", "flower_desloc.sites.multiprocess.process"),
                *map(str, [rank, meeting.world, meeting.port, meeting.kind, *handles]),
            ],
            env={
                **os.environ,
                **meeting.environment(rank),
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            stdin=subprocess.DEVNULL,
            pass_fds=handles,
            start_new_session=True,  # what ends rank 0 ends it; Ctrl-C in a terminal is for rank 0
        )
        its.close()
        for handle in handles[1:]:
            os.close(handle)
        self.line = mine.makefile("rw", encoding="utf-8")
        mine.close()
        self.tell(
            {
                "reference": reference,
                "about": about,
                "setting": [setting.processes, setting.parallel],
                "threads": torch.get_num_threads(),
            }
        )

    def tell(self, what: dict[str, Any]) -> None:
        """Write one line; raises ``OSError`` if the process is gone."""
        self.line.write(json.dumps(what) + "\n")
        self.line.flush()

    def hear(self) -> None:
        """Wait for one line; raises ``EOFError`` if the process is gone, or has failed."""
        said = json.loads(self.line.readline() or "{}")
        self.failed = said.get("failed")
        if "done" not in said:
            raise EOFError(f"process {self.rank} has not done what it was told")

    def last_words(self) -> str | None:
        """Return what the process, which has ended, said that it failed of, if it could."""
        with contextlib.suppress(OSError, EOFError):
            while self.failed is None:
                self.hear()
        return None if self.failed is None else f"failed: {self.failed}"


def _ending(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        return f"was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"ended with status {code}"
