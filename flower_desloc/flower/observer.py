"""What a run reports: one record a window, for files, curves and the terminal."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from flower_desloc.core.averaging import Drift
from flower_desloc.core.client_info import ClientInfo
from flower_desloc.core.schedule import SyncSchedule


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
    update_norm: float = 0.0
    """Distance of its parameters from their last average; 0: they were not due."""
    param_norm: float
    """|x_stop|."""
    seconds: float
    """The client's own time for the window."""
    steps: int = 0
    """Local steps taken; 0: it did not say."""


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
            up=dict(Counter(self.up) + Counter(other.up)),
            down=dict(Counter(self.down) + Counter(other.down)),
            framed_up=self.framed_up + other.framed_up,
            framed_down=self.framed_down + other.framed_down,
        )


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """The averaged model's metrics, over everything and for each domain or client."""

    overall: Mapping[str, float]
    parts: Mapping[str, Mapping[str, float]]


EventKind = Literal[
    "failed",  # a client raised or died
    "late",  # it did not answer in time
    "refused",  # its reply cannot be used
    "outlier",  # its update or evaluation is too far from the others'
    "capped",  # it stated more examples, or a larger evaluation, than count
    "by message",  # its tensors travel in Flower's messages: it cannot reach the server's address
    "joined",
    "moved",  # it came back at another node
    "left",
    "returned",
    "data changed",  # since a checkpoint or the client's last greeting
    "code changed",  # since the checkpoint
    "state lost",  # it has lost its state, and continues from the averages
    "repeated",  # too few replies could be used, so the window was asked for again
]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a window and was not planned."""

    kind: EventKind
    client: str
    """Its name; ``node N`` for a node that never sent one; empty where no client is meant."""
    what: str
    evaluation: bool = False
    """Whether it was left out of the evaluation, and not of the averages."""


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
    """Client name -> why its contribution is not in the averages."""
    traffic: Traffic
    drift: Mapping[str, Drift]
    """Of each averaged stream: spread between clients, distance moved, norm."""
    seconds: Mapping[str, float]
    """Wall-clock: `total`, and of it `clients` (the slowest client's own time), `averaging` and
    `evaluation` (messages included); the rest is messages, and clients waiting for a core."""
    central: EvaluationRecord | None = None
    """Evaluated on the server, by domain."""
    federated: EvaluationRecord | None = None
    """Evaluated on the clients, by client."""
    events: Sequence[Event] = ()
    """In the order in which they happened, including those of every repeat of the window."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What is known before the first window."""

    schedule: SyncSchedule
    num_steps: int
    num_windows: int
    stream_bytes: Mapping[str, int]
    """Size of each stream in bytes, as far as known (``DesLoc(templates=...)``)."""
    compressed_bytes: Mapping[str, int] = field(default_factory=dict)
    """The same as it is sent, where that is known to differ."""
    clients: Mapping[str, ClientInfo]
    """What each client says of itself, by its name."""


class Observer:
    """Looks at a run; what changes one is a ``flower_desloc.flower.rounds.RoundHook``."""

    def started(self, run: RunInfo) -> None:
        """Called once, before the first evaluation."""

    def joined(self, client: str, info: ClientInfo) -> None:
        """Called when a client joins after the start."""

    def window(self, record: WindowRecord) -> None:
        """Called after every window, and once with round 0."""


def client_data(run: RunInfo) -> dict[str, dict[str, int]]:
    """Return client -> domain or label -> size, of the clients that describe their data."""
    return {name: dict(info.data) for name, info in run.clients.items() if info.data}
