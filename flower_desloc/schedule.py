"""When each stream is averaged: the paper's K_x, K_u, K_v, and the windows they cut.

A *stream* is one family of tensors with a clock of its own: ``params``, or one optimizer
state under PyTorch's name. A *window* runs from one sync event to the next event of any
stream; a federated round is one window.
"""

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

PARAMS: Final = "params"
NEVER: Final = "never"

Period = int | Literal["never"]
_ALLOWED: Final = "a positive integer, or 'never'"


@dataclass(frozen=True)
class Window:
    """The local steps ``start + 1 .. stop``, after which the streams in ``due`` are averaged."""

    start: int
    stop: int
    due: frozenset[str]


@dataclass(frozen=True)
class SyncSchedule:
    """Sync period of every stream, in local steps: the paper's K_x, K_u, K_v.

    Periods are any positive integers, multiples of each other or not (the paper's toy problem
    uses 192, 192, 692), or ``"never"``. Step t counts completed local steps, and a stream is
    due after step t when its period divides t.

    With ``coin_seed`` the schedule is the theory's (Theorem 1): after each step a stream is due
    with probability p = 1/K. The coin of one (seed, stream, step) always falls the same way, so
    all clients see the same windows and a resumed run continues them.

    >>> list(SyncSchedule({"params": 2, "exp_avg": 3}).windows(4))[1]
    Window(start=2, stop=3, due=frozenset({'exp_avg'}))

    Raises ``ValueError`` for a period that is neither a positive integer nor ``"never"``.
    """

    periods: Mapping[str, Period]
    coin_seed: int | None = None

    def __post_init__(self) -> None:
        # What was checked must not change afterwards.
        object.__setattr__(self, "periods", dict(self.periods))
        if PARAMS not in self.periods:
            raise ValueError(
                f"the schedule states no period for {PARAMS!r}, only for "
                f"{sorted(self.periods)}; state {_ALLOWED}"
            )
        for stream, period in self.periods.items():
            if period == NEVER:
                continue
            # bool is an int in Python, and True would silently mean "every step".
            if not isinstance(period, int) or isinstance(period, bool) or period < 1:
                raise ValueError(f"sync period of {stream!r} must be {_ALLOWED}; got {period!r}")

    def due(self, step: int) -> frozenset[str]:
        """Return the streams averaged after local step ``step`` (1 is the first)."""
        return frozenset(stream for stream in self.periods if self._falls_due(stream, step))

    def windows(self, num_steps: int, start: int = 0) -> Iterator[Window]:
        """Cut the steps from ``start`` to ``num_steps`` wherever a stream falls due.

        The end of training is an event for ``params``: what is left behind is their mean.
        """
        for step in range(start + 1, num_steps + 1):
            due = self.due(step)
            if step == num_steps:
                due |= {PARAMS}
            if due:
                yield Window(start, step, due)
                start = step

    def num_events(self, num_steps: int) -> dict[str, int]:
        """Return how often each stream is averaged in ``num_steps`` local steps."""
        events = dict.fromkeys(self.periods, 0)
        for window in self.windows(num_steps):
            for stream in window.due:
                events[stream] += 1
        return events

    def require(self, streams: Iterable[str], optimizer: str) -> None:
        """Raise ``ValueError`` unless exactly ``streams`` have a stated period.

        A silent default is how a typing error comes to sync everything, so a missing name is as
        wrong as an unknown one.
        """
        known = list(streams)
        for stream in self.periods:
            if stream not in known:
                raise ValueError(
                    f"sync.{stream}: {optimizer} has no stream of that name; "
                    f"its streams are {', '.join(known)}"
                )
        for stream in known:
            if stream not in self.periods:
                raise ValueError(
                    f"sync.{stream} is not stated, and {optimizer} has that stream; "
                    f"state {_ALLOWED}"
                )

    def _falls_due(self, stream: str, step: int) -> bool:
        period = self.periods[stream]
        if period == NEVER:
            return False
        assert isinstance(period, int)
        if self.coin_seed is None:
            return step % period == 0
        # A generator per coin rather than one that is advanced: nothing to checkpoint.
        coin = random.Random(f"{self.coin_seed}/{stream}/{step}")  # noqa: S311
        return coin.random() < 1 / period
