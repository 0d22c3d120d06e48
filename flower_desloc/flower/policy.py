"""The federation policy: who takes part in a window, and what happens when a client fails."""

import math
import re
from dataclasses import dataclass, field
from logging import WARNING

from flower_desloc.flower.failures import ClientError, FederationError
from flower_desloc.flower.internals import log

_CHOICES = {
    "weighting": ("uniform", "examples"),
    "average": ("mean", "median", "trimmed_mean"),
    "on_failure": ("stop", "continue"),
}


_OF_A_SETTING = re.compile(r"(\w+: )?(task|strategy|wire|sync\w*|[a-z_]+\.[a-z_.]+)[=:]")
"""Begins an error that names a setting of the run."""


@dataclass(kw_only=True)
class Policy:
    """Who takes part in a window, how replies are averaged, and what a failed client does.

    The configuration's section ``federation`` has the same fields. Raises ``ValueError`` naming
    the first field that cannot be used.
    """

    min_clients: int = 1
    """Quorum: wait for this many clients, and average no window with fewer."""
    attendance: dict[int, int] = field(default_factory=dict)
    """Joins and leaves, as step: number. From the first window that begins at that step or later,
    only that many clients take part, the first in order, as in `{0: 4, 96: 8}` (on the command line
    `federation.attendance.96=8`). Before the first step named, all do."""
    fraction_train: float = 1.0
    """Share of the clients online, drawn by the seed, that train in a window."""
    weighting: str = "uniform"
    """`uniform` (the paper's E_m) or `examples`."""
    max_share: float = 0.9
    """With weighting by examples: the largest weight of a client, as a share of the examples that
    the clients of the window stated in their greetings; 1: no limit. A client with more counts as
    one with that share, and an event says so."""
    average: str = "mean"
    """`mean`, or a robust average against malicious clients, coordinate by coordinate: `median` or
    `trimmed_mean`. These hold all replies of a window in memory, where the mean holds one."""
    trim: int = 1
    """How many replies trimmed_mean leaves out on each side; min_clients must be more than twice
    that."""
    norm_bound: float | None = 30.0
    """Leave out a client whose update of a stream is longer than this many times the median of the
    window's clients so far, from the third on; divided by min_steps; null: do not."""
    on_failure: str = "stop"
    """What a failed client does to the run: `stop` it, or `continue` without that client."""
    timeout: float = 3600.0
    """Seconds to wait for the next reply, in the clients' order, before continuing without it; at
    least what a whole window takes, including the time clients wait for a core. A client that has
    replied before is waited for at most five times as long as the slowest client took last, and at
    least a minute."""
    grace: float | None = None
    """Seconds to wait for the other replies once min_clients have arrived, which are then held in
    memory until their turn; needs on_failure=continue. null: wait for all."""
    repeats: int = 2
    """How often a window below the quorum is repeated before the run stops."""
    min_steps: float = 1.0
    """For sites of unequal speed: the share of a window's local steps that every client takes at
    least. Below 1, a slow client takes as many as it can while the fastest takes all, and weighs
    less in the averages."""
    step_seconds: dict[str, float] = field(default_factory=dict)
    """With min_steps: seconds per local step of single clients by name, as in `{client-3: 0.4}`,
    instead of what the server measures; with all of them, a run can be repeated exactly."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            self._require(name, getattr(self, name) in choices, f"one of {', '.join(choices)}")
        self._require("min_clients", self.min_clients >= 1, "at least 1")
        self._require("fraction_train", 0 < self.fraction_train <= 1, "above 0 and at most 1")
        self._require("max_share", 0.5 <= self.max_share <= 1, "at least 0.5 and at most 1")
        self._require("trim", self.trim >= 0, "at least 0")
        bound = self.norm_bound
        self._require("norm_bound", bound is None or 1 <= bound < math.inf, "at least 1 and finite")
        self._require("timeout", 0 < self.timeout < math.inf, "above 0 and finite")
        grace = self.grace
        self._require("grace", grace is None or 0 <= grace < math.inf, "at least 0 and finite")
        if grace is not None and self.on_failure == "stop":
            raise ValueError(
                f"grace={grace}: a client that is not waited for is left out, which would end the "
                "run; set on_failure=continue"
            )
        self._require("repeats", self.repeats >= 0, "at least 0")
        self._require("min_steps", 0 < self.min_steps <= 1, "above 0 and at most 1")
        paces = self.step_seconds.values()
        self._require("step_seconds", all(0 < p < math.inf for p in paces), "above 0 and finite")
        if self.step_seconds and self.min_steps == 1:
            raise ValueError(
                f"step_seconds={dict(self.step_seconds)}: it needs min_steps below 1; with "
                "min_steps=1 all clients take all steps"
            )
        if self.average != "mean" and self.min_steps < 1:
            raise ValueError(
                f"average={self.average}: it counts every client once; set min_steps=1"
            )
        if self.average != "mean" and self.weighting != "uniform":
            raise ValueError(
                f"average={self.average}: it counts every client once; set weighting=uniform"
            )
        if self.average == "trimmed_mean" and self.min_clients <= 2 * self.trim:
            raise ValueError(
                f"trim={self.trim}: it leaves out {2 * self.trim} replies, so "
                f"min_clients={self.min_clients} must be at least {2 * self.trim + 1}"
            )
        for step, number in self.attendance.items():
            if step < 0 or number < self.min_clients:
                raise ValueError(
                    f"attendance={dict(self.attendance)}: steps are at least 0, and numbers of "
                    f"clients at least min_clients={self.min_clients}"
                )

    @property
    def bound_of_norms(self) -> float | None:
        """``norm_bound`` where clients take a part of the steps, and have shorter updates."""
        return None if self.norm_bound is None else self.norm_bound / self.min_steps

    def fail(self, what: str, reason: str, kind: type[FederationError] = ClientError) -> None:
        """Raise ``kind`` for a failed client, or log it, by ``on_failure``.

        ``reason`` is the client's.
        """
        if self.on_failure == "stop":
            # Every client has the settings of the run, so none would remain.
            advice = (
                ""
                if _OF_A_SETTING.match(reason)
                else (
                    " (federation.on_failure=continue leaves a failed client out, while "
                    f"federation.min_clients={self.min_clients} others remain)"
                )
            )
            raise kind(f"{what}: {reason}{advice}")
        log(WARNING, "%s: %s", what, reason)

    def _require(self, name: str, is_valid: bool, wanted: str) -> None:
        if not is_valid:
            raise ValueError(f"{name}={getattr(self, name)}: must be {wanted}")
