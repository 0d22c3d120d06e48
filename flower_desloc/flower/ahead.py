"""The local steps that a client takes while its streams travel (``sync_delay``).

They are the first steps of its next window, which merges the averages after them. Only a process
that outlives a message can take them early. They are no state: the state file is that of the step
after which the streams were sent, and a client that has lost these steps, or never took them, takes
them in the window itself, to the same bits.

``delayed_window`` wraps a window of such a run; any other is ``open_window`` alone.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flower_desloc.core.worker import StepMetrics, Worker, own_loop
from flower_desloc.flower.client_state import StateFiles
from flower_desloc.flower.messages import WindowRequest
from flower_desloc.flower.window import ClientWindow, open_window
from flower_desloc.flower.window_start import WindowStart
from flower_desloc.optim.bounds import Ratios, WidestRatios


@dataclass(frozen=True)
class FirstSteps:
    """The local steps ``start + 1 .. stop`` of the client whose state is in ``folder``."""

    folder: Path
    start: int
    stop: int


@dataclass(frozen=True)
class Done:
    """What steps that were taken early have measured."""

    steps: StepMetrics
    seconds: float
    ratios: Ratios


class StepsAhead:
    """The steps that a client's process may take, or has taken, before its next message.

    Once taken, they are in the worker's module and optimizer and nowhere else: call ``claim``
    before writing into these.
    """

    def __init__(self) -> None:
        self._which: FirstSteps | None = None
        self._worker: Worker | None = None
        self._done: Done | None = None

    def allow(self, which: FirstSteps, worker: Worker) -> None:
        """Let ``take`` take these steps with ``worker``, which is at their start now."""
        self._which, self._worker, self._done = which, worker, None

    def take(self) -> None:
        """Take the steps that are allowed, if any."""
        if self._which is None or self._worker is None or self._done is not None:
            return
        began, ratios = time.perf_counter(), WidestRatios(self._worker.optimizer)
        with ratios.of_steps():
            steps = self._worker.steps(self._which.start, self._which.stop, 0)
        ratios.widen()
        self._done = Done(steps, time.perf_counter() - began, ratios.now)

    def claim(self, which: FirstSteps, worker: Worker) -> Done | None:
        """Return what these steps measured if they are taken in ``worker``; forget any others."""
        here = self._worker is not None and self._worker.module is worker.module
        done = self._done if here and which == self._which else None
        self._which = self._worker = self._done = None
        return done

    @contextmanager
    def kept(self, worker: Worker) -> Iterator[None]:
        """Undo what is done to the model inside this context, if steps were taken."""
        if self._done is None:
            yield
            return
        before = {
            name: {key: tensor.clone() for key, tensor in stream.items()}
            for name, stream in worker.take(worker.model_streams()).items()
        }
        try:
            yield
        finally:
            worker.put(before)


@contextmanager
def delayed_window(
    worker: Worker, request: WindowRequest, files: StateFiles, ahead: StepsAhead
) -> Iterator[ClientWindow]:
    """Open a window whose first steps may be taken, and allow those of the next one."""

    def begin(window: ClientWindow, start: WindowStart) -> None:
        merge_at = request.start + (request.before_merge if start.late_averages else 0)
        done = ahead.claim(FirstSteps(files.folder, request.start, merge_at), worker)
        if done is None:
            window.begin(start)
        else:  # the worker is there already
            window.step, window.measured, window.seconds = merge_at, done.steps, done.seconds
            start.ratios.add(done.ratios)
            window.events = [(step, act) for step, act in window.events if step >= merge_at]
        window.late = request.due if request.ahead else ()

    with open_window(worker, request, files, begin) as window:
        yield window
    if request.ahead and window.step > request.start and worker.loss_at is not own_loop:
        following = FirstSteps(files.folder, request.stop, request.stop + request.ahead)
        ahead.allow(following, worker)
