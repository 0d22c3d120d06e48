"""Input of the theory for one run: model, periods, workers, and the links between them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from flower_desloc.app.plan.wall_clock import (
    Link,
    Topology,
    balance,
    communication_seconds,
    star_seconds,
)
from flower_desloc.core.kinds import Kind
from flower_desloc.core.schedule import PARAMS, Period, SyncSchedule
from flower_desloc.core.traffic import MethodRates, method_rates, window_bytes
from flower_desloc.optim.description import Family


@dataclass(frozen=True, kw_only=True)
class PlannedStream:
    """Size of a stream, and how it decays if it is a moment."""

    name: str
    kind: Kind
    num_bytes: float
    compressed_bytes: float | None = None
    """Bytes in a message; None if the stream is not compressed."""
    beta: float | None = None
    """Decay of a moment; None for a stream that is no moment."""
    ceiling: float | None = None
    """Bound on every coordinate of the moment; None if no bound is known."""
    own_ceiling: bool = False
    """Whether the optimizer itself gives that bound, and the clipping of gradients does not."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run, as far as the theory needs it."""

    name: str
    optimizer: str
    family: Family
    """Of the optimizer; its betas may lead to other rules (``app.plan.rules.family``)."""
    num_params: float
    streams: tuple[PlannedStream, ...]
    schedule: SyncSchedule
    steps: int
    workers: int
    tokens: float | None
    """Per step, of all workers together."""
    compute: float
    """Seconds of compute per step; NaN: not known, and neither is any time."""
    peak: str = ""
    """The speed from which ``compute`` is estimated; empty if it was not."""
    link: Link
    topologies: tuple[Topology, ...] = (Topology.STAR,)
    """The star is what Flower runs on; the paper's ring is for comparison with the paper."""
    alpha: float = 1.0
    """Share of communication that is not hidden behind compute, as in the paper."""
    share: float = 0.1
    """Largest acceptable ratio of exposed communication to compute."""
    window_seconds: float = 0.0
    """Fixed time of an average through a server on any link: processes and polls of a deployment.
    It overlaps in part with the transfer: together they take the root of the sum of their squares,
    which fits the measurements (research/thin-links.md)."""
    sync_bound: bool = False
    """True if Adam's first moment is bounded after an average of it or of v."""
    partition: str = "iid"
    """Division of the data among the workers (``data.partition``)."""
    delay: int = 0
    """Steps that a worker takes before it merges an average; they pass while data travels."""

    @property
    def coins(self) -> bool:
        """Whether streams are averaged with probability 1/K instead of every K steps."""
        return self.schedule.coin_seed is not None

    @property
    def is_timed(self) -> bool:
        """Whether the compute of a step is known."""
        return not math.isnan(self.compute)

    @property
    def periods(self) -> Mapping[str, Period]:
        """The period of every stream."""
        return self.schedule.periods

    @property
    def sizes(self) -> dict[str, float]:
        """The bytes of every stream, uncompressed."""
        return {stream.name: stream.num_bytes for stream in self.streams}

    @property
    def compressed(self) -> dict[str, float]:
        """The bytes of every stream in a message of this run."""
        return {s.name: s.compressed_bytes or s.num_bytes for s in self.streams}

    @property
    def moments(self) -> tuple[PlannedStream, ...]:
        """The streams that decay."""
        return tuple(stream for stream in self.streams if stream.beta is not None)

    def moment(self, kind: Kind) -> PlannedStream | None:
        """Return the moment of that kind; None if the run has none, or several."""
        found = [stream for stream in self.moments if stream.kind is kind]
        return found[0] if len(found) == 1 else None

    @cached_property
    def methods(self) -> tuple[MethodRates, ...]:
        """DDP, Local Adam, this run and FedAvg, with the same period of params."""
        return method_rates(self.schedule, self.sizes, self.steps, compressed=self.compressed)

    @property
    def desloc(self) -> MethodRates:
        """Rates of this run."""
        return self.methods[2]

    def with_periods(self, periods: Mapping[str, Period]) -> "PlannedRun":
        """Return the same run with other periods, without phases."""
        schedule = replace(self.schedule, periods={**self.periods, **periods}, phases={})
        return replace(self, schedule=schedule)

    @cached_property
    def averages(self) -> dict[str, int]:
        """How often each stream is averaged in the run; ``params`` are at its end."""
        return self.schedule.num_events(self.steps)

    def leaves_out(self, name: str) -> bool:
        """Return whether a stream is never averaged before the end; with coins it may be."""
        period = self.periods[name]
        if isinstance(period, int) and (self.coins or period <= self.steps):
            return False
        return self.averages[name] == (1 if name == PARAMS else 0)

    @cached_property
    def windows(self) -> list[tuple[int, float]]:
        """Every window's steps, and the bytes that a worker sends after it."""
        steps = [window.stop - window.start for window in self.schedule.windows(self.steps)]
        return [*zip(steps, window_bytes(self.schedule, self.compressed, self.steps), strict=True)]

    def late_waiting(self) -> float:
        """Return the seconds per step of waiting on a star when averages are merged late.

        What travels after a window is hidden behind the first ``delay`` steps of the next one.
        """
        waiting = 0.0
        for (_, num_bytes), (following, _) in zip(
            self.windows, [*self.windows[1:], (0, 0.0)], strict=True
        ):
            seconds = self.alpha * star_seconds(num_bytes, self.workers, self.link)
            hidden = min(self.delay, following) * self.compute
            waiting += max(0.0, math.hypot(seconds, self.window_seconds) - hidden)
        return waiting / self.steps

    def waiting(self, method: MethodRates, topology: Topology, link: Link | None = None) -> float:
        """Return the seconds per step of communication that is not hidden behind compute."""
        link = link or self.link
        seconds = self.alpha * communication_seconds(method, self.workers, link, topology)
        return math.hypot(seconds, self._least(method, topology))

    def _least(self, method: MethodRates, topology: Topology) -> float:
        return method.windows * self.window_seconds if topology is Topology.STAR else 0.0

    def bandwidth_for(self, method: MethodRates, topology: Topology, share: float) -> float | None:
        """Return the bytes per second at which waiting takes ``share`` of compute.

        The result is 0 if no bandwidth is needed, and None if none is enough.
        """
        waiting, least = share * self.compute, self._least(method, topology)
        if least > waiting:
            return None
        if not self.alpha:
            return 0.0
        seconds = math.sqrt(waiting**2 - least**2) / self.alpha
        return balance(method, self.workers, self.link.latency, topology, seconds)
