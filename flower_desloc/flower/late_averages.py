"""The state of a client whose averages come late (``sync_delay``).

It has sent the streams in ``ClientState.late`` and goes on from them; their averages, which arrive
with the next message, are merged during the next window. A client that has missed windows starts
from the averages instead.
"""

from collections import ChainMap
from dataclasses import replace

from flower_desloc.core.types import Streams
from flower_desloc.flower.client_state import ClientState
from flower_desloc.flower.messages import WindowRequest


def at_request(state: ClientState, request: WindowRequest) -> ClientState:
    """Return ``state`` with the streams from which the client goes on at a request.

    Those in ``late`` are its own, as if they were the averages of what it sent; of the others, an
    average that has arrived takes the place of what was sent.
    """
    late = [
        name
        for name in state.late
        if state.step == request.start and request.versions.get(name) == request.start
    ]
    arrived = state.late_averages
    missed = {name: arrived[name] for name in arrived if name not in late}
    return replace(
        state,
        versions={**state.versions, **{name: request.versions[name] for name in late}},
        steps_since_average={**state.steps_since_average, **dict.fromkeys(late, 0)},
        streams=ChainMap(missed, state.streams),  # type: ignore[arg-type]
        late=late,
        late_averages={name: arrived[name] for name in arrived if name in late},
    )


def arrived(state: ClientState, received: Streams) -> Streams | None:
    """Return the averages of the streams in ``late``; None if one was not sent."""
    averages = {**state.late_averages, **{n: received[n] for n in state.late if n in received}}
    return averages if averages.keys() == set(state.late) else None


def with_arrived(after: ClientState, before: ClientState, received: Streams) -> ClientState:
    """Return the state ``after`` averages were ``received``, with those that are late set apart.

    ``before`` is the result of ``at_request``.
    """
    own = {name: before.streams[name] for name in before.late}
    new = {name: received[name] for name in before.late if name in received}
    return replace(
        after,
        streams={**after.streams, **own},
        late=before.late,
        late_averages={**before.late_averages, **new},
    )
