"""Laws of the clocks: which stream is averaged when."""

import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_desloc import NEVER, PARAMS, SyncSchedule

PERIOD = st.integers(1, 12) | st.just(NEVER)
PERIODS = st.fixed_dictionaries(
    {PARAMS: PERIOD}, optional={"exp_avg": PERIOD, "exp_avg_sq": PERIOD}
)


@st.composite
def staggered(draw):
    periods = draw(PERIODS)
    shifted = [stream for stream, K in periods.items() if K != NEVER and draw(st.booleans())]
    phases = {stream: draw(st.integers(0, periods[stream] - 1)) for stream in shifted}
    return SyncSchedule(periods, phases=phases)


SCHEDULES = st.builds(SyncSchedule, PERIODS, coin_seed=st.none() | st.integers(0, 9)) | staggered()
NUM_STEPS = st.integers(0, 60)


# ---------------------------------------------------------------------------------------- Windows


@given(SCHEDULES, NUM_STEPS)
def test_windows_cover_every_step_once_and_in_order(schedule, num_steps):
    steps = [step for w in schedule.windows(num_steps) for step in range(w.start, w.stop)]
    assert steps == list(range(num_steps))


@given(SCHEDULES, NUM_STEPS)
def test_no_event_lies_inside_a_window_and_each_ends_in_one(schedule, num_steps):
    for window in schedule.windows(num_steps):
        assert not any(schedule.due(step) for step in range(window.start + 1, window.stop))
        at_the_end = {PARAMS} if window.stop == num_steps else set()
        assert window.due == schedule.due(window.stop) | at_the_end
        assert window.due


@given(SCHEDULES, NUM_STEPS, st.integers(1, 40))
def test_buffers_are_averaged_with_every_average_of_params(schedule, num_steps, period):
    buffers = replace(schedule, periods={**schedule.periods, "buffers": period})
    for window in buffers.windows(num_steps):
        own = buffers.coin_seed is None and window.stop % period == 0
        assert "buffers" in window.due or not (own or "params" in window.due)
    without = [w.stop for w in schedule.windows(num_steps) if "params" in w.due]
    assert [w.stop for w in buffers.windows(num_steps) if "params" in w.due] == without


@given(SCHEDULES, NUM_STEPS)
def test_events_are_counted_from_the_windows(schedule, num_steps):
    events = schedule.num_events(num_steps)
    assert events.keys() == schedule.periods.keys()
    for stream, count in events.items():
        assert count == sum(stream in w.due for w in schedule.windows(num_steps))


# ------------------------------------------------------------------------------------------ Phases


@given(staggered(), st.integers(1, 300))
def test_a_stream_is_due_when_its_period_divides_the_steps_since_its_phase(schedule, step):
    for stream, period in schedule.periods.items():
        first = schedule.phases.get(stream, 0) or period
        is_due = period != NEVER and step in range(first, step + 1, period)
        assert (stream in schedule.due(step)) == is_due


@pytest.mark.parametrize(
    ("periods", "phases", "coins", "what"),
    [
        ({PARAMS: 4}, {PARAMS: 4}, None, "below its period 4"),
        ({PARAMS: 4}, {PARAMS: -1}, None, "at least 0"),
        ({PARAMS: 4}, {PARAMS: True}, None, "at least 0"),
        ({PARAMS: 4}, {"exp_avg": 1}, None, "needs a period"),
        ({PARAMS: 4, "exp_avg": NEVER}, {"exp_avg": 1}, None, "needs a period"),
        ({PARAMS: 4}, {PARAMS: 1}, 0, "needs a period"),
        ({"gradients": 1}, {"gradients": 0}, None, "needs a period"),
    ],
)
def test_an_impossible_phase_is_refused(periods, phases, coins, what):
    with pytest.raises(ValueError, match=what):
        SyncSchedule(periods, coins, phases=phases)


# ------------------------------------------------------------------------------------------- Coins


@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 9))
def test_a_coin_is_a_function_of_seed_stream_and_step_alone(seed, period, other):
    alone = SyncSchedule({PARAMS: period}, coin_seed=seed)
    among = SyncSchedule({"exp_avg": other, PARAMS: period}, coin_seed=seed)
    forwards = [PARAMS in alone.due(step) for step in range(1, 40)]
    backwards = [PARAMS in among.due(step) for step in reversed(range(1, 40))]
    assert forwards == backwards[::-1]


@pytest.mark.parametrize("period", [1, 2, 7, 192, NEVER])
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_a_coin_falls_once_per_period_on_average(seed, period):
    n, p = 20_000, 0 if period == NEVER else 1 / period
    schedule = SyncSchedule({PARAMS: period}, coin_seed=seed)
    events = sum(len(schedule.due(step)) for step in range(1, n + 1))
    assert abs(events - n * p) <= 5 * math.sqrt(n * p * (1 - p))


def test_coins_of_two_streams_seeds_and_steps_are_independent():
    n, p = 10_000, 1 / 3
    a = SyncSchedule({PARAMS: 3, "exp_avg": 3}, coin_seed=0)
    b = SyncSchedule({PARAMS: 3}, coin_seed=1)
    due = [a.due(step) for step in range(1, n + 1)]
    both = {
        "streams": sum(len(streams) == 2 for streams in due),
        "seeds": sum(PARAMS in s and PARAMS in b.due(n) for n, s in enumerate(due, start=1)),
        "steps": sum(PARAMS in s and PARAMS in t for s, t in pairwise(due)),
    }
    for what, count in both.items():
        assert abs(count - n * p**2) < 5 * math.sqrt(n * p**2 * (1 - p**2)), what


def test_coins_fall_as_they_fell_in_the_first_release():
    """A resumed run must see the windows it left; these were written down once."""
    schedule = SyncSchedule({PARAMS: 3, "exp_avg": 5}, coin_seed=7)
    fell = {s: [n for n in range(1, 25) if s in schedule.due(n)] for s in schedule.periods}
    assert fell == {PARAMS: [2, 3, 10, 12, 18, 19, 20, 21, 22, 23], "exp_avg": [4, 9, 10]}


# ------------------------------------------------------------------------------------------ Errors


@pytest.mark.parametrize("period", [0, -3, 1.5, True, "x", None, float("nan"), [3], "3"])
@pytest.mark.parametrize("stream", [PARAMS, "exp_avg"])
def test_a_period_that_is_no_period_is_refused_by_name_and_value(stream, period):
    with pytest.raises(
        ValueError, match=f"'{stream}'.*positive integer, 'never' or 'reset'"
    ) as error:
        SyncSchedule({PARAMS: 2, stream: period})
    assert repr(period) in str(error.value)


def test_a_schedule_without_a_period_for_params_is_refused():
    with pytest.raises(ValueError, match=r"no period for 'params'.*\['exp_avg'\]"):
        SyncSchedule({"exp_avg": 3})


def test_exactly_the_streams_of_the_optimizer_must_have_a_period():
    schedule = SyncSchedule({PARAMS: 1, "exp_avg": 2, "exp_avg_sq": 3})
    schedule.require([PARAMS, "exp_avg", "exp_avg_sq"], "Adam")
    with pytest.raises(ValueError, match=re.escape("sync.max_exp_avg_sq is not stated")):
        schedule.require([PARAMS, "exp_avg", "exp_avg_sq", "max_exp_avg_sq"], "Adam")
    both = r"sync\.exp_avg, sync\.exp_avg_sq: SGDM .* params, momentum_buffer"
    with pytest.raises(ValueError, match=both):
        schedule.require([PARAMS, "momentum_buffer"], "SGDM")
