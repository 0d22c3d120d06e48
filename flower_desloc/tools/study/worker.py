"""One run, inside a worker process: what it says goes to its log, what it leaves to its place."""

import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from typing import Final, Literal

from flower_desloc.tools.study.store import LOG, OUTCOME, Outcome

_NOT_FINITE: Final = "has values that are not finite"
"""In the error of every run that diverged: all that is sent and all that is made of it goes through
``check_finite``. A client's error reaches the server as text only."""


@dataclass(frozen=True)
class Job:
    """A run, as it is sent to a worker process."""

    name: str
    config: str
    """The resolved configuration, YAML."""
    num_clients: int
    scratch: Path
    place: Path
    failed: Path


def prepare(app: str) -> None:
    """Make a process a worker; ``app`` is the folder of server_app and client_app."""
    # Ctrl-C goes to the whole terminal; the parent decides what becomes of its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.path.insert(0, app)


def run(job: Job) -> Outcome:
    """Run ``job`` and put its folder into its place; return how it ended."""
    began = time.perf_counter()
    shutil.rmtree(job.scratch, ignore_errors=True)
    folder = job.scratch / job.name
    job.scratch.mkdir(parents=True)
    with _output_to(job.scratch / LOG):
        error = _train(job)
    status: Literal["completed", "diverged", "failed"] = "completed"
    if error is not None:
        status = "diverged" if _NOT_FINITE in error else "failed"
    outcome = Outcome(
        status=status,
        error=error,
        seconds=time.perf_counter() - began,
        config=job.config,
    )
    folder.mkdir(exist_ok=True)
    (job.scratch / LOG).rename(folder / LOG)
    (folder / OUTCOME).write_text(json.dumps(outcome, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(job.failed, ignore_errors=True)
    place = job.failed if status == "failed" else job.place
    shutil.rmtree(place, ignore_errors=True)  # of settings whose defaults have changed since
    place.parent.mkdir(parents=True, exist_ok=True)
    folder.rename(place)
    shutil.rmtree(job.scratch, ignore_errors=True)
    return outcome


def _train(job: Job) -> str | None:
    """Return None, or the error."""
    config = job.scratch / "config.yaml"
    config.write_text(job.config, encoding="utf-8")
    try:
        from flower_desloc.tools.engines.in_process import run_in_process

        run_in_process(
            {"config": str(config), "overrides": "", "output-dir": str(job.scratch)},
            job.num_clients,
        )
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return None


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    # Of the process, not of sys: libraries keep the stream they found, and some are not Python.
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


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # nobody is left to take the result
