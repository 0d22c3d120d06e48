"""What happens to a client's streams between its local steps: a list of steps and actions.

A window has no event unless a client joins at a later step, a moment was averaged and is bounded,
an average comes late, or an optimizer has a method ``begin_window``.
"""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from logging import INFO

from torch import Tensor

from flower_desloc.core.kinds import kind_of
from flower_desloc.core.late import merged
from flower_desloc.core.multi import parts_of
from flower_desloc.core.schedule import BUFFERS, PARAMS
from flower_desloc.core.states import kinds_of, needs_seed, state_decays
from flower_desloc.core.streams import group_of, starts_at_zero, zeros_like
from flower_desloc.core.types import Stream, Streams
from flower_desloc.core.worker import Worker
from flower_desloc.flower.internals import log
from flower_desloc.flower.messages import WindowRequest
from flower_desloc.flower.window_start import WindowStart
from flower_desloc.optim.bounds import bounded, unsuited

Event = tuple[int, Callable[[], None]]
"""An action, and after how many completed steps it is carried out."""

_NO_STATES = {PARAMS: 1.0, BUFFERS: 0.0}
"""What a step multiplies streams by that are no optimizer states; layers replace buffers."""

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
    elif request.sync_bound and any(map(starts_at_zero, start.averaged)):
        yield begin, partial(_bound, worker, start, start.streams)
    for part in parts_of(worker.optimizer):
        if begin_window := getattr(part, "begin_window", None):
            yield begin, partial(begin_window, begin)
    if start.late_averages:
        yield begin + request.before_merge, partial(_merge, worker, request, start)


def _join(worker: Worker, request: WindowRequest, start: WindowStart, seed: Seed) -> None:
    """Begin at a later step than the others, without states of one's own.

    Where a second moment was never averaged, it is seeded with the first gradient, and the first
    moment is bounded by it, whatever the run's settings. Where this optimizer's moments are not
    known or have no bound, all states of those parameters are then zero.
    """
    streams = dict(start.streams)
    lacking = {key for name in start.never_averaged for key in streams[name]}
    afresh = unsuited(worker.module, worker.optimizer) & lacking if lacking else set()
    if afresh:
        states = {name: stream for name, stream in streams.items() if starts_at_zero(name)}
        zeros = {name: _mixed(zeros_like(s), s, afresh) for name, s in states.items()}
        streams |= zeros
        worker.put(zeros)
        log(
            INFO,
            "%s was never averaged, so this client starts with states of zero",
            ", ".join(start.never_averaged),
        )

    if seeded := needs_seed(worker.module, worker.optimizer, streams, afresh):

        def bound() -> None:
            taken = worker.take(seeded)
            seeds = {name: _mixed(taken[name], streams[name], seeded[name]) for name in seeded}
            worker.put(seeds)  # the optimizer has seeded all tensors of these states
            _bound(worker, start, {**streams, **seeds})

        seed(list(seeded), request.start, bound)
    else:
        _bound(worker, start, streams)


def _mixed(some: Stream, others: Stream, keys: Collection[str]) -> dict[str, Tensor]:
    """Return ``others`` with the tensors named in ``keys`` from ``some``."""
    return {key: some[key] if key in keys else tensor for key, tensor in others.items()}


def _bound(worker: Worker, start: WindowStart, streams: Streams) -> None:
    """Bound first moments by the second ones, after an average of either."""
    start.ratios.widen()
    ratios = start.ratios.now
    if within := bounded(worker.module, worker.optimizer, streams, start.averaged, ratios):
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
            decays=decays[name],
            steps=request.before_merge,
        )
        for name, now in worker.take(averages).items()
    }
    if request.sync_bound:
        after = {**worker.take(request.versions), **streams}
        start.ratios.widen()
        ratios = start.ratios.now
        streams |= bounded(worker.module, worker.optimizer, after, averages, ratios)
    worker.put(streams)


def stream_decays(worker: Worker, names: Collection[str]) -> dict[str, dict[str, float]]:
    """Return by stream and tensor what a step multiplies it by."""
    states = [name for name in names if name not in _NO_STATES]
    decays = state_decays(worker.optimizer, states)
    groups = group_of(worker.module, worker.optimizer)
    return {
        name: dict.fromkeys(stream, _NO_STATES[name])
        if name in _NO_STATES
        else {key: decays[name][groups[key]] for key in stream}
        for name, stream in worker.templates(names).items()
    }
