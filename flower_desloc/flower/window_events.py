"""What happens to a client's streams between its local steps: a list of steps and actions.

A window has no event unless a client joins at a later step, a moment was averaged and is bounded,
or an average comes late.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from logging import INFO

from torch import Tensor

from flower_desloc.core.late import merged
from flower_desloc.core.newcomer import needs_seed
from flower_desloc.core.schedule import BUFFERS, PARAMS
from flower_desloc.core.streams import starts_at_zero, zeros_like
from flower_desloc.core.types import Streams
from flower_desloc.core.worker import Worker
from flower_desloc.flower.internals import log
from flower_desloc.flower.messages import WindowRequest
from flower_desloc.flower.window_start import WindowStart
from flower_desloc.optim.bounds import FIRST, SECOND, bounded, moment_ratio, suits_newcomers
from flower_desloc.optim.decays import state_decays

Event = tuple[int, Callable[[], None]]
"""An action, and after how many completed steps it is carried out."""

Seed = Callable[[Collection[str], int, Callable[[], None]], None]
"""Seeds the named states from the gradient of the batch after so many steps, then calls an action
(``flower_desloc.core.newcomer``)."""


def window_events(
    worker: Worker, request: WindowRequest, start: WindowStart, seed: Seed
) -> Iterator[Event]:
    """Yield the events of a window, in order."""
    begin, resets = request.start, [request.versions[name] for name in request.resets]
    if start.is_new and begin > max(resets, default=0):
        yield begin, partial(_join, worker, request, start, seed)
    elif request.bound and {FIRST, SECOND} & {*start.averaged}:
        yield begin, partial(_bound, worker, start.streams)
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

    moments_were_averaged = {FIRST, SECOND} & {*start.averaged}

    def bound_by_seed() -> None:
        if moments_were_averaged:
            _bound(worker, {**streams, **worker.take(names)})

    if names := needs_seed(worker.optimizer, streams):
        seed(names, request.start, bound_by_seed)
    elif moments_were_averaged:
        _bound(worker, streams)


def _bound(worker: Worker, streams: Streams) -> None:
    """Bound Adam's first moment by the second, in the worker."""
    if first := _bounded(worker, streams):
        worker.put(first)


def _bounded(worker: Worker, streams: Streams) -> dict[str, dict[str, Tensor]]:
    """Return the first moment of ``streams``, bounded; nothing without a bound."""
    ratio = moment_ratio(worker.optimizer)
    return {} if ratio is None else {FIRST: bounded(streams[FIRST], streams[SECOND], ratio)}


def _merge(worker: Worker, request: WindowRequest, start: WindowStart) -> None:
    """Merge averages of what the client sent at the start of the window."""
    averages = start.late_averages
    decays = stream_decays(worker, averages)
    streams = {
        name: merged(
            name,
            now,
            start.streams[name],
            averages[name],
            decay=decays[name],
            steps=request.before_merge,
        )
        for name, now in worker.take(averages).items()
    }
    if request.bound and {FIRST, SECOND} & averages.keys():
        streams |= _bounded(worker, {**worker.take(request.versions), **streams})
    worker.put(streams)


def stream_decays(worker: Worker, names: Iterable[str]) -> dict[str, float]:
    """Return what a step multiplies each stream by; 0 for buffers, which layers replace."""
    states = [name for name in names if name not in (PARAMS, BUFFERS)]
    return {PARAMS: 1.0, BUFFERS: 0.0, **state_decays(worker.optimizer, states)}
