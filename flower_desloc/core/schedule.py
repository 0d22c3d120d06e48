"""Schedule of the averages: the paper's K_x, K_u, K_v, and the windows between averages.

A *stream* is one family of tensors with its own sync period: ``params``, or one optimizer state
under PyTorch's name. A *window* runs from one average to the next average of any stream; a
federated round is one window.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

PARAMS: Final = "params"
"""The stream of the parameters."""
BUFFERS: Final = "buffers"
GRADIENTS: Final = "gradients"
NEVER: Final = "never"
"""Period of a stream that is not averaged."""
RESET: Final = "reset"
"""Period of an optimizer state that is zero again after every average of the parameters."""

Period = int | Literal["never", "reset"]
_ALLOWED: Final = "a positive integer, 'never' or 'reset'"


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
    due after step t when its period divides t. An optimizer state may also be ``"reset"``: never
    averaged, and zero again after every average of ``params``.

    The baselines of the paper (section 5) are schedules too: equal periods are Local Adam, states
    that are never averaged FAVG+OPT, states that are reset FAVG-OPT, and ``{"gradients": 1}``,
    alone, is data parallelism, where the gradient of every step is averaged.

    With ``coin_seed`` the schedule is the theory's (Theorem 1): after each step a stream is due
    with probability p = 1/K. The coin of one (seed, stream, step) always falls the same way.

    What is due is a function of the step alone, without memory: a resumed run continues its
    windows, and byte counts replay them. A rule that needs the length of the run, such as a period
    that follows the learning rate, is turned into steps where the schedule is built.

    ``once_at`` are steps after which every stream is averaged in addition to its period (the
    paper's ad-hoc averaging, before workers join).

    ``buffers`` that are averaged at all are also averaged with every average of ``params``: what is
    evaluated and saved then has statistics of its own parameters.

    ``phases`` shift single streams: one with period K and phase p is due after step t when K
    divides t - p, so that two streams need not leave together.

    >>> list(SyncSchedule({"params": 2, "exp_avg": 3}).windows(4))[1]
    Window(start=2, stop=3, due=frozenset({'exp_avg'}))

    Raises ``ValueError`` for a period that is none of these, and for a phase that is not in
    0 .. K - 1 or belongs to a stream without a clock.
    """

    periods: Mapping[str, Period]
    coin_seed: int | None = None
    once_at: frozenset[int] = frozenset()
    phases: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Copies: the caller must not change them after they are checked.
        object.__setattr__(self, "periods", dict(self.periods))
        object.__setattr__(self, "once_at", frozenset(self.once_at))
        object.__setattr__(self, "phases", dict(self.phases))
        if GRADIENTS in self.periods:
            if self.periods != {GRADIENTS: 1} or self.once_at:
                once = f" and, once, after {sorted(self.once_at)}" if self.once_at else ""
                raise ValueError(
                    f"gradients are averaged in every step and without other streams: "
                    f"{{{GRADIENTS!r}: 1}}, "
                    f"got {dict(self.periods)}{once}; begin with the preset ddp"
                )
        elif PARAMS not in self.periods:
            raise ValueError(
                f"the schedule states no period for {PARAMS!r}, only for "
                f"{sorted(self.periods)}; state {_ALLOWED}"
            )
        states = self.periods.keys() - {PARAMS, BUFFERS}
        if not self.resets <= states:
            names = ", ".join(sorted(self.resets - states))
            raise ValueError(f"{names!r} cannot be 'reset'; only optimizer states can")
        if self.resets and self.resets != states:
            # Bias correction has one step count for all states.
            raise ValueError(
                f"set 'reset' for all optimizer states or for none; it is set for "
                f"{', '.join(sorted(self.resets))}, and not for "
                f"{', '.join(sorted(states - self.resets))}"
            )
        for stream, period in self.periods.items():
            if period in (NEVER, RESET):
                continue
            # bool is an int in Python, and True would silently mean "every step".
            if not isinstance(period, int) or isinstance(period, bool) or period < 1:
                raise ValueError(f"the period of {stream!r} must be {_ALLOWED}; got {period!r}")
        for stream, phase in self.phases.items():
            period = self.periods.get(stream, NEVER)
            if not isinstance(period, int) or stream == GRADIENTS or self.coin_seed is not None:
                raise ValueError(
                    f"the phase of {stream!r} needs a period that is a number of steps"
                )
            if not isinstance(phase, int) or isinstance(phase, bool) or not 0 <= phase < period:
                raise ValueError(
                    f"the phase of {stream!r} must be at least 0 and below its period {period}; "
                    f"got {phase!r}"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON has them: ``SyncSchedule(**fields)`` is this schedule again.

        >>> schedule = SyncSchedule({"params": 2, "exp_avg": 6}, None, {4, 3}, {"exp_avg": 2})
        >>> SyncSchedule(**schedule.to_dict()) == schedule
        True
        """
        return asdict(self) | {"once_at": sorted(self.once_at)}

    @property
    def resets(self) -> frozenset[str]:
        """The streams that are zero again after every average of ``params``."""
        return frozenset(stream for stream, period in self.periods.items() if period == RESET)

    def due(self, step: int, num_steps: int | None = None) -> frozenset[str]:
        """Return the streams averaged after local step ``step`` (1 is the first).

        In a run of ``num_steps`` steps ``params`` are also averaged at the end.
        """
        if step in self.once_at:
            return frozenset(self.periods) - self.resets
        due = {stream for stream in self.periods if self._falls_due(stream, step)}
        if step == num_steps:
            due |= self.periods.keys() & {PARAMS}
        if PARAMS in due and isinstance(self.periods.get(BUFFERS), int):
            due.add(BUFFERS)
        return frozenset(due)

    def windows(self, num_steps: int) -> Iterator[Window]:
        """Yield the windows of a run of ``num_steps`` steps."""
        start = 0
        for step in range(1, num_steps + 1):
            if due := self.due(step, num_steps):
                yield Window(start, step, due)
                start = step

    def num_events(self, num_steps: int) -> dict[str, int]:
        """Return how often each stream is averaged in ``num_steps`` local steps."""
        events = Counter(stream for window in self.windows(num_steps) for stream in window.due)
        return {stream: events[stream] for stream in self.periods}

    def period_text(self, stream: str) -> str:
        """Return in words after which local steps a stream is averaged.

        >>> schedule = SyncSchedule({"params": 8, "exp_avg": "never"}, once_at=frozenset({3, 5}))
        >>> schedule.period_text("params"), schedule.period_text("exp_avg")
        ('every 8 and after 3 and 5', 'after 3 and 5')
        >>> SyncSchedule({"params": 8}, once_at=frozenset(range(10))).period_text("params")
        'every 8 and 10 more'
        >>> SyncSchedule({"params": 8}, coin_seed=0).period_text("params")
        'every 8 by coin'
        """
        period = self.periods[stream]
        regular = str(period)
        if isinstance(period, int):
            phase = self.phases.get(stream, 0)
            coin = "" if self.coin_seed is None else " by coin"
            regular = f"every {period}{f' from {phase}' if phase else ''}{coin}"
        steps = [] if stream in self.resets else [*map(str, sorted(self.once_at))]
        if not steps:
            return regular
        if len(steps) > 2:  # a figure and a table have room for two
            more = f"{regular} and {len(steps)} more"
            return more if isinstance(period, int) else f"at {len(steps)}"
        once = f"after {' and '.join(steps)}"
        return f"{regular} and {once}" if isinstance(period, int) else once

    def require(self, streams: Iterable[str], optimizer: str) -> None:
        """Raise ``ValueError`` unless exactly ``streams`` have a stated period.

        There is no default: with one, a misspelt name would go unnoticed.
        """
        known = list(streams)
        if GRADIENTS in self.periods:
            return  # only the server has states
        if unknown := [f"sync.{stream}" for stream in self.periods if stream not in known]:
            raise ValueError(
                f"{', '.join(unknown)}: {optimizer} has no stream of that name; its streams are "
                f"{', '.join(known)}; leave out what it lacks (as overrides: "
                f"{' '.join(f'{key}=null' for key in unknown)})"
            )
        for stream in known:
            if stream not in self.periods:
                raise ValueError(
                    f"sync.{stream} is not stated, and {optimizer} has that stream; "
                    f"state {_ALLOWED}"
                )

    def _falls_due(self, stream: str, step: int) -> bool:
        period = self.periods[stream]
        if not isinstance(period, int):  # NEVER or RESET
            return False
        if self.coin_seed is None:
            return (step - self.phases.get(stream, 0)) % period == 0
        # One generator per coin, so there is no generator state to checkpoint.
        coin = random.Random(f"{self.coin_seed}/{stream}/{step}")  # noqa: S311
        return coin.random() < 1 / period
