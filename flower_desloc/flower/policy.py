"""The federation policy: who takes part in a window, and what happens when a client fails."""

import re
from dataclasses import dataclass, field
from logging import WARNING
from typing import Final

from flower_desloc.core.robust import AVERAGES
from flower_desloc.flower.failures import ClientError, EveryClientError, FederationError
from flower_desloc.flower.fields import Exclusion, Range, bounded, may_differ, one_of, problems
from flower_desloc.flower.internals import log

_ADDRESS = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Who takes part in a window, how replies are averaged, and what a failed client does.

    It is the section ``federation`` of a configuration, by which errors name it. Raises
    ``ValueError`` for the first field that cannot be used.
    """

    min_clients: int = may_differ(bounded(1, 1))
    """Quorum: wait for this many clients, and average no window with fewer."""
    attendance: dict[int, int] = field(default_factory=dict)
    """Joins and leaves, as step: number of clients that take part from then on, the first in order,
    as in `{0: 4, 96: 8}`. Before, all do."""
    fraction_train: float = bounded(1.0, above=0, most=1)
    """Share of the clients online, drawn by the seed, that train in a window."""
    weighting: str = one_of("uniform", "examples")
    """`uniform` (the paper's E_m) or `examples`."""
    max_share: float = bounded(0.9, 0.5, 1)
    """Largest share that a client counts for, in evaluations and with weighting by examples; 1: no
    limit."""
    average: str = one_of(*AVERAGES)
    """`mean`, or a robust average against malicious clients: `median` or `trimmed_mean` of each
    coordinate."""
    trim: int = bounded(1, 0)
    """How many replies trimmed_mean leaves out on each side; min_clients must be more than twice
    that."""
    norm_bound: float | None = bounded(30.0, 1)
    """Leave out a client whose update of a stream is longer than this many times the window's
    median so far, from the third client on; null: do not."""
    on_failure: str = may_differ(one_of("stop", "continue"))
    """`stop` the run when a client fails, or `continue` without it."""
    timeout: float = may_differ(bounded(3600.0, above=0))
    """Seconds to wait for the next reply; at least what a whole window takes. After its first reply
    a client has five times the slowest client's last time, and at least a minute."""
    grace: float | None = may_differ(bounded(None, 0))
    """Seconds to wait for the other replies once min_clients have arrived; needs
    on_failure=continue. null: wait for all."""
    repeats: int = may_differ(bounded(2, 0))
    """How often a window below the quorum is repeated before the run stops."""
    min_steps: float = bounded(1.0, above=0, most=1)
    """For sites of unequal speed: the least share of a window's local steps that a client takes.
    Below 1, a slow client takes as many as it can while the fastest takes all."""
    data_address: str | None = may_differ(None)
    """The server's host and port for tensors by Arrow Flight; null: in messages."""
    step_seconds: dict[str, float] = field(default_factory=dict, metadata={"range": Range(above=0)})
    """With min_steps: seconds per local step of clients by name, as in `{client-3: 0.4}`;
    with all of them, a run can be repeated exactly."""

    def __post_init__(self) -> None:
        for problem in problems(self, "federation."):
            raise ValueError(problem)
        for exclusion in _EXCLUSIONS:
            for problem in exclusion.problems(self, "federation."):
                raise ValueError(problem)
        if AVERAGES[self.average].trims and self.min_clients <= 2 * self.trim:
            raise ValueError(
                f"federation.trim={self.trim}: it leaves out {2 * self.trim} replies, so "
                f"federation.min_clients={self.min_clients} must be at least {2 * self.trim + 1}"
            )
        if self.data_address is not None and not _ADDRESS.fullmatch(self.data_address):
            raise ValueError(
                f"federation.data_address={self.data_address}: expected host:port, such as "
                "fed.example.org:8443"
            )
        for step, number in self.attendance.items():
            if step < 0 or number < self.min_clients:
                raise ValueError(
                    f"federation.attendance={dict(self.attendance)}: steps are at least 0, and "
                    f"numbers of clients at least federation.min_clients={self.min_clients}"
                )

    def number_drawn(self, online: int) -> int:
        """Return how many of the clients online train in a window."""
        return min(online, max(self.min_clients, round(self.fraction_train * online)))

    @property
    def bound_of_norms(self) -> float | None:
        """``norm_bound`` where clients take a part of the steps, and have shorter updates."""
        return None if self.norm_bound is None else self.norm_bound / self.min_steps

    def fail(self, what: str, reason: str, kind: type[FederationError] = ClientError) -> None:
        """Raise ``kind`` for a failed client, or log it, by ``on_failure``.

        ``reason`` is the client's.
        """
        if self.on_failure == "stop":
            advice = (
                " (federation.on_failure=continue leaves a failed client out, while "
                f"federation.min_clients={self.min_clients} others remain)"
            )
            raise kind(f"{what}: {reason}{'' if kind is EveryClientError else advice}")
        log(WARNING, "%s: %s", what, reason)


_EXCLUSIONS: Final = (
    Exclusion(
        where=lambda policy: policy.on_failure == "stop",
        keys=("grace",),
        why="a client that is not waited for is left out, which would end the run",
        remedy="set federation.on_failure=continue",
    ),
    Exclusion(
        where=lambda policy: policy.min_steps == 1,
        keys=("step_seconds",),
        why="it needs federation.min_steps below 1; at 1 all clients take all steps",
    ),
    Exclusion(
        where=lambda policy: not AVERAGES[policy.average].is_weighted,
        keys=("min_steps", "weighting"),
        why="federation.average={0.average} counts every client once",
    ),
    Exclusion(
        where=lambda policy: not AVERAGES[policy.average].trims,
        keys=("trim",),
        why=f"it needs federation.average={' or '.join(n for n, a in AVERAGES.items() if a.trims)}",
    ),
)
