"""What a client begins a window with: the streams that it kept and those that it was sent."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from logging import WARNING
from typing import Any, TypeVar

from flower_desloc.core.schedule import PARAMS
from flower_desloc.core.streams import starts_at_zero, zeros_like
from flower_desloc.core.types import Stream, Streams
from flower_desloc.core.worker import Worker
from flower_desloc.flower import late_averages
from flower_desloc.flower.client_state import ClientState, StateFiles
from flower_desloc.flower.compression import decoded, references
from flower_desloc.flower.internals import log
from flower_desloc.flower.messages import WindowRequest
from flower_desloc.flower.tensor_file import DamagedFileError
from flower_desloc.optim.bounds import WidestRatios

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class WindowStart:
    """A client at the start of a window."""

    streams: Streams
    """Every stream of its optimizer."""
    averaged: Collection[str]
    """Those of ``streams`` that the client was sent; not those that it had already."""
    is_new: bool
    """Whether the client has taken no step yet, or has lost what it had; since then it may have
    been evaluated."""
    never_averaged: Collection[str]
    """Those of ``streams`` that are zero because there is no average of them."""
    late_averages: Streams
    """Averages of streams that this client sent at the start of the window and goes on from."""
    steps_since_average: Mapping[str, int]
    """Of every stream, the local steps that the client has taken since its average."""
    references: Streams
    residuals: Streams
    """What compression keeps (``flower_desloc.flower.compression``)."""
    ratios: WidestRatios
    """By which first moments are bounded."""
    loop_state: Mapping[str, Any]
    """What a training loop of the user's own has kept."""


def window_start(worker: Worker, request: WindowRequest, files: StateFiles) -> WindowStart | None:
    """Load the client's state and receive what was sent; None if a stream is neither here nor sent.

    A stream kept in the right version is used as it is, with the local steps taken since: they are
    averaged at the stream's next sync.

    Raises ``ValueError`` if the server averages other streams than the optimizer has.
    """
    state = files.at(request.start)
    if request.afresh:
        state = None
    names = worker.stream_names()
    if set(names) != set(request.versions):
        raise ValueError(
            f"the server averages the streams {sorted(request.versions)}, but this client, "
            f"with {type(worker.optimizer).__name__}, has {sorted(names)}"
        )
    received = _received(request, state, worker)
    averages: Streams | None = {}
    if state and state.late:
        state = late_averages.at_request(state, request)
        averages = late_averages.arrived(state, received)
    if averages is None:
        return None
    streams: dict[str, Stream] = {}
    averaged: list[str] = []
    never_averaged: list[str] = []
    for name in names:
        if state and state.has(name, request.versions[name]):
            streams[name] = state.streams[name]
        elif name in received:
            streams[name] = received[name]
            averaged.append(name)
        elif name in request.resets or (request.versions[name] == 0 and starts_at_zero(name)):
            streams[name] = zeros_like(worker.templates([name])[name])
            never_averaged += [] if name in request.resets else [name]
        else:
            return None
    states = {name for name in names if starts_at_zero(name)}
    counts = state.steps_since_average if state else {}
    return WindowStart(
        streams=streams,
        averaged=averaged,
        is_new=state is None or not state.versions.keys() >= states,
        never_averaged=never_averaged,
        late_averages=averages,
        steps_since_average={
            name: counts.get(name, 0) if state and state.has(name, version) else 0
            for name, version in request.versions.items()
        },
        references=references(request, state, received) if request.compression else {},
        residuals=dict(state.residuals) if state and request.compression else {},
        ratios=WidestRatios(worker.optimizer, state.ratios if state else None),
        loop_state=state.loop_state if state else {},
    )


def _received(request: WindowRequest, state: ClientState | None, worker: Worker) -> Streams:
    """Return the streams that were sent; uncompressed ones are as they arrived."""
    return decoded(request, state, worker) if request.compression else request.streams


def params_to_use(worker: Worker, request: WindowRequest, files: StateFiles) -> Stream | None:
    """Return the parameters that were sent, or else those that the client kept; None: neither."""
    # The file is read only where it is needed: under data parallelism that would be in every step.
    state = None if PARAMS in request.streams else files.last()
    if state and state.has(PARAMS, request.versions[PARAMS]):
        return state.streams[PARAMS]
    return _received(request, state, worker).get(PARAMS)


def save_received(worker: Worker, request: WindowRequest, files: StateFiles) -> Streams:
    """Add the averages that were sent to the client's state, if any is new to it; return them.

    A difference to parameters that the client does not have is not among them.
    """
    state = files.last()
    received = _received(request, state, worker)
    newer = {
        name: stream
        for name, stream in received.items()
        if not (state and state.has(name, request.versions[name]))
    }
    if not newer:
        return received
    before = state or ClientState(step=request.start, versions={}, streams={})
    own = late_averages.at_request(before, request) if before.late else before
    kept = [name for name in own.streams if own.has(name, request.versions.get(name))]
    # safetensors refuses a tensor that is also among the references.
    copies = {n: {k: t.clone() for k, t in stream.items()} for n, stream in newer.items()}
    after = replace(
        before,
        step=request.start,
        versions={**before.versions, **{name: request.versions[name] for name in newer}},
        steps_since_average={**before.steps_since_average, **dict.fromkeys(newer, 0)},
        streams={**{name: own.streams[name] for name in kept}, **copies},
        references=references(request, state, received) if request.compression else {},
        residuals=before.residuals if request.compression else {},
        attempt=request.attempt,
        checkpoint=request.checkpoint,
    )
    if before.late:
        after = late_averages.with_arrived(after, own, copies)
    files.write(after, for_resume=request.for_resume)
    return received


def new_if_damaged(files: StateFiles, use: Callable[[], T]) -> T:
    """Return ``use()``; if the state file is damaged, delete it and try again."""
    try:
        return use()
    except DamagedFileError as error:
        log(WARNING, "%s; this client starts as a new one", error)
        files.delete()
        return use()
