"""The paper's arithmetic of bytes, as laws."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from flower_desloc import NEVER, PARAMS, SyncSchedule
from flower_desloc.core.traffic import compressed_bytes, stream_bytes, uploads

PERIOD = st.integers(1, 12) | st.just(NEVER)
STREAMS = (PARAMS, "exp_avg", "exp_avg_sq")
P = 4 * 135_000_000  # bytes of the parameters, and of each moment
SIZES = dict.fromkeys(STREAMS, P)


def schedule_of(*periods, coin_seed=None):
    return SyncSchedule(dict(zip(STREAMS, periods, strict=True)), coin_seed)


def total(counts):
    return sum(counts.values())


def test_a_stream_weighs_its_elements_in_its_own_type():
    streams = {
        PARAMS: {"a": torch.zeros(3, 5), "b": torch.zeros(()), "c": torch.zeros(0, 4)},
        "exp_avg": {"a": torch.zeros(7, dtype=torch.bfloat16)},
        "exp_avg_sq": {},
    }
    assert stream_bytes(streams) == {PARAMS: 64, "exp_avg": 14, "exp_avg_sq": 0}


@given(st.tuples(PERIOD, PERIOD, PERIOD), st.integers(1, 200), st.tuples(*[st.integers(0, 99)] * 3))
def test_a_worker_sends_every_stream_once_per_period_and_params_at_the_end(periods, T, sizes):
    sizes = dict(zip(STREAMS, sizes, strict=True))
    events = {s: 0 if k == NEVER else T // k for s, k in zip(STREAMS, periods, strict=True)}
    events[PARAMS] += periods[0] == NEVER or T % periods[0] > 0
    expected = {s: sizes[s] * events[s] for s in STREAMS}
    assert uploads(schedule_of(*periods), sizes, T).desloc == expected


def test_coded_they_are_8_times_below_local_adam_and_over_600_times_below_data_parallelism():
    like = {name: {"w": torch.zeros(1_000_000)} for name in SIZES}
    schedule, formats, T = schedule_of(256, 768, 1536), dict.fromkeys(SIZES, "int8"), 1536
    sent = total(uploads(schedule, compressed_bytes(like, formats, {}), T).desloc)
    assert total(uploads(schedule, stream_bytes(like), T).local_adam) / sent > 7.9
    assert uploads(schedule, stream_bytes(like), T).ddp / sent > 670


@given(PERIOD, st.integers(1, 50))
def test_local_adam_at_its_own_clocks_is_itself(K, T):
    schedule = schedule_of(K, K, K)
    sent = uploads(schedule, SIZES, T)
    assert sent.local_adam == sent.desloc


@given(st.integers(0, 99), st.integers(1, 60))
def test_with_coins_one_coin_decides_for_all_of_local_adams_streams(seed, T):
    schedule = schedule_of(3, 9, 18, coin_seed=seed)
    fell = sum(PARAMS in schedule.due(step) for step in range(1, T + 1))
    at_the_end = PARAMS not in schedule.due(T)
    sent = uploads(schedule, SIZES, T).local_adam
    assert sent == {PARAMS: P * (fell + at_the_end), "exp_avg": P * fell, "exp_avg_sq": P * fell}


@given(PERIOD.filter(lambda k: k in (1, NEVER)), st.integers(1, 20))
def test_a_certain_coin_costs_local_adam_what_the_period_does(K, T):
    with_coin = uploads(schedule_of(K, 2, 3, coin_seed=0), SIZES, T).local_adam
    assert with_coin == uploads(schedule_of(K, 2, 3), SIZES, T).local_adam
