"""A client's side of compressed streams: what it decodes and encodes.

Between windows it keeps ``ClientState.references``, the parameters that all clients have and that
differences are taken to, and ``ClientState.residuals``, the quantisation errors.
"""

from collections.abc import Mapping

from flower_desloc.core.compression import decode_stream, encode_stream
from flower_desloc.core.schedule import PARAMS
from flower_desloc.core.types import Stream, Streams
from flower_desloc.core.worker import Worker
from flower_desloc.flower.client_state import ClientState
from flower_desloc.flower.messages import WindowRequest


def decoded(request: WindowRequest, state: ClientState | None, worker: Worker) -> Streams:
    """Return the streams that were sent.

    A difference to parameters that this client does not have is left out.
    """
    coded = request.compression.keys() & set(worker.stream_names())
    templates = worker.templates([name for name in request.streams if name in coded])
    streams: dict[str, Stream] = {}
    for name, stream in request.streams.items():
        if name not in request.compression or (name == PARAMS and name not in request.differences):
            streams[name] = stream
            continue
        reference = None
        if name in request.differences:
            if state is None or state.versions.get(name) != request.previous_version:
                continue
            if (reference := state.references.get(name)) is None:
                continue
        format_ = request.compression[name]
        streams[name] = decode_stream(
            name, stream, format_, templates[name], kind=request.kinds[name], reference=reference
        )
    return streams


def references(
    request: WindowRequest, state: ClientState | None, received: Streams
) -> dict[str, Stream]:
    """Return the parameters that differences are taken to, from now on; none without a format."""
    if PARAMS not in request.compression:
        return {}
    if PARAMS in received:
        return {PARAMS: received[PARAMS]}
    return dict(state.references) if state else {}


def encoded(
    request: WindowRequest, streams: Streams, references: Streams, residuals: Mapping[str, Stream]
) -> tuple[dict[str, Stream], dict[str, Stream]]:
    """Return the due streams as they are sent, and the residuals to keep."""
    due: dict[str, Stream] = {}
    kept: dict[str, Stream] = {**residuals}
    for name in request.due:
        if name not in request.compression:
            due[name] = streams[name]
            continue
        sent = encode_stream(
            request.kinds[name],
            streams[name],
            request.compression[name],
            reference=references.get(name),
            residual=residuals.get(name),
        )
        due[name] = sent.coded
        if sent.residual:
            kept[name] = sent.residual
    return due, kept
