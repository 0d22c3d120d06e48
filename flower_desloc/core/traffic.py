"""The bytes each method must send, counted from sizes and periods.

All counts are for one worker and one direction: what it sends up to be averaged. That is the
paper's measure (section 4.1, "per-worker asymptotic communication cost"), and its ratios follow:
Local Adam sends every stream every K_x steps, data parallelism sends a gradient every step.
"""

from collections.abc import Mapping

from flower_desloc.core.averaging import Stream
from flower_desloc.core.schedule import GRADIENTS, PARAMS, SyncSchedule


def stream_bytes(streams: Mapping[str, Stream]) -> dict[str, int]:
    """Return the payload of each stream in bytes."""
    return {
        name: sum(t.numel() * t.element_size() for t in stream.values())
        for name, stream in streams.items()
    }


def desloc_bytes(
    schedule: SyncSchedule, sizes: Mapping[str, int], num_steps: int
) -> dict[str, int]:
    """Return the bytes of each stream that one worker sends in ``num_steps`` steps."""
    events = schedule.num_events(num_steps)
    return {stream: events[stream] * sizes[stream] for stream in schedule.periods}


def local_adam_bytes(
    schedule: SyncSchedule, sizes: Mapping[str, int], num_steps: int
) -> dict[str, int]:
    """Return the same for Local Adam (or Local ADOPT, SGDM): all streams on the clock of K_x."""
    if GRADIENTS in schedule.periods:
        return dict.fromkeys(schedule.periods, 0)  # data parallelism has no such counterpart
    # Counted from the clock of params itself: with coins, one coin decides for all.
    due = sum(PARAMS in schedule.due(step) for step in range(1, num_steps + 1))
    events = dict.fromkeys(schedule.periods, due) | {
        PARAMS: schedule.num_events(num_steps)[PARAMS]  # and once more at the end
    }
    return {stream: events[stream] * sizes[stream] for stream in schedule.periods}


def ddp_bytes(sizes: Mapping[str, int], num_steps: int) -> int:
    """Return the same for data parallelism: one gradient of the size of ``params`` a step."""
    return num_steps * sizes[PARAMS]
