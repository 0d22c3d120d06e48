"""A client's side of compressed streams: what it decodes, encodes, and keeps for the next window.

The state file then also holds ``reference.params``, the parameters that all clients have and that
differences are taken to, and ``residual.NAME``, the quantisation error of a stream with a sign.
"""

from collections.abc import Mapping

from flower_desloc.core.compression import decode_stream, encode_stream
from flower_desloc.core.schedule import PARAMS
from flower_desloc.core.types import Stream
from flower_desloc.flower.client_state import Held, StateFiles
from flower_desloc.flower.messages import WindowRequest

_REFERENCE, _RESIDUAL = "reference.", "residual."


def decoded(
    request: WindowRequest, held: Held | None, files: StateFiles, like: Mapping[str, Stream]
) -> dict[str, Stream]:
    """Return the streams that were sent; ``like`` gives the shapes and types of compressed ones.

    A difference to parameters that this client does not hold is left out.
    """
    streams: dict[str, Stream] = {}
    for name, stream in request.streams.items():
        if name not in request.formats or (name == PARAMS and name not in request.differences):
            streams[name] = stream
            continue
        reference = None
        if name in request.differences:
            kept = f"{_REFERENCE}{name}"
            if held is None or kept not in held.coding or held.versions.get(name) != request.former:
                continue
            reference = files.read([kept])[kept]
        format_ = request.formats[name]
        streams[name] = decode_stream(
            name, stream, format_, like[name], kind=request.kinds[name], reference=reference
        )
    return streams


def encoded(
    request: WindowRequest, kept: Mapping[str, Stream], streams: Mapping[str, Stream]
) -> tuple[dict[str, Stream], dict[str, Stream]]:
    """Return the due streams as they are sent, and what to keep for the next window.

    ``kept`` is what ``kept_for_coding`` returned.
    """
    due, kept = {}, dict(kept)
    for name in request.due:
        if name not in request.formats:
            due[name] = streams[name]
            continue
        sent = encode_stream(
            request.kinds[name],
            streams[name],
            request.formats[name],
            reference=kept.get(f"{_REFERENCE}{name}"),
            residual=kept.get(f"{_RESIDUAL}{name}"),
        )
        due[name] = sent.coded
        if sent.residual:
            kept[f"{_RESIDUAL}{name}"] = sent.residual
    return due, kept


def kept_for_coding(
    request: WindowRequest, held: Held | None, files: StateFiles, received: Mapping[str, Stream]
) -> dict[str, Stream]:
    """Return the references and residuals to keep, once ``received`` has been decoded."""
    new: dict[str, Stream] = {}
    if PARAMS in request.formats and PARAMS in received:
        new[f"{_REFERENCE}{PARAMS}"] = received[PARAMS]
    old = [name for name in held.coding if name not in new] if held else []
    return {**files.read(old), **new}
