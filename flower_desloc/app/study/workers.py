"""Worker processes of a study: each takes many runs, and its death ends only its current one."""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal, Self

import psutil

from flower_desloc.app.config import Config, dump
from flower_desloc.app.config.user_code import user_modules
from flower_desloc.app.setup.machine import cores, memory
from flower_desloc.app.study.grid import StudyRun, code_digest
from flower_desloc.app.study.store import LOG, OUTCOME, Outcome, Store
from flower_desloc.flower.failures import DivergedError
from flower_desloc.flower.fingerprint import fingerprint

_WORKER_BYTES: Final = 1_500_000_000
"""Memory to expect of a worker: mostly PyTorch, transformers and datasets."""

Status = Literal["completed", "diverged", "failed"]

_CODE_CHANGED: Final = (
    "the code of the task or the optimizer has changed since the study was started; the same "
    "command runs everything with the new code"
)


class WorkerPool:
    """At most ``jobs`` worker processes, started on demand; leaving the context ends them."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._idle: list[_Worker] = []
        self._busy: dict[Future[Outcome], tuple[_Worker, StudyRun]] = {}

    @property
    def free(self) -> int:
        """Number of runs that can start now."""
        return self.jobs - len(self._busy)

    def start(self, run: StudyRun, store: Store) -> None:
        """Start ``run`` in an idle or new worker."""
        while self._idle:
            worker = self._idle.pop()
            try:
                future = worker.executor.submit(run_to_end, run, store.path)
            except BrokenProcessPool:  # it died since its last run
                worker.executor.shutdown()
            else:
                self._busy[future] = (worker, run)
                return
        worker = _Worker()
        self._busy[worker.executor.submit(run_to_end, run, store.path)] = (worker, run)

    def ended(self, timeout: float) -> Iterator[tuple[StudyRun, Outcome | None]]:
        """Wait up to ``timeout`` seconds for runs to end; the outcome is None if a worker died."""
        done, _ = wait(self._busy, timeout, FIRST_COMPLETED)
        for future in done:
            worker, run = self._busy.pop(future)
            try:
                outcome = future.result()
            except BrokenProcessPool:
                worker.kill()
                yield run, None
                continue
            except Exception as error:  # outside of the run itself, for example a full disk
                reason = f"{type(error).__name__}: {error}"
                outcome = Outcome(status="failed", error=reason, seconds=0.0, config="", library="")
            self._idle.append(worker)
            yield run, outcome

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._idle:  # a killed process would leak its semaphores
            worker.executor.shutdown()
        for worker, _ in self._busy.values():
            worker.kill()


class _Worker:
    """A process in an executor of its own: a death in a shared executor ends every run."""

    def __init__(self) -> None:
        self.executor = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=_prepare
        )
        # Ctrl-C reaches every process of the terminal; only the parent handles it. A process has
        # the mask of the one that starts it, so it is safe from its first import on.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._pid = self.executor.submit(os.getpid)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def kill(self) -> None:
        """Kill the process, also during a run."""
        with suppress(BrokenProcessPool, psutil.NoSuchProcess):
            psutil.Process(self._pid.result()).kill()
        self.executor.shutdown(wait=True, cancel_futures=True)


def default_jobs(client_cpus: int) -> int:
    """Return how many runs at a time the machine has cores and memory for; at least one."""
    _, free = memory()
    return max(1, min(cores() // client_cpus, free // _WORKER_BYTES))


def run_to_end(run: StudyRun, folder: Path) -> Outcome:
    """Run ``run``, move its folder to its final path, and return how it ended.

    ``folder`` is the study's.
    """
    began = time.perf_counter()
    store = Store(folder.parent, folder.name)
    scratch, failed, final = store.scratch_path(run), store.failed_path(run), store.final_path(run)
    written = scratch / run.config.run.name
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    with _output_to(scratch / LOG):
        is_current = code_digest(user_modules(run.config)) == run.code
        status, error = _train(run.config, scratch) if is_current else ("failed", _CODE_CHANGED)
    seconds = time.perf_counter() - began
    outcome = Outcome(
        status=status,
        error=error,
        seconds=seconds,
        config=dump(run.config),
        library=fingerprint(),
    )
    written.mkdir(exist_ok=True)
    (scratch / LOG).rename(written / LOG)
    (written / OUTCOME).write_text(json.dumps(outcome, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(failed, ignore_errors=True)
    target = failed if status == "failed" else final
    shutil.rmtree(target, ignore_errors=True)  # of a configuration whose defaults changed since
    target.parent.mkdir(parents=True, exist_ok=True)
    written.rename(target)
    shutil.rmtree(scratch, ignore_errors=True)
    return outcome


def _prepare() -> None:
    """Make this process a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _train(config: Config, folder: Path) -> tuple[Status, str | None]:
    """Run ``config`` in this process, with ``folder`` as its output folder.

    Returns how the run ended, and its error.
    """
    # Imported here: the study's own process does not need PyTorch's models.
    from flower_desloc.app.engines.in_process import run_in_process

    file = folder / "config.yaml"
    file.write_text(dump(config), encoding="utf-8")
    run_config = {"config": str(file), "overrides": "", "output-dir": str(folder)}
    try:
        run_in_process(run_config, config.simulation.num_clients)
    except Exception as error:
        traceback.print_exc()
        status: Status = "diverged" if isinstance(error, DivergedError) else "failed"
        return status, f"{type(error).__name__}: {error}"
    return "completed", None


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    # File descriptors, not sys.stdout: libraries keep the stream they found, and some write in C.
    with path.open("wb") as log:
        before = {number: os.dup(number) for number in (1, 2)}
        try:
            for number in before:
                os.dup2(log.fileno(), number)
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in before.items():
                os.dup2(copy, number)
                os.close(copy)
