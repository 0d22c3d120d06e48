"""What a run tells of itself: one record a window, for files, curves and the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from flower_desloc.core.averaging import Drift

DATA = "data/"
"""A client says it holds so much of a domain or label as ``data/NAME``."""

MEMORY_TOTAL, MEMORY_FREE = "memory-total", "memory-free"
"""A client says how many bytes of memory the device has that it computes on."""

MICRO_BATCH = "micro-batch"
"""A client says how many examples it computes on at once."""


_DIGITS = 15  # beyond them a float does not count


def holdings(about: Mapping[str, str]) -> dict[str, int]:
    """Return the size of every domain or label of a client's data, as far as it says.

    A client may say anything: what is not a number, or is beyond any data, is left out.
    """
    return {
        key.removeprefix(DATA): size
        for key, text in about.items()
        if key.startswith(DATA) and (size := count(text)) is not None
    }


def count(text: str) -> int | None:
    """Return the number that a client writes of something that can be counted; None: it is not."""
    return int(text) if text.isdecimal() and len(text) <= _DIGITS else None


@dataclass(frozen=True, kw_only=True)
class ClientRecord:
    """What one client reported of its window."""

    num_examples: int
    train_loss: float
    """Mean over the window's steps."""
    losses: list[float]
    """One a step, as are the gradient norms (before clipping) and the learning rates."""
    grad_norms: list[float]
    learning_rates: list[float]
    update_norm: float
    """|x_stop - x_start| over the window."""
    param_norm: float
    """|x_stop|."""
    seconds: float
    """The client's own time for the window."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes between the server and all clients together."""

    up: Mapping[str, int] = field(default_factory=dict)
    """Payload by stream, from the clients."""
    down: Mapping[str, int] = field(default_factory=dict)
    """Payload by stream, to the clients."""
    framed_up: int = 0
    """Whole messages, with names, shapes, settings and metrics."""
    framed_down: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            up=_sum(self.up, other.up),
            down=_sum(self.down, other.down),
            framed_up=self.framed_up + other.framed_up,
            framed_down=self.framed_down + other.framed_down,
        )

    def __sub__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            up=_difference(self.up, other.up),
            down=_difference(self.down, other.down),
            framed_up=self.framed_up - other.framed_up,
            framed_down=self.framed_down - other.framed_down,
        )


def _sum(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {stream: a.get(stream, 0) + b.get(stream, 0) for stream in {**a, **b}}


def _difference(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    rest = {stream: count - b.get(stream, 0) for stream, count in a.items()}
    return {stream: count for stream, count in rest.items() if count}


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """The averaged model's metrics, over everything and for each domain or client."""

    overall: Mapping[str, float]
    parts: Mapping[str, Mapping[str, float]]


EventKind = Literal[
    "failed",
    "late",
    "refused",
    "outlier",
    "joined",
    "moved",
    "left",
    "returned",
    "state lost",
    "repeated",
]
"""What can happen: a client raised or died, did not answer in time, answered what cannot be used or
is too far from the others; came, came back at another node, went, came back; has lost its state and
was sent everything; too few could be used, so that the window was asked for again."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a window and was not planned."""

    kind: EventKind
    client: str
    """Its name; of one that never said it ``node N``; empty where the event is everybody's."""
    what: str


@dataclass(frozen=True, kw_only=True)
class WindowRecord:
    """One window; ``round`` 0 is the state before training, which only has evaluations."""

    round: int
    start: int
    step: int
    """Local steps completed at the window's end."""
    streams: list[str]
    """The streams averaged at its end."""
    train_loss: float | None
    """Mean over clients; None in round 0."""
    clients: Mapping[str, ClientRecord]
    """Those whose contribution is in the averages, by name, in the order of summation."""
    left_out: Mapping[str, str]
    """Client name -> why its contribution is not in the averages, or, where the reason begins with
    "evaluation", not in the evaluation."""
    traffic: Traffic
    drift: Mapping[str, Drift]
    """Of each averaged stream: spread between clients, distance moved, norm."""
    seconds: Mapping[str, float]
    """Wall-clock: `total`, and of it `clients` (the slowest client's own time), `averaging` and
    `evaluation` (exchange included); the rest is exchange, and clients waiting for a core."""
    central: EvaluationRecord | None = None
    """Evaluated on the server, by domain."""
    federated: EvaluationRecord | None = None
    """Evaluated on the clients, by client."""
    events: Sequence[Event] = ()
    """In the order in which they happened; those of every repeat of the window included."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known before the first window."""

    num_steps: int
    num_windows: int
    stream_bytes: Mapping[str, int]
    """Size of each stream in bytes, as far as the strategy was told (``DesLoc(states=...)``)."""
    wire_bytes: Mapping[str, int] = field(default_factory=dict)
    """The same as it travels, where that is known to be less or more."""
    clients: Mapping[str, Mapping[str, str]]
    """Client name -> what it said of itself (device, data/NAME, ...)."""


def client_data(plan: Plan) -> dict[str, dict[str, int]]:
    """Return client -> domain or label -> size, of the clients that say what they hold."""
    return {name: data for name, about in plan.clients.items() if (data := holdings(about))}


def devices(plan: Plan) -> dict[str, dict[str, str]]:
    """Return client -> what it said of where it computes, and in how large parts."""
    told = ("device", "name", MEMORY_TOTAL, MICRO_BATCH)
    return {
        client: {key: about[key] for key in told if key in about}
        for client, about in plan.clients.items()
    }


class Observer(Protocol):
    """Told of a run while it goes; it never changes the run."""

    def started(self, plan: Plan) -> None:
        """Called once, before the first evaluation."""

    def joined(self, client: str, about: Mapping[str, str]) -> None:
        """Called when a client joins after the start."""

    def window(self, record: WindowRecord) -> None:
        """Called after every window, and once with round 0."""
