"""The client's side: restore what is held, take what was sent, run one window, reply.

An app gives :func:`client_app` a function that builds a :class:`Worker`; everything else, from the
state file to the records, is here.
"""

import math
import os
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from logging import WARNING
from pathlib import Path
from typing import TypeVar

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import log
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_desloc.core.averaging import Stream, distance, norms
from flower_desloc.core.local_steps import (
    Clipping,
    StepMetrics,
    gradients,
    local_steps,
    needs_seed,
    seed_states,
)
from flower_desloc.core.lr_schedule import LRSchedule, constant
from flower_desloc.core.schedule import GRADIENTS, PARAMS
from flower_desloc.core.streams import check_finite, prime, put, starts_at_zero, stream_names, take
from flower_desloc.flower.client_state import Held, StateFile
from flower_desloc.flower.coding import kept_beside, outgoing, received
from flower_desloc.flower.fingerprint import fingerprint
from flower_desloc.flower.housing import house
from flower_desloc.flower.members import is_name
from flower_desloc.flower.records import (
    ABOUT,
    ARE_YOU_THERE,
    GOODBYE,
    HELLO,
    STATE_LOST,
    STATE_NEW,
    TOTALS,
    Reply,
    Request,
)
from flower_desloc.flower.tensor_file import DamagedFileError

T = TypeVar("T")
Config = Mapping[str, str | int | float | bool]
Metrics = dict[str, int | float | list[int] | list[float]]

STATE_DIR = "DESLOC_STATE_DIR"
"""Environment variable: where clients keep their state whose node config has no state-dir."""

_LOST = Reply(metrics={"num-examples": 0, "train-loss": math.nan, STATE_LOST: 1})


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A client's model, optimizer and data: what DES-LOC drives.

    Nothing of a worker outlives a message but what its streams hold, so one may be kept and used
    for several clients, as long as ``loss_at`` and ``evaluate`` are the client's own. Parameters
    and states may be given other memory between two windows: keep them, and no views of them, be
    it as an attribute of the module.
    """

    module: nn.Module
    optimizer: Optimizer
    loss_at: Callable[[int], Tensor]
    """The loss of the batch of the step taken after so many completed steps; a pure function."""
    num_examples: int
    """The weight of this client under weighting by examples."""
    lr_schedule: LRSchedule = field(default_factory=constant)
    clipping: Clipping = field(default_factory=Clipping)
    evaluate: Callable[[], Mapping[str, float]] | None = None
    """Totals over the client's held-out data, such as nats and tokens."""
    metrics: Callable[[Mapping[str, float]], Mapping[str, float]] = dict
    """Metrics from totals."""
    about: Mapping[str, str] = field(default_factory=dict)
    """What the server should know of this client, such as its device."""

    def like(self, names: Iterable[str]) -> dict[str, Stream]:
        """Return tensors of the shapes and types that the named streams have."""
        return dict(take(self.module, self.optimizer, names))

    def put(self, streams: Mapping[str, Stream], due: Container[str] = ()) -> None:
        """Write ``streams`` into the module and the optimizer.

        Of those that are ``due`` once they have changed, tensors may be given other memory.
        """
        model = [
            *(*self.module.parameters(), *self.module.buffers()),
            *(v for s in self.optimizer.state.values() for v in s.values() if torch.is_tensor(v)),
        ]
        put(
            *(self.module, self.optimizer, streams),
            before=lambda name, tensors: house(tensors, model, due=name in due),
        )

    def take(self, names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
        """Return the named streams, to be read before anything else is done."""
        return take(self.module, self.optimizer, names)

    def seed(self, step: int) -> None:
        """Let an optimizer that starts with zeros at a later ``step`` seed its states."""
        self.module.train()
        seed_states(self.optimizer, self.loss_at, step=step, clipping=self.clipping)

    def steps(self, start: int, stop: int, origin: int) -> StepMetrics:
        """Take the local steps ``start + 1 .. stop``; the optimizer counts them from ``origin``."""
        return local_steps(
            self.module,
            self.optimizer,
            self.loss_at,
            start=start,
            stop=stop,
            lr_schedule=self.lr_schedule,
            clipping=self.clipping,
            origin=origin,
        )

    def gradient(self, step: int) -> tuple[dict[str, Tensor], StepMetrics]:
        """Return the gradient of the step taken after ``step`` completed ones."""
        return gradients(self.module, self.optimizer, self.loss_at, step=step)


def client_app(build: Callable[[Config, Context], Worker]) -> ClientApp:
    """Return the ClientApp whose clients are built by ``build`` from the server's settings."""
    app = ClientApp()

    @app.query(HELLO.partition(".")[2])
    def hello(message: Message, context: Context) -> Message:
        request = Request.from_content(message.content)
        _require_same_code(request)
        worker = build(request.config, context)
        file = _state_file(request, context)
        file.go_back(request.checkpoint, request.attempt)
        held = file.held_at(request.start)
        about = ConfigRecord(
            {
                **worker.about,
                "client": client_name(context),
                "num-examples": worker.num_examples,
                "bundles": True,
                "held-streams": list(held.versions) if held else [],
                "held-versions": list(held.versions.values()) if held else [],
            }
        )
        return Message(RecordDict({ABOUT: about}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        request = Request.from_content(message.content)
        worker = build(request.config, context)
        # What came is let go before the reply is made, which is as large.
        message.content.clear()
        reply = train_window(worker, request, _state_file(request, context))
        bundles = request.bundles
        del request
        return Message(reply.to_content(bundles=bundles), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        request = Request.from_content(message.content)
        worker = build(request.config, context)
        reply = evaluate_average(worker, request, _state_file(request, context))
        return Message(reply.to_content(), reply_to=message)

    @app.query(ARE_YOU_THERE.partition(".")[2])
    def there(message: Message, context: Context) -> Message:  # noqa: ARG001
        return Message(RecordDict(), reply_to=message)

    @app.query(GOODBYE.partition(".")[2])
    def goodbye(message: Message, context: Context) -> Message:
        _state_file(Request.from_content(message.content), context).delete()
        return Message(RecordDict(), reply_to=message)

    return app


def train_window(worker: Worker, request: Request, file: StateFile) -> Reply:
    """Run the local steps of one window and return exactly the due streams.

    The state is written before the reply is returned. Asked again for a window it has been
    through, a client goes through it again, from what it held before. A client that lacks a stream
    which was not sent says so, and the server sends it. One whose state file is damaged is as good
    as new.

    Where gradients are due, that of the next batch is returned, and nothing is kept.
    """
    window = _gradients if request.due == {GRADIENTS} else _train_window
    return _or_anew(file, lambda: window(worker, request, file))


def _train_window(worker: Worker, request: Request, file: StateFile) -> Reply:
    began = time.perf_counter()
    held = file.held_at(request.start)
    came = _received(worker, request, file, held)
    begin = _streams(worker, request, file, held, came)
    if begin is None:
        return _LOST
    worker.put(begin, due=request.due - request.formats.keys())
    origin = _origin(request)
    if request.start > origin and needs_seed(worker.optimizer, begin):
        worker.seed(request.start)
    steps = worker.steps(request.start, request.stop, origin)
    streams = worker.take(request.versions)
    metrics = {
        **trained(worker, steps, begin[PARAMS], streams[PARAMS]),
        "start-step": request.start,
        "stop-step": request.stop,
        "seconds": time.perf_counter() - began,
    }
    if held is None:
        metrics[STATE_NEW] = 1  # it may have had one, and what was never averaged is gone with it
    # Not written, or a stream that is never due would keep it for ever: what was held is kept.
    require_finite(streams)
    due, beside = outgoing(request, held, file, came, streams)
    kept = {name: stream for name, stream in streams.items() if name not in request.due}
    now = Held(
        step=request.stop,
        versions=request.versions,
        streams=list(kept),
        beside=list(beside),
        attempt=request.attempt,
        checkpoint=request.checkpoint,
    )
    file.write(now, {**kept, **beside})
    return Reply(metrics=metrics, streams=due)


def _gradients(worker: Worker, request: Request, file: StateFile) -> Reply:
    began = time.perf_counter()
    held = file.held()
    params = request.streams.get(PARAMS)
    if params is None:
        if held is None or not _holds(held, PARAMS, request):
            return _LOST
        params = file.read([PARAMS])[PARAMS]
    if not worker.optimizer.state:
        prime(worker.optimizer)
    worker.put({PARAMS: params})
    grads, steps = worker.gradient(request.start)
    require_finite({GRADIENTS: grads})
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
    return Reply(metrics=metrics, streams={GRADIENTS: grads})


def evaluate_average(worker: Worker, request: Request, file: StateFile) -> Reply:
    """Evaluate the parameters that were sent on the client's held-out data.

    They are kept, so that the next window need not bring them again. A client that was sent a
    difference to what it lacks says so, and the server sends them whole.
    """
    streams = _or_anew(file, lambda: _keep(worker, request, file))
    if streams.keys() != request.streams.keys():
        return _LOST
    if worker.evaluate is None:
        return Reply(metrics={"num-examples": 0})
    worker.put(streams)
    return evaluated(worker)


def evaluated(worker: Worker) -> Reply:
    """Return what the model, as it is, scores on the client's held-out data, if it has any."""
    if worker.evaluate is None:
        return Reply(metrics={"num-examples": 0})
    totals = worker.evaluate()
    return Reply(
        metrics={
            "num-examples": worker.num_examples,
            **worker.metrics(totals),
            **{f"{TOTALS}{name}": value for name, value in totals.items()},
        }
    )


def client_name(context: Context) -> str:
    """Return the name that outlives restarts: the partition's, or the one the site gave."""
    node = context.node_config
    if "partition-id" in node:
        return f"client-{node['partition-id']}"
    return str(node.get("name", f"node-{context.node_id}"))


def _received(
    worker: Worker, request: Request, file: StateFile, held: Held | None
) -> dict[str, Stream]:
    if not worker.optimizer.state:
        prime(worker.optimizer)
    known = stream_names(worker.module, worker.optimizer)
    names = [name for name in request.streams if name in request.formats and name in known]
    return received(request, held, file, worker.like(names))


def _streams(
    worker: Worker,
    request: Request,
    file: StateFile,
    held: Held | None,
    came: Mapping[str, Stream],
) -> dict[str, Stream] | None:
    """Return every stream as this window begins with it, or None if one is neither held nor sent.

    What a client holds of the right version it keeps, steps taken since included: that is its
    work, and it is merged at the stream's next sync.
    """
    names = stream_names(worker.module, worker.optimizer)
    if set(names) != set(request.versions):
        raise ValueError(
            f"the server averages the streams {sorted(request.versions)}, but this client's "
            f"{type(worker.optimizer).__name__} has {sorted(names)}"
        )
    kept = [n for n in names if held is not None and _holds(held, n, request)]
    streams: dict[str, Stream] = {}
    if kept:
        streams.update(file.read(kept))
    for name in names:
        if name in streams:
            continue
        if name in came:
            streams[name] = came[name]
        elif name in request.resets or (request.versions[name] == 0 and starts_at_zero(name)):
            like = worker.like([name])[name]
            # A single zero each, as long as it is only read.
            streams[name] = {k: t.new_zeros(()).expand_as(t) for k, t in like.items()}
        else:
            return None
    return streams


def _origin(request: Request) -> int:
    """Return the step at which the optimizer began anew: its counts start there."""
    return max((request.versions[name] for name in request.resets), default=0)


def _holds(held: Held, name: str, request: Request) -> bool:
    return name in held.streams and held.versions[name] == request.versions[name]


def _keep(worker: Worker, request: Request, file: StateFile) -> dict[str, Stream]:
    """Keep the streams that were sent, and return them."""
    held = file.held()
    came = _received(worker, request, file, held)
    newer = {
        name: stream
        for name, stream in came.items()
        if held is None or not _holds(held, name, request)
    }
    if not newer:
        return came
    old = file.read(set(held.streams) - newer.keys()) if held else {}
    beside = kept_beside(request, held, file, came)
    # The format of the file takes no tensor twice.
    newer = {name: {k: t.clone() for k, t in stream.items()} for name, stream in newer.items()}
    versions = {**(held.versions if held else {}), **{n: request.versions[n] for n in newer}}
    now = Held(
        step=held.step if held else 0,
        versions=versions,
        streams=[*old, *newer],
        beside=list(beside),
        attempt=request.attempt,
        checkpoint=request.checkpoint,
    )
    file.write(now, {**old, **newer, **beside})
    return came


def _or_anew(file: StateFile, act: Callable[[], T]) -> T:
    """Return what ``act`` does with the file; if the file is damaged, what it does without."""
    try:
        return act()
    except DamagedFileError as error:
        log(WARNING, "%s; this client starts as a new one", error)
        file.delete()
        return act()


def _state_file(request: Request, context: Context) -> StateFile:
    for what, name in (("run", request.run_key), ("client", client_name(context))):
        # Both name files here, and the first comes from outside.
        if not is_name(name):
            raise ValueError(
                f"{what} name {name!r} may hold letters, digits, '_', '-' and '.' only"
            )
    return StateFile(state_folder(context), request.run_key, client_name(context))


def state_folder(context: Context) -> Path:
    """Return where the clients of a node keep their state."""
    home = os.environ.get("FLWR_HOME", Path.home() / ".flwr")
    default = os.environ.get(STATE_DIR, Path(home) / "desloc")
    return Path(str(context.node_config.get("state-dir", default))).expanduser()


def _require_same_code(request: Request) -> None:
    theirs = request.config.get("code", "")
    if theirs and theirs != fingerprint():
        raise RuntimeError(
            f"this client runs other code ({Path(__file__).parents[1]}) than the server: the "
            "SuperLink or SuperNode was started in a folder that holds a copy of the app; "
            "restart it from an empty folder"
        )


def trained(worker: Worker, steps: StepMetrics, before: Stream, after: Stream) -> Metrics:
    """Return what local steps measured, from the parameters ``before`` to those ``after``."""
    norm, way = norms(after, before)
    return {
        "num-examples": worker.num_examples,
        "train-loss": sum(steps.losses) / len(steps.losses),
        "losses": steps.losses,
        "grad-norms": steps.grad_norms,
        "learning-rates": steps.learning_rates,
        "update-norm": way,
        "param-norm": norm,
    }


def require_finite(streams: Mapping[str, Stream]) -> None:
    """Raise ``FloatingPointError`` for what only a diverged training gives."""
    try:
        for name, stream in streams.items():
            check_finite(name, stream)
    except ValueError as error:
        raise FloatingPointError(f"training diverged: {error}; lower optimizer.lr") from error
