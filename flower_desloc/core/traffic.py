"""The bytes each method must send, counted from sizes and periods.

The paper's measure is what one worker sends up to be averaged (section 4.1, "per-worker asymptotic
communication cost"): DES-LOC sends each stream once per period, Local Adam every stream every K_x
steps, data parallelism a gradient every step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from flower_desloc.core.averaging import Stream
from flower_desloc.core.schedule import GRADIENTS, PARAMS, SyncSchedule


def stream_bytes(streams: Mapping[str, Stream]) -> dict[str, int]:
    """Return the payload of each stream in bytes."""
    return {
        name: sum(t.numel() * t.element_size() for t in stream.values())
        for name, stream in streams.items()
    }


@dataclass
class Uploads:
    """Bytes sent up by all workers together, counted window by window.

    A run that was cut off, or that workers joined or left, is compared with what the other methods
    would have sent in the same windows with the same workers.
    """

    schedule: SyncSchedule
    sizes: Mapping[str, int]
    """Bytes of each stream, uncompressed."""
    wire: Mapping[str, int]
    """Bytes of each stream as this run sends it."""
    num_steps: int
    """Steps of the whole run; its end is an event for ``params``."""
    desloc: dict[str, int] = field(init=False)
    local_adam: dict[str, int] = field(init=False)
    """The same with all streams on the clock of ``params``; 0 for data parallelism."""
    ddp: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.desloc = dict.fromkeys(self.schedule.periods, 0)
        self.local_adam = dict.fromkeys(self.schedule.periods, 0)

    def add(self, start: int, stop: int, workers: int = 1) -> None:
        """Count the window of the steps ``start + 1 .. stop``."""
        due = self.schedule.due(stop)
        at_end = self.schedule.periods.keys() & {PARAMS} if stop == self.num_steps else set()
        for stream in due | at_end:
            self.desloc[stream] += workers * self.wire.get(stream, 0)
        # With coins, the coin of params decides for all streams of Local Adam.
        for stream in self.schedule.periods if PARAMS in due else at_end:
            self.local_adam[stream] += workers * self.sizes.get(stream, 0)
        self.ddp += workers * (stop - start) * self.sizes.get(PARAMS, 0)


def uploads(schedule: SyncSchedule, sizes: Mapping[str, int], num_steps: int) -> Uploads:
    """Return what one worker sends in ``num_steps`` steps."""
    total = Uploads(schedule, sizes, sizes, num_steps)
    for window in schedule.windows(num_steps):
        total.add(window.start, window.stop)
    return total


def desloc_bytes(
    schedule: SyncSchedule, sizes: Mapping[str, int], num_steps: int
) -> dict[str, int]:
    """Return the bytes of each stream that one worker sends in ``num_steps`` steps."""
    return uploads(schedule, sizes, num_steps).desloc


def local_adam_bytes(
    schedule: SyncSchedule, sizes: Mapping[str, int], num_steps: int
) -> dict[str, int]:
    """Return the same for Local Adam (or Local ADOPT, SGDM): all streams on the clock of K_x."""
    return uploads(schedule, sizes, num_steps).local_adam


def ddp_bytes(sizes: Mapping[str, int], num_steps: int) -> int:
    """Return the same for data parallelism: one gradient of the size of ``params`` a step."""
    return num_steps * sizes[PARAMS]


def download_bytes(
    schedule: SyncSchedule,
    sizes: Mapping[str, int],
    wire: Mapping[str, int],
    num_steps: int,
    *,
    federated: bool,
) -> dict[str, int]:
    """Return the bytes of each stream that one client receives in ``num_steps`` steps.

    The client takes part in every window, so it receives

    - x_0 at the start, uncompressed; the states are zero there and are not sent;
    - every average, with the next message after it; so none of those at the end of training;
    - with ``federated`` evaluation, ``params`` at the end, to evaluate the final model.
    """
    down = dict.fromkeys(sizes, 0)
    down[PARAMS] = sizes[PARAMS]
    for window in schedule.windows(num_steps):
        if window.stop < num_steps:
            for stream in window.due:
                # The result of a mean gradient is sent as new parameters.
                sent = PARAMS if stream == GRADIENTS else stream
                down[sent] += wire[sent]
    if federated and num_steps > 0:
        down[PARAMS] += wire[PARAMS]
    return down
