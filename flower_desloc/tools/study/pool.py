"""Worker processes that live for many runs; one that dies takes only its own run with it."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from flower_desloc.setup.preflight.machine import cores, memory
from flower_desloc.tools.study.store import Outcome
from flower_desloc.tools.study.worker import Job, prepare, run

_WORKER_BYTES = 1_500_000_000
"""Memory that is counted for a worker: PyTorch, transformers and datasets take most of it."""


class Pool:
    """``jobs`` worker processes, started when they are first needed."""

    def __init__(self, jobs: int, app: Path) -> None:
        self.jobs = jobs
        self._app = app
        self._idle: list[_Worker] = []
        self._busy: dict[Future[Outcome], tuple[_Worker, Job]] = {}

    @property
    def free(self) -> int:
        """How many jobs can be started now."""
        return self.jobs - len(self._busy)

    @property
    def busy(self) -> list[Job]:
        """The jobs that are going on."""
        return [job for _, job in self._busy.values()]

    def start(self, job: Job) -> None:
        """Start ``job`` in a free worker."""
        worker = self._idle.pop() if self._idle else _Worker(self._app)
        self._busy[worker.executor.submit(run, job)] = (worker, job)

    def ended(self, timeout: float) -> Iterator[tuple[Job, Outcome | None]]:
        """Yield the jobs that end within ``timeout`` seconds, or at once; None: the worker died."""
        done, _ = wait(self._busy, timeout, FIRST_COMPLETED)
        for future in done:
            worker, job = self._busy.pop(future)
            try:
                outcome = future.result()
            except BrokenProcessPool:
                worker.kill()
                yield job, None
                continue
            except Exception as error:  # such as a full disk, outside of the run itself
                reason = f"{type(error).__name__}: {error}"
                outcome = Outcome(status="failed", error=reason, seconds=0.0, config="")
            self._idle.append(worker)
            yield job, outcome

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for worker in self._idle:  # killed, they would leave their semaphores behind
            worker.executor.shutdown()
        for worker, _ in self._busy.values():
            worker.kill()


class _Worker:
    """A process of its own executor: of a shared one, a worker's death ends all runs."""

    def __init__(self, app: Path) -> None:
        self.executor = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=prepare, initargs=(str(app),)
        )
        self._pid = self.executor.submit(os.getpid)

    def kill(self) -> None:
        """End the process, in the middle of a run if need be."""
        with suppress(BrokenProcessPool, ProcessLookupError):
            os.kill(self._pid.result(), signal.SIGKILL)
        self.executor.shutdown(wait=True, cancel_futures=True)


def default_jobs(client_cpus: int) -> int:
    """Return as many runs at once as the machine has cores and memory for; at least one."""
    _, free = memory()
    return max(1, min(cores() // client_cpus, free // _WORKER_BYTES))
