"""The client: restore its state, receive streams, run one window, reply, save its state.

An app gives ``client_app`` a function that builds a ``Worker``.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from typing import TypeVar

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_desloc.core.averaging import distance
from flower_desloc.core.kinds import kind_of
from flower_desloc.core.late import merged
from flower_desloc.core.schedule import GRADIENTS, PARAMS
from flower_desloc.core.states import kinds_of, needs_seed, state_decays
from flower_desloc.core.streams import (
    BUFFERS,
    check_finite,
    check_trainable,
    prime,
    starts_at_zero,
    stream_names,
    zeros_like,
)
from flower_desloc.core.types import Stream
from flower_desloc.core.unequal import weight
from flower_desloc.core.worker import StepMetrics, Worker
from flower_desloc.flower.ahead import STEPS_AHEAD, FirstSteps, Taken
from flower_desloc.flower.client_state import Held, StateFiles, average_of, client_name, state_files
from flower_desloc.flower.coding import decoded, encoded, kept_for_coding
from flower_desloc.flower.exits import divergence_as_error, exits_as_errors
from flower_desloc.flower.fingerprint import PACKAGE, differing, fingerprint
from flower_desloc.flower.internals import log
from flower_desloc.flower.messages import (
    ABOUT,
    ARE_YOU_THERE,
    GOODBYE,
    HELLO,
    STATE_LOST,
    STATE_NEW,
    TOTALS,
    Settings,
    WindowRequest,
)
from flower_desloc.flower.model_names import ModelNames
from flower_desloc.flower.not_finite import cause
from flower_desloc.flower.observer import DATA_VERSION
from flower_desloc.flower.replies import WindowReply
from flower_desloc.flower.tensor_file import DamagedFileError
from flower_desloc.optim.bounds import bounded, suits_newcomers

T = TypeVar("T")

Metrics = dict[str, int | float | list[int] | list[float]]

_LOST = WindowReply(metrics={"num-examples": 0, "train-loss": math.nan, STATE_LOST: 1})


def client_app(build: Callable[[Settings, Context], Worker]) -> ClientApp:
    """Return a ClientApp whose clients are what ``build`` returns.

    ``build`` is called for every message, with the ``train_config`` given to ``DesLoc.start``
    (single values: strings, numbers, booleans) and Flower's context. All that outlives the message
    is in the client's state file: in ``~/.flwr/desloc``, or ``state-dir`` of the node's config.
    """
    app = ClientApp(mods=[divergence_as_error, _exits_are_errors])

    @app.query(HELLO.partition(".")[2])
    def hello(message: Message, context: Context) -> Message:
        request = WindowRequest.from_content(message.content)
        _require_same_code(request, client_name(context))
        worker = build(request.config, context)
        check_trainable(worker.module, worker.optimizer)
        files = state_files(context, request.run_key)
        files.go_back(request.attempts)
        held = files.held_at(request.start)
        about = ConfigRecord(
            {
                **worker.about,
                "client": client_name(context),
                "num-examples": worker.num_examples,
                **({DATA_VERSION: worker.data_version()} if worker.data_version else {}),
                "bundles": True,
                **ModelNames.of(worker).to_config(),
                "held-streams": list(held.versions) if held else [],
                "held-versions": list(held.versions.values()) if held else [],
            }
        )
        return Message(RecordDict({ABOUT: about}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        request = WindowRequest.from_content(message.content)
        worker = build(request.config, context)
        message.content.clear()  # free the request's tensors before the reply, which is as large
        reply = train_window(worker, request, state_files(context, request.run_key))
        bundles = request.bundles
        del request
        return Message(reply.to_content(bundles=bundles), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        request = WindowRequest.from_content(message.content)
        worker = build(request.config, context)
        reply = evaluate_average(worker, request, state_files(context, request.run_key))
        return Message(reply.to_content(), reply_to=message)

    @app.query(ARE_YOU_THERE.partition(".")[2])
    def there(message: Message, context: Context) -> Message:  # noqa: ARG001
        return Message(RecordDict(), reply_to=message)

    @app.query(GOODBYE.partition(".")[2])
    def goodbye(message: Message, context: Context) -> Message:
        state_files(context, WindowRequest.from_content(message.content).run_key).delete()
        return Message(RecordDict(), reply_to=message)

    return app


def _exits_are_errors(
    message: Message, context: Context, call: Callable[[Message, Context], Message]
) -> Message:
    with exits_as_errors():
        return call(message, context)


def train_window(worker: Worker, request: WindowRequest, files: StateFiles) -> WindowReply:
    """Run the local steps of one window and return exactly the due streams.

    The state is saved before the reply is returned. A client that is asked for a window again
    repeats it from the state it had before. A client that lacks a stream that was not sent says
    so, and the server sends it. A client whose state file is damaged starts as a new one.

    Where gradients are due, the gradient of the next batch is returned, and nothing is saved.
    """
    window = _gradients if request.due == {GRADIENTS} else _train_window
    return _new_if_damaged(files, lambda: window(worker, request, files))


def _train_window(worker: Worker, request: WindowRequest, files: StateFiles) -> WindowReply:
    began = time.perf_counter()
    mine = ClientStreams(worker, request, files, files.held_at(request.start))
    begin, late = mine.at_start(), mine.late_averages()
    if begin is None or late is None:
        return _LOST
    merge_at = request.start + (request.before_merge if late else 0)
    first = FirstSteps(files.folder, request.start, merge_at)
    ahead = STEPS_AHEAD.claim(first, worker)
    origin = mine.origin
    if ahead is None:
        _begin(worker, request, begin, mine, averaged=mine.received.keys() - late.keys())
        ahead = Taken(_steps(worker, request.start, merge_at, origin), 0.0)
    if late:
        merged_now = _merged(worker, begin, late, merge_at - request.start)
        after = {**worker.take(request.versions), **merged_now}
        within = bounded(worker.optimizer, after, late) if request.bound else {}
        worker.put({**merged_now, **within})
    last = request.start + request.steps if request.steps else request.stop
    steps = ahead.steps + _steps(worker, merge_at, last, origin)
    taken = mine.taken(last - request.start)
    streams = worker.take(request.versions)
    metrics = {
        **_trained(worker, steps, begin[PARAMS], streams[PARAMS]),
        "start-step": request.start,
        "stop-step": request.stop,
        "steps": last - request.start,
        "seconds": time.perf_counter() - began + ahead.seconds,
    }
    if request.steps:
        metrics["weights"] = _weights(worker, request, taken)
    if mine.held is None:
        metrics[STATE_NEW] = 1  # it may have had a state, and with it work that was never averaged
    # Before the state is saved: a stream that is never due would stay non-finite for ever.

    def again(step: int) -> StepMetrics:
        worker.put(begin)
        return worker.steps(step, step + 1, origin)

    why = partial(cause, optimizer=worker.optimizer, start=request.start, steps=steps, again=again)
    _require_finite(streams, why)
    due: Mapping[str, Stream] = {name: streams[name] for name in request.due}
    coding: Mapping[str, Stream] = {}
    if request.formats:
        due, coding = encoded(request, mine.for_coding(), streams)
    late_next = [name for name in streams if name in request.due and request.ahead]
    kept = {n: stream for n, stream in streams.items() if n in late_next or n not in request.due}
    mine.save(request.stop, request.versions, taken, kept, coding, late=late_next, arrived={})
    if request.ahead:
        next_steps = FirstSteps(files.folder, request.stop, request.stop + request.ahead)
        STEPS_AHEAD.allow(next_steps, worker)
    return WindowReply(metrics=metrics, streams=due)


def _gradients(worker: Worker, request: WindowRequest, files: StateFiles) -> WindowReply:
    began = time.perf_counter()
    held = None if PARAMS in request.streams else files.held()  # a file read in every step, else
    params = ClientStreams(worker, request, files, held).here([PARAMS]).get(PARAMS)
    if params is None:
        return _LOST
    worker.put({PARAMS: params})
    grads, steps = worker.gradient(request.start)

    def again(step: int) -> StepMetrics:
        return worker.gradient(step)[1]

    why = partial(cause, optimizer=worker.optimizer, start=request.start, steps=steps, again=again)
    _require_finite({GRADIENTS: grads}, why)
    metrics: Metrics = {
        "num-examples": worker.num_examples,
        "train-loss": steps.losses[0],
        "start-step": request.start,
        "stop-step": request.stop,
        "losses": steps.losses,
        "grad-norms": steps.grad_norms,
        "param-norm": distance(params),
        "seconds": time.perf_counter() - began,
    }
    return WindowReply(metrics=metrics, streams={GRADIENTS: grads})


def evaluate_average(worker: Worker, request: WindowRequest, files: StateFiles) -> WindowReply:
    """Evaluate the parameters that were sent on the client's held-out data.

    They are saved, so that the next window does not send them again. A client that was sent a
    difference to parameters it does not hold says so, and the server sends them whole.
    """
    streams = _new_if_damaged(files, lambda: _saved(worker, request, files))
    if streams.keys() != request.streams.keys():
        return _LOST
    with STEPS_AHEAD.kept(worker):
        if worker.evaluate is not None:
            worker.put(streams)
        return evaluated(worker, request.start)


def _saved(worker: Worker, request: WindowRequest, files: StateFiles) -> Mapping[str, Stream]:
    """Return the streams that were sent and could be decoded, after saving those that are new."""
    mine = ClientStreams(worker, request, files, files.held())
    mine.save_received()
    return mine.received


def evaluated(worker: Worker, step: int) -> WindowReply:
    """Evaluate the model as it is after ``step`` steps on the client's held-out data, if any."""
    window = {"start-step": step, "stop-step": step}
    if worker.evaluate is None:
        return WindowReply(metrics={"num-examples": 0, **window})
    totals = worker.evaluate()
    return WindowReply(
        metrics={
            "num-examples": worker.num_examples,
            **window,
            **worker.metrics(totals),
            **{f"{TOTALS}{name}": value for name, value in totals.items()},
        }
    )


class ClientStreams:
    """The streams that a client kept or was sent, for one request.

    Parameters
    ----------
    worker : Worker
        Its optimizer is primed if it was not.
    request : WindowRequest
        Names the window and the version of every stream at its start.
    files : StateFiles
        The client's files in this run.
    held : Held or None
        What is in the last of them; None: nothing.

    """

    def __init__(
        self, worker: Worker, request: WindowRequest, files: StateFiles, held: Held | None
    ) -> None:
        if not worker.optimizer.state:
            prime(worker.optimizer)
        self.held = held
        self._worker, self._request, self._files = worker, request, files
        self._names = stream_names(worker.module, worker.optimizer)
        self.received: Mapping[str, Stream] = request.streams
        """The streams that were sent and that the client could decode."""
        self.origin = max((request.versions[name] for name in request.resets), default=0)
        """The step at which the optimizer's states were last reset."""
        states = {name for name in self._names if starts_at_zero(name)}
        self.is_new = held is None or not held.versions.keys() >= states
        """Whether the client has taken no step yet, or has lost what it had; an evaluation before
        its first window leaves only the model's streams."""
        self.never_averaged: list[str] = []
        """Set by ``at_start``: the streams that are zero because there is no average of them."""
        if request.formats:
            lossy = [n for n in request.streams if n in request.formats and n in self._names]
            self.received = decoded(request, held, files, worker.like(lossy))
        self._late: list[str] = []
        if held is not None and held.step == request.start:
            # Otherwise the client has missed windows, and starts from their averages.
            self._late = [n for n in held.late if request.versions.get(n) == request.start]

    def at_start(self) -> dict[str, Stream] | None:
        """Return every stream at the start of the window; None if one was neither kept nor sent.

        A stream kept in the right version is used as it is, with the local steps taken since: they
        are averaged at the stream's next sync.

        Raises ``ValueError`` if the server averages other streams than the optimizer has.
        """
        request = self._request
        if set(self._names) != set(request.versions):
            raise ValueError(
                f"the server averages the streams {sorted(request.versions)}, but this client, "
                f"with {type(self._worker.optimizer).__name__}, has {sorted(self._names)}"
            )
        streams = self.here(self._names)
        for name in self._names:
            if name in streams:
                continue
            if name not in request.resets and not (
                request.versions[name] == 0 and starts_at_zero(name)
            ):
                return None
            streams[name] = zeros_like(self._worker.like([name])[name])
            if name not in request.resets:
                self.never_averaged.append(name)
        return streams

    def here(self, names: Collection[str]) -> dict[str, Stream]:
        """Return those of the named streams that the client kept or was sent."""
        received = {name: self.received[name] for name in names if name in self.received}
        return received | self._kept(names)

    def late_averages(self) -> dict[str, Stream] | None:
        """Return the averages to merge during the window; None if one was neither kept nor sent.

        They are those of streams that this client sent at the start of the window and goes on from.
        """
        sent = {name: self.received[name] for name in self._late if name in self.received}
        averages = self._arrived() | sent
        return averages if averages.keys() == set(self._late) else None

    def taken(self, steps: int) -> dict[str, int]:
        """Return by stream the local steps since its last average, ``steps`` in this window."""
        before = self.held.taken if self.held else {}
        return {
            name: steps + (before.get(name, 0) if self._is_current(name) else 0)
            for name in self._request.versions
        }

    def for_coding(self) -> dict[str, Stream]:
        """Return what ``flower_desloc.flower.coding`` keeps for the next window."""
        if not self._request.formats:
            return {}
        return kept_for_coding(self._request, self.held, self._files, self.received)

    def save(
        self,
        step: int,
        versions: Mapping[str, int],
        taken: Mapping[str, int],
        streams: Mapping[str, Stream],
        coding: Mapping[str, Stream],
        late: Sequence[str],
        arrived: Mapping[str, Stream],
    ) -> None:
        """Write the client's state after ``step``; the arguments are those of ``Held``."""
        held = Held(
            step=step,
            versions=versions,
            taken=taken,
            streams=list(streams),
            late=list(late),
            arrived=list(arrived),
            coding=list(coding),
            attempt=self._request.attempt,
            checkpoint=self._request.checkpoint,
        )
        averages = {average_of(name): stream for name, stream in arrived.items()}
        self._files.write(held, {**streams, **averages, **coding})

    def save_received(self) -> None:
        """Add the averages that were sent to the client's state, if any is new to it."""
        held, request = self.held, self._request
        newer = {n: stream for n, stream in self.received.items() if not self._is_current(n)}
        if not newer:
            return
        coding = self.for_coding()
        # safetensors refuses a tensor that is also in ``coding``.
        copies = {n: {k: t.clone() for k, t in stream.items()} for n, stream in newer.items()}
        arrived = self._arrived()
        arrived |= {name: copies.pop(name) for name in self._late if name in copies}
        self.save(
            request.start,
            {**(held.versions if held else {}), **{n: request.versions[n] for n in newer}},
            {**(held.taken if held else {}), **dict.fromkeys(newer, 0)},
            {**self._kept(held.streams if held else ()), **copies},
            coding,
            late=self._late,
            arrived=arrived,
        )

    def _is_current(self, name: str) -> bool:
        """Return whether the client kept the version of a stream that the window begins with."""
        held, version = self.held, self._request.versions.get(name)
        return held is not None and name in held.streams and held.versions[name] == version

    def _kept(self, names: Iterable[str]) -> dict[str, Stream]:
        """Return those of the named streams that the state file has as they are at the start."""
        here = [name for name in names if name in self._late or self._is_current(name)]
        arrived = self.held.arrived if self.held else ()
        # If an average was saved and the client has missed windows, it starts from the average.
        places = {n: average_of(n) if n in arrived and n not in self._late else n for n in here}
        read = self._files.read(places.values())
        return {name: read[place] for name, place in places.items()}

    def _arrived(self) -> dict[str, Stream]:
        """Return the averages in the state file that are to be merged during the window."""
        names = [name for name in self._late if self.held and name in self.held.arrived]
        read = self._files.read(map(average_of, names))
        return {name: read[average_of(name)] for name in names}


def _merged(
    worker: Worker, sent: Mapping[str, Stream], averages: Mapping[str, Stream], steps: int
) -> dict[str, Stream]:
    """Return the streams with averages of what was ``sent`` so many local steps before."""
    decays, kinds = _decays(worker, averages), kinds_of(worker.optimizer)
    return {
        name: merged(
            kind_of(name, kinds), now, sent[name], averages[name], decay=decays[name], steps=steps
        )
        for name, now in worker.take(averages).items()
    }


def _weights(worker: Worker, request: WindowRequest, taken: Mapping[str, int]) -> list[float]:
    """Return the weight of this client in each average that is due, in the order of the names."""
    due = sorted(request.due)
    decays = _decays(worker, due)
    return [
        weight(decays[name], taken[name], request.stop - request.versions[name]) for name in due
    ]


def _decays(worker: Worker, names: Iterable[str]) -> dict[str, float]:
    """Return what a step multiplies each stream by; 0 for buffers, which layers replace."""
    states = [name for name in names if name not in (PARAMS, BUFFERS)]
    return {PARAMS: 1.0, BUFFERS: 0.0, **state_decays(worker.optimizer, states)}


def _begin(
    worker: Worker,
    request: WindowRequest,
    streams: Mapping[str, Stream],
    mine: "ClientStreams",
    averaged: Collection[str],
) -> None:
    """Write the streams at the start of a window into the worker, ``averaged`` by the server.

    A client without a state of its own that starts at a later step gets a second moment of its
    own where that was never averaged, and a first moment that fits it, whatever the run's
    settings. Where this optimizer's moments are not known, all its states are then zero.
    """
    late_start = request.start > mine.origin
    is_new = mine.is_new and late_start
    if is_new and mine.never_averaged and not suits_newcomers(worker.optimizer):
        zeros = {name: zeros_like(s) for name, s in streams.items() if starts_at_zero(name)}
        streams = {**streams, **zeros}
        log(
            INFO,
            "%s was never averaged, so this client starts with states of zero",
            ", ".join(mine.never_averaged),
        )
    worker.put(streams)
    if late_start and (names := needs_seed(worker.optimizer, streams)):
        worker.seed(names, request.start)
        streams = {**streams, **worker.take(names)}
    if request.bound or is_new:
        worker.put(bounded(worker.optimizer, streams, averaged))


def _trained(worker: Worker, steps: StepMetrics, before: Stream, after: Stream) -> Metrics:
    """Return the metrics of local steps that led from the parameters ``before`` to ``after``."""
    return {
        "num-examples": worker.num_examples,
        "train-loss": sum(steps.losses) / len(steps.losses),
        "losses": steps.losses,
        "grad-norms": steps.grad_norms,
        "learning-rates": steps.learning_rates,
        "update-norm": distance(after, before),
        "param-norm": distance(after),
    }


def _require_finite(
    streams: Mapping[str, Stream], why: Callable[[ValueError], FloatingPointError]
) -> None:
    """Raise ``FloatingPointError``, with the cause, if a stream has NaN or infinity."""
    try:
        for name, stream in streams.items():
            check_finite(name, stream)
    except ValueError as error:
        raise why(error) from error


def _steps(worker: Worker, start: int, stop: int, origin: int) -> StepMetrics:
    return worker.steps(start, stop, origin) if stop > start else StepMetrics([], [], [])


def _new_if_damaged(files: StateFiles, use: Callable[[], T]) -> T:
    """Return ``use()``; if the state file is damaged, delete it and try again."""
    try:
        return use()
    except DamagedFileError as error:
        log(WARNING, "%s; this client starts as a new one", error)
        files.delete()
        return use()


def _require_same_code(request: WindowRequest, client: str) -> None:
    code = dict(request.code)
    if code.pop(PACKAGE, "") != fingerprint():
        raise RuntimeError(
            f"{client} runs other code ({Path(__file__).parents[1]}) than the server: another "
            "version of flower-desloc is installed here, or the SuperLink or SuperNode was started "
            "in a folder that holds a copy of the app; install the server's version, and start it "
            "in an empty folder"
        )
    if files := differing(code):
        more = f", and {len(files) - 3} more" if len(files) > 3 else ""
        raise RuntimeError(
            f"{client} runs other code than the server: it has another version, or none, of "
            f"{', '.join(map(str, files[:3]))}{more}; copy the server's version there"
        )
