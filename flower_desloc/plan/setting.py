"""What a plan is about: a model, its clocks, its workers, and the links between them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from flower_desloc.core.schedule import Period
from flower_desloc.plan import traffic
from flower_desloc.plan.traffic import Method
from flower_desloc.plan.wall_clock import Link, Topology, balance, communication_seconds


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A stream as theory sees it.

    Parameters
    ----------
    num_bytes
        Size of one payload.
    beta
        Decay of a moment; None of what is no moment.
    ceiling
        What no coordinate of the moment can exceed, or None where nothing is known to bound it.

    """

    name: str
    period: Period
    num_bytes: float
    beta: float | None = None
    ceiling: float | None = None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run, as far as theory needs it.

    Parameters
    ----------
    tokens
        Of one step, by all workers together.
    compute
        Seconds that a step computes.
    alpha
        Share of communication that is not hidden behind compute, as in the paper.
    share
        What communication that is not hidden may take, in shares of compute.
    coins
        Whether streams are averaged with probability 1/K instead of every K steps.

    """

    name: str
    optimizer: str
    num_params: float
    streams: tuple[Stream, ...]
    steps: int
    workers: int
    tokens: float | None
    compute: float
    link: Link
    alpha: float = 1.0
    share: float = 0.1
    coins: bool = False

    @property
    def periods(self) -> dict[str, Period]:
        """The period of every stream."""
        return {stream.name: stream.period for stream in self.streams}

    @property
    def sizes(self) -> dict[str, float]:
        """The payload of every stream in bytes."""
        return {stream.name: stream.num_bytes for stream in self.streams}

    @property
    def moments(self) -> tuple[Stream, ...]:
        """The streams that decay."""
        return tuple(stream for stream in self.streams if stream.beta is not None)

    @cached_property
    def desloc(self) -> Method:
        """What DES-LOC sends at these periods."""
        return traffic.desloc(self.sizes, self.periods, coins=self.coins)

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods compared, with the clock of params in common."""
        return (
            traffic.ddp(self.sizes),
            traffic.local_adam(self.sizes, self.periods),
            self.desloc,
            traffic.fedavg(self.sizes, self.periods),
        )

    def with_periods(self, periods: Mapping[str, Period]) -> "Setting":
        """Return the same with other periods."""
        streams = (replace(s, period=periods.get(s.name, s.period)) for s in self.streams)
        return replace(self, streams=tuple(streams))

    def waiting(self, method: Method, topology: Topology, link: Link | None = None) -> float:
        """Return the seconds a step that nothing is computed in."""
        link = link or self.link
        return self.alpha * communication_seconds(method, self.workers, link, topology)

    def bandwidth_for(self, method: Method, topology: Topology, share: float) -> float | None:
        """Return the bytes per second at which waiting takes ``share`` of compute.

        0 where no bandwidth is needed, None where none is enough.
        """
        if not self.alpha:
            return 0.0
        seconds = share * self.compute / self.alpha
        return balance(method, self.workers, self.link.latency, topology, seconds)
