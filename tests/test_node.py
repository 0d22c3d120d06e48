"""The pauses of a SuperNode between two looks for messages."""

import pytest

from flower_desloc.sites.deployment.node import Pauses


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.mark.parametrize("after", [0.0, 0.05, 1.0, 20.0, 100.0, 5000.0])
def test_a_message_waits_five_percent_of_the_time_since_the_last_or_a_tenth_of_a_second(after):
    clock = Clock()
    pauses = Pauses(clock)
    pauses.found()
    found = clock.now
    while clock.now - found < after:
        pauses.sleep(3)
    late = clock.now - found - after
    assert late <= max(0.1, min(3.0, 0.05 * after)) + 1e-9


def test_one_that_is_sent_nothing_asks_as_often_as_flowers():
    clock = Clock()
    pauses = Pauses(clock)
    for _ in range(10):
        before = clock.now
        pauses.sleep(3)
        assert clock.now - before == 3.0


def test_no_sleep_is_longer_than_flowers_own():
    clock = Clock()
    pauses = Pauses(clock)
    pauses.sleep(0.5)
    assert clock.now == 1000.5
