"""Phases, coins, delays, absences, unequal speeds, weights and a bound, all at once."""

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from federation import BOUNDED, LINEAR, OPTIMIZERS, Quadratic, Regression, assert_close
from flower_path import Run, oracle
from hypothesis import given
from hypothesis import strategies as st

from flower_desloc import NEVER, Policy, SyncSchedule, Window
from flower_desloc.core.schedule import PARAMS

STEPS, CLIENTS = 20, 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run; the oracle is given the same."""

    optimizer: str
    schedule: SyncSchedule
    delay: int
    away: frozenset[tuple[int, int]]
    """Client and window."""
    paces: Mapping[str, float]
    """Seconds per step of each client; empty: in lock-step."""
    least: float
    by_examples: bool
    bound: bool
    evaluate: bool
    regression: bool

    @cached_property
    def windows(self) -> list[Window]:
        return list(self.schedule.windows(STEPS))

    def present(self, m: int, t: int) -> bool:
        number = sum(window.stop <= t for window in self.windows)
        all_away = all((k, number) in self.away for k in range(CLIENTS))
        return all_away or (m, number) not in self.away

    def takes(self, m: int, t: int) -> bool:
        window = next(w for w in self.windows if w.start <= t < w.stop)
        steps = window.stop - window.start
        here = [k for k in range(CLIENTS) if self.present(k, window.start)]
        fastest = min(self.paces[f"client-{k}"] for k in here)
        share = round(steps * fastest / self.paces[f"client-{m}"])
        return t - window.start < max(math.ceil(self.least * steps - 1e-9), share)

    def run(self, folder: Path) -> Run:
        paces: dict[str, Any] = {"min_steps": self.least, "step_seconds": dict(self.paces)}
        weighting = "examples" if self.by_examples else "uniform"
        return Run(
            self.optimizer,
            self.schedule,
            folder,
            problem=Regression() if self.regression else Quadratic(),
            num_clients=CLIENTS,
            num_steps=STEPS,
            sync_delay=self.delay,
            sync_bound=self.bound,
            policy=Policy(weighting=weighting, **(paces if self.paces else {})),
            present=self.present,
            evaluate_clients=self.evaluate,
            eval_every=4 if self.evaluate else 0,
        )

    def oracle(self, run: Run) -> list[Any]:
        return oracle(
            run,
            present=self.present,
            takes=self.takes if self.paces else None,
            weights=[1.0, 2.0, 3.0] if self.by_examples else None,
            bound=self.bound,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    optimizer = draw(st.sampled_from(LINEAR))
    states = OPTIMIZERS[optimizer].oracle.states
    period = st.integers(2, 9)
    periods: dict[str, Any] = {PARAMS: draw(period)}
    periods |= {name: draw(period | st.just(NEVER)) for name in states}
    coins = draw(st.none() | st.integers(0, 99))
    phases = {
        name: draw(st.integers(0, period - 1))
        for name, period in periods.items()
        if coins is None and period != NEVER
    }
    schedule = SyncSchedule(periods, coin_seed=coins, phases=phases)
    windows = len(list(schedule.windows(STEPS)))
    absence = st.tuples(st.integers(0, CLIENTS - 1), st.integers(1, max(1, windows - 1)))
    away = draw(st.frozensets(absence, max_size=4))
    names = [f"client-{m}" for m in range(CLIENTS)]
    pace = st.sampled_from([0.1, 0.15, 0.2, 0.4, 1.0])
    paces = draw(st.just({}) | st.fixed_dictionaries(dict.fromkeys(names, pace)))
    return Case(
        optimizer=optimizer,
        schedule=schedule,
        # At most the steps that every client takes, which differ by window with unequal speeds.
        delay=draw(st.sampled_from([0, 1] if paces else [0, 1, 2, 3, 5, 40])),
        away=away,
        paces=paces,
        least=draw(st.sampled_from([0.1, 0.25, 0.5, 0.9])),
        by_examples=draw(st.booleans()),
        # The oracle bounds a client that is away as soon as a stream is averaged.
        bound=optimizer in BOUNDED and not away and draw(st.booleans()),
        evaluate=draw(st.booleans()),
        regression=draw(st.booleans()),
    )


@given(cases())
def test_all_at_once_equals_the_oracle(case: Case) -> None:
    """Of late averages and unequal speeds there is no other such test."""
    with tempfile.TemporaryDirectory() as folder:
        run = case.run(Path(folder))
        assert_close(run.start(), case.oracle(run))
