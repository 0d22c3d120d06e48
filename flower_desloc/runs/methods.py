"""What each method has sent up by a step: DES-LOC by the formula, Local Adam and DDP beside it.

:mod:`flower_desloc.core.traffic` counts a whole run of one worker. Here the same counts grow window by
window, for as many workers as took part in it, so that a run that is going on, one that failed,
and one that somebody left or joined are compared with what the others would have sent there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flower_desloc.runs.metrics import Line
from flower_desloc.core.schedule import PARAMS, SyncSchedule


@dataclass
class Uploads:
    """Bytes sent up since the start, by all workers together."""

    schedule: SyncSchedule
    sizes: Mapping[str, int]
    """Of each stream, in bytes; 0 where it is not known."""
    wire: Mapping[str, int]
    """The same as it travels in this run; that of the others is not coded."""
    num_steps: int
    """The whole run's; its end is an event for ``params``."""
    desloc: dict[str, int] = field(init=False)
    local_adam: dict[str, int] = field(init=False)
    ddp: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.desloc = dict.fromkeys(self.schedule.periods, 0)
        self.local_adam = dict.fromkeys(self.schedule.periods, 0)

    def add(self, start: int, stop: int, workers: int) -> None:
        """Count the window of the steps ``start + 1 .. stop``."""
        due = self.schedule.due(stop)
        at_end = self.schedule.periods.keys() & {PARAMS} if stop == self.num_steps else set()
        for stream in due | at_end:
            self.desloc[stream] += workers * self.wire.get(stream, 0)
        # Local Adam has one clock, that of params.
        together = self.schedule.periods if PARAMS in due else at_end
        for stream in together:
            self.local_adam[stream] += workers * self.sizes.get(stream, 0)
        self.ddp += workers * (stop - start) * self.sizes.get(PARAMS, 0)

    def add_lines(self, lines: Iterable[Line]) -> None:
        """Count the windows of ``metrics.jsonl``."""
        for line in lines:
            if line["round"] > 0:
                self.add(line["start"], line["step"], len(line["clients"]))
