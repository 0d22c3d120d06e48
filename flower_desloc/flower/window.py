"""One window at a client, from the request to the reply.

``open_window`` is what happens in a window, from top to bottom. The local steps in its middle are
those of ``Worker.loss_at`` (``client_app``), or a training loop of the user's own
(``DesLocClient.window``).
"""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from flwr.app import Message
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from flower_desloc.core.averaging import distance
from flower_desloc.core.proximal import proximal
from flower_desloc.core.schedule import BUFFERS, GRADIENTS, PARAMS
from flower_desloc.core.states import seed_states
from flower_desloc.core.streams import check_finite
from flower_desloc.core.types import Streams
from flower_desloc.core.unequal import weight
from flower_desloc.core.worker import LocalSteps, StepMetrics, Worker, own_loop
from flower_desloc.flower.client_state import ClientState, StateFiles
from flower_desloc.flower.compression import encoded
from flower_desloc.flower.messages import (
    PROXIMAL_MU,
    STATE_LOST,
    STATE_NEW,
    TOTALS,
    WindowRequest,
)
from flower_desloc.flower.not_finite import cause
from flower_desloc.flower.replies import Metrics, WindowReply, weight_list
from flower_desloc.flower.window_events import Event, stream_decays, window_events
from flower_desloc.flower.window_start import (
    WindowStart,
    new_if_damaged,
    params_to_use,
    save_received,
    window_start,
)

_LOST = WindowReply(metrics={"num-examples": 0, "train-loss": math.nan, STATE_LOST: 1})
"""The client lacks a stream that it was not sent; the server then sends everything."""


class ClientWindow:
    """The local steps of one client in one window.

    A loop over it takes them one at a time: it yields the number of steps that the federation has
    completed, and its body computes the gradients of a batch and calls ``optimizer.step()`` once.
    """

    reply: Message
    """The reply to the server, once the window is closed (``DesLocClient.window``)."""

    def __init__(self, worker: Worker, request: WindowRequest) -> None:
        self.worker = worker
        self.answer = _LOST
        self.origin = max((request.versions[name] for name in request.resets), default=0)
        """The step at which the optimizer's states were last reset."""
        self.step = self.stop = request.start
        """The steps that are completed, and those at the end."""
        self.loop_state: Mapping[str, Any] = {}
        """What a training loop of the user's own keeps until the client's next window, such as the
        state of a scheduler: values that JSON can hold, saved with the streams when the window
        closes. Empty for a new client."""
        self.events: list[Event] = []
        self.measured = StepMetrics()
        self.seconds = 0.0
        """Of steps that were taken before the window was opened."""
        self.may_skip_steps = False
        """Whether a window may pass without ``optimizer.step()``, as when a gradient scaler skips
        its steps; they count as taken."""
        self.late: Collection[str] = ()
        """The due streams from which the client goes on, as their averages come late."""
        self._local_steps: LocalSteps | None = None  # of the user's own loop, as are all below
        self._hooks: list[RemovableHandle] = []
        self._calls = 0  # of optimizer.step()

    def __iter__(self) -> Iterator[int]:
        module, optimizer = self.worker.module, self.worker.optimizer
        self._hooks.append(optimizer.register_step_post_hook(self._count))
        total = 0
        for start, stop in self._parts():
            self._local_steps = LocalSteps(module, optimizer, start, stop, self.origin)
            for step in self._local_steps:
                self._calls = 0
                yield step
                if self._calls > 1:
                    raise RuntimeError(
                        f"step {step} called optimizer.step() {self._calls} times; accumulate the "
                        "gradients of several batches instead, or count each as a step"
                    )
                total += self._calls
            self.measured += self._local_steps.metrics()
        if self.measured.learning_rates and not (total or self.may_skip_steps):
            raise RuntimeError(
                "no step called optimizer.step() of the Worker's optimizer; if a gradient scaler "
                "skipped it, set window.may_skip_steps = True"
            )

    def record(self, loss: Tensor | float, grad_norm: Tensor | float | None = None) -> None:
        """Report the loss of this step, and the norm of its gradient, to the server."""
        assert self._local_steps is not None, "outside of the loop over the window"
        self._local_steps.record(loss, grad_norm)

    def train(self) -> None:
        """Take the local steps of the worker's ``loss_at``."""
        for start, stop in self._parts():
            self.measured += self.worker.steps(start, stop, self.origin)

    def seed(self, names: Collection[str], step: int, then: Callable[[], None]) -> None:
        """Let the optimizer seed the named states with the gradient of the next step."""
        if self.worker.loss_at is not own_loop:
            self.worker.seed(names, step)
            then()
            return

        def seed() -> None:
            seed_states(self.worker.optimizer, names)
            then()

        def before_the_first_step(
            _: Optimizer, args: tuple[Any, ...], options: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            hook.remove()
            closure = options.pop("closure", None) or next(iter(args[1:]), None)
            if closure is None:
                seed()
                return args, options

            def closure_and_seed() -> Any:  # the gradients are there after it
                loss = closure()
                with torch.no_grad():
                    seed()
                return loss

            return args[:1], {**options, "closure": closure_and_seed}

        hook = self.worker.optimizer.register_step_pre_hook(before_the_first_step)
        self._hooks.append(hook)

    def begin(self, start: WindowStart) -> None:
        """Let the worker have what the client begins with."""
        self.worker.put(start.streams)

    def close(self) -> None:
        """Leave no hook in the optimizer, which may be used again, and free the events' tensors."""
        for hook in self._hooks:
            hook.remove()
        self.events = []

    def _parts(self) -> Iterator[tuple[int, int]]:
        """Yield the steps from one event to the next, and carry out the events between them."""
        for step, act in self.events:
            if step > self.step:
                yield self.step, step
                self.step = step
            act()
        if self.stop > self.step:
            yield self.step, self.stop
            self.step = self.stop

    def _count(self, optimizer: Optimizer, *_: object) -> None:
        assert self._local_steps is not None
        self._local_steps.rate = float(optimizer.param_groups[0]["lr"])
        self._calls += 1


Begin = Callable[[ClientWindow, WindowStart], None]


@contextmanager
def open_window(
    worker: Worker, request: WindowRequest, files: StateFiles, begin: Begin = ClientWindow.begin
) -> Iterator[ClientWindow]:
    """Open a window, in which all its local steps are to be taken; its answer has the due streams.

    A state that a resume looks for is saved before there is an answer, any other after it where the
    process outlives that. A client that is asked for a window again repeats it from the state it
    had before. One that lacks a stream that was not sent says so, and takes no
    step. One whose state file is damaged starts as a new one.
    """
    began = time.perf_counter()
    window = ClientWindow(worker, request)
    # Load the client's state and receive what was sent.
    start = new_if_damaged(files, lambda: window_start(worker, request, files))
    if start is None:
        yield window
        return
    window.stop = request.start + request.steps if request.steps else request.stop
    window.loop_state = start.loop_state
    window.events = list(window_events(worker, request, start, window.seed))
    begin(window, start)

    if worker.loss_at is not own_loop and (mu := request.config.get(PROXIMAL_MU)):
        # A loop of the user's own adds the term itself, as Flower's FedProx asks.
        window.worker = proximal(worker, float(mu))

    # The local steps.
    try:
        with start.ratios.of_steps() if request.sync_bound else nullcontext():
            yield window
    finally:
        window.close()
    if window.step < window.stop:
        raise RuntimeError(f"the loop over a window ended before its last step, {window.stop}")

    # Count and check.
    steps = window.stop - request.start
    counts = {name: steps + before for name, before in start.steps_since_average.items()}
    streams = worker.take(request.versions)
    metrics: dict[str, int | float | list[int] | list[float]] = {
        **_measured(worker, request, window.measured),
        "learning-rates": window.measured.learning_rates,
        "param-norm": distance(streams[PARAMS]),
        "steps": steps,
    }
    metrics["seconds"] = time.perf_counter() - began + window.seconds
    if request.steps:
        metrics["weights"] = _weights(worker, request, counts)
    if start.is_new:
        metrics[STATE_NEW] = 1  # it may have had one, and with it work that was never averaged

    def again(step: int) -> StepMetrics:
        # Read anew: those of ``start`` may be the worker's own tensors.
        before = window_start(worker, request, files) or start
        worker.put(before.streams)
        return window.worker.steps(step, step + 1, window.origin)

    # Before the state is saved: a stream that is never due would stay non-finite for ever.
    retry = None if worker.loss_at is own_loop else again
    _require_finite(worker, request, streams, window.measured, retry)

    # Encode what is due, and save the rest.
    due: Streams = {name: streams[name] for name in request.due}
    residuals = start.residuals
    if request.compression:
        due, residuals = encoded(request, streams, start.references, residuals)
    sent = request.due - {*window.late}
    kept = {name: stream for name, stream in streams.items() if name not in sent}
    state = ClientState(
        step=request.stop,
        versions=request.versions,
        steps_since_average=counts,
        streams=kept,
        late=[*window.late],
        references=start.references,
        residuals=residuals,
        attempt=request.attempt,
        checkpoint=request.checkpoint,
        ratios=start.ratios.to_json(),
        loop_state=window.loop_state,
    )
    files.write(state, for_resume=request.for_resume, unchanged=worker.rests)
    window.answer = WindowReply(metrics=metrics, streams=due)


def window_gradient(worker: Worker, request: WindowRequest, files: StateFiles) -> WindowReply:
    """Return the gradient of the next batch, for data parallelism; nothing is saved."""
    began = time.perf_counter()
    params = new_if_damaged(files, lambda: params_to_use(worker, request, files))
    if params is None:
        return _LOST
    worker.put({PARAMS: params})
    grads, measured = worker.gradient(request.start)
    streams = {GRADIENTS: grads}
    _require_finite(worker, request, streams, measured, lambda step: worker.gradient(step)[1])
    metrics = {
        **_measured(worker, request, measured),
        "param-norm": distance(params),
        "seconds": time.perf_counter() - began,
    }
    return WindowReply(metrics=metrics, streams=streams)


def evaluate_average(worker: Worker, request: WindowRequest, files: StateFiles) -> WindowReply:
    """Evaluate the parameters that were sent on the client's held-out data, if it has any.

    They are saved, so that the next window does not send them again. A client that was sent a
    difference to parameters it does not hold says so, and the server sends them whole.
    """
    streams = new_if_damaged(files, lambda: save_received(worker, request, files))
    if streams.keys() != request.streams.keys():
        return _LOST
    window = {"start-step": request.start, "stop-step": request.start}
    if worker.evaluate is None:
        return WindowReply(metrics={"num-examples": 0, **window})
    worker.put({name: streams[name] for name in (PARAMS, BUFFERS) if name in streams})
    totals = worker.evaluate()
    return WindowReply(
        metrics={
            "num-examples": worker.num_examples,
            **window,
            **worker.metrics(totals),
            **{f"{TOTALS}{name}": value for name, value in totals.items()},
        }
    )


def _measured(worker: Worker, request: WindowRequest, steps: StepMetrics) -> Metrics:
    return {
        "num-examples": worker.num_examples,
        "train-loss": sum(steps.losses) / len(steps.losses) if steps.losses else math.nan,
        "losses": steps.losses,
        "grad-norms": steps.grad_norms,
        "start-step": request.start,
        "stop-step": request.stop,
    }


def _weights(worker: Worker, request: WindowRequest, counts: dict[str, int]) -> list[float]:
    """Return the weights of this client in the averages that are due."""
    since = {name: request.stop - request.versions[name] for name in request.due}
    decays = stream_decays(worker, request.due)
    return weight_list(
        {
            name: {key: weight(decay, counts[name], steps) for key, decay in decays[name].items()}
            for name, steps in since.items()
        }
    )


def _require_finite(
    worker: Worker,
    request: WindowRequest,
    streams: Streams,
    steps: StepMetrics,
    again: Callable[[int], StepMetrics] | None,
) -> None:
    """Raise ``FloatingPointError``, with the cause, if a stream has NaN or infinity."""
    try:
        for name, stream in streams.items():
            check_finite(name, stream)
    except ValueError as error:
        raise cause(error, worker.optimizer, request.start, steps, again) from error
