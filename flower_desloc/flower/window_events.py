"""What happens to a client's streams between its local steps: a list of steps and actions.

A window has no event unless a client joins at a later step, a moment was averaged and is bounded,
or an average comes late.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from logging import INFO

from flower_desloc.core.kinds import kind_of
from flower_desloc.core.late import merged
from flower_desloc.core.schedule import BUFFERS, PARAMS
from flower_desloc.core.states import kinds_of, needs_seed, state_decays
from flower_desloc.core.streams import starts_at_zero, zeros_like
from flower_desloc.core.types import Streams
from flower_desloc.core.worker import Worker
from flower_desloc.flower.internals import log
from flower_desloc.flower.messages import WindowRequest
from flower_desloc.flower.window_start import WindowStart
from flower_desloc.optim.bounds import bounded, suits_newcomers

Event = tuple[int, Callable[[], None]]
"""An action, and after how many completed steps it is carried out."""

Seed = Callable[[Collection[str], int, Callable[[], None]], None]
"""Seeds the named states from the gradient of the batch after so many steps, then calls an action
(``flower_desloc.core.states``)."""


def window_events(
    worker: Worker, request: WindowRequest, start: WindowStart, seed: Seed
) -> Iterator[Event]:
    """Yield the events of a window, in order."""
    begin, resets = request.start, [request.versions[name] for name in request.resets]
    if start.is_new and begin > max(resets, default=0):
        yield begin, partial(_join, worker, request, start, seed)
    elif request.bound and any(map(starts_at_zero, start.averaged)):
        yield begin, partial(_bound, worker, start.streams, start.averaged)
    if start.late_averages:
        yield begin + request.before_merge, partial(_merge, worker, request, start)


def _join(worker: Worker, request: WindowRequest, start: WindowStart, seed: Seed) -> None:
    """Begin at a later step than the others, without states of one's own.

    Where a second moment was never averaged, it is seeded with the first gradient, and the first
    moment is bounded by it, whatever the run's settings. Where this optimizer's moments are not
    known, all its states are then zero.
    """
    streams = dict(start.streams)
    if start.never_averaged and not suits_newcomers(worker.optimizer):
        zeros = {name: zeros_like(s) for name, s in streams.items() if starts_at_zero(name)}
        streams |= zeros
        worker.put(zeros)
        log(
            INFO,
            "%s was never averaged, so this client starts with states of zero",
            ", ".join(start.never_averaged),
        )

    if names := needs_seed(worker.optimizer, streams):

        def bound() -> None:
            _bound(worker, {**streams, **worker.take(names)}, start.averaged)

        seed(names, request.start, bound)
    else:
        _bound(worker, streams, start.averaged)


def _bound(worker: Worker, streams: Streams, averaged: Collection[str]) -> None:
    """Bound first moments by the second ones, after an average of either."""
    if within := bounded(worker.optimizer, streams, averaged):
        worker.put(within)


def _merge(worker: Worker, request: WindowRequest, start: WindowStart) -> None:
    """Merge averages of what the client sent at the start of the window."""
    averages = start.late_averages
    decays, kinds = stream_decays(worker, averages), kinds_of(worker.optimizer)
    streams = {
        name: merged(
            kind_of(name, kinds),
            now,
            start.streams[name],
            averages[name],
            decay=decays[name],
            steps=request.before_merge,
        )
        for name, now in worker.take(averages).items()
    }
    if request.bound:
        after = {**worker.take(request.versions), **streams}
        streams |= bounded(worker.optimizer, after, averages)
    worker.put(streams)


def stream_decays(worker: Worker, names: Iterable[str]) -> dict[str, float]:
    """Return what a step multiplies each stream by; 0 for buffers, which layers replace."""
    states = [name for name in names if name not in (PARAMS, BUFFERS)]
    return {PARAMS: 1.0, BUFFERS: 0.0, **state_decays(worker.optimizer, states)}
