"""A client's end of the streams that travel coded: what it keeps beside them in its state file.

Of parameters what the others have too, which their difference is taken to, and of every stream with
a sign what its code has not said yet.
"""

from collections.abc import Mapping

from flower_desloc.core.averaging import Stream
from flower_desloc.core.compression import receive, send
from flower_desloc.core.schedule import PARAMS
from flower_desloc.flower.client_state import Held, StateFile
from flower_desloc.flower.records import Request

_REFERENCE, _RESIDUAL = "reference.", "residual."


def received(
    request: Request, held: Held | None, file: StateFile, like: Mapping[str, Stream]
) -> dict[str, Stream]:
    """Return the streams that were sent, without a difference to what this client does not hold.

    ``like`` gives shapes and types.
    """
    streams: dict[str, Stream] = {}
    for name, stream in request.streams.items():
        if name not in request.formats or (name == PARAMS and name not in request.differences):
            streams[name] = stream
            continue
        reference = None
        if name in request.differences:
            kept = f"{_REFERENCE}{name}"
            if held is None or kept not in held.beside or held.versions.get(name) != request.former:
                continue
            reference = file.read([kept])[kept]
        format_ = request.formats[name]
        streams[name] = receive(name, stream, format_, like[name], reference=reference)
    return streams


def outgoing(
    request: Request,
    held: Held | None,
    file: StateFile,
    came: Mapping[str, Stream],
    streams: Mapping[str, Stream],
) -> tuple[dict[str, Stream], dict[str, Stream]]:
    """Return the due streams as they travel, and what to keep beside ``streams``.

    ``came`` is what :func:`received` gave for this window.
    """
    due: dict[str, Stream] = {}
    kept = kept_beside(request, held, file, came)
    for name in request.due:
        if name not in request.formats:
            due[name] = streams[name]
            continue
        sent = send(
            name,
            streams[name],
            request.formats[name],
            reference=kept.get(f"{_REFERENCE}{name}"),
            residual=kept.get(f"{_RESIDUAL}{name}"),
        )
        due[name] = sent.coded
        if sent.residual:
            kept[f"{_RESIDUAL}{name}"] = sent.residual
    return due, kept


def kept_beside(
    request: Request, held: Held | None, file: StateFile, came: Mapping[str, Stream]
) -> dict[str, Stream]:
    """Return what is still to be kept once ``came`` has come."""
    new: dict[str, Stream] = {}
    if PARAMS in request.formats and PARAMS in came:
        new[f"{_REFERENCE}{PARAMS}"] = came[PARAMS]
    held_on = [n for n in held.beside if n not in new] if held else []
    return {**(file.read(held_on) if held_on else {}), **new}
