"""Of a caller and its function exactly one runs."""

import pytest

from flower_desloc.adapters.turns import Turns


def test_the_function_runs_from_pause_to_pause():
    log: list[str] = []

    def function() -> None:
        for part in "ace":
            log.append(part)
            turns.pause()

    turns = Turns(function)
    for part in "bdf":
        turns.next()
        log.append(part)
    assert not turns.is_over
    turns.next()
    assert turns.is_over
    assert "".join(log) == "abcdef"


def test_what_the_function_raises_is_raised_in_the_caller():
    def function() -> None:
        turns.pause()
        raise SystemExit(3)

    turns = Turns(function)
    turns.next()
    with pytest.raises(SystemExit):
        turns.next()
    assert turns.is_over


def test_a_function_that_is_ended_cleans_up():
    log: list[str] = []

    def function() -> None:
        try:
            turns.pause()
            log.append("goes on")
        finally:
            log.append("cleans up")

    turns = Turns(function)
    turns.end()  # there is nothing to end yet
    turns = Turns(function)
    turns.next()
    turns.end()
    turns.end()
    assert turns.is_over
    assert log == ["cleans up"]
