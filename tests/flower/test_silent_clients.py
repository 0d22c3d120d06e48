"""A client that does not answer in time is waited for once, and takes part again once it has.

The clock is the tests' own: a reply is there some seconds after it was asked for.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from federation import assert_close, assert_same
from flower_path import Run, oracle
from flwr.app import Context, Message, RecordDict
from light_task import WITH_LIGHT
from processes import output_of, processes_with
from tiny import summary

from flower_desloc.flower.exchange import Exchange
from flower_desloc.flower.failures import FederationError
from flower_desloc.flower.inprocess import InProcessGrid
from flower_desloc.flower.messages import WindowRequest
from flower_desloc.flower.policy import Policy

Seconds = Callable[[str, int, int], float]
"""From the type of a message, the client, and the step after which a window begins."""

NEVER = 10.0**9


class Clock:
    """Takes the place of ``time``'s, and lets replies arrive after so many seconds."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.expire = NEVER
        """Seconds after which a node has answered or is thought to have lost the request."""

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds

    def delay(self, grid: InProcessGrid, seconds: Seconds) -> None:
        """Let each node's reply to a message be there after so many seconds."""
        push, pull = grid.push_messages, grid.pull_messages
        arrives: dict[str, float] = {}
        busy: dict[int, float] = {}

        def pushed(messages: Iterable[Message]) -> Iterable[str]:
            for message in messages:
                node, kind = message.metadata.dst_node_id, message.metadata.message_type
                start: Any = message.content["config"]["start-step"] if message.content else 0
                [message_id] = push([message])
                assert busy.get(node, 0) <= self.now, "it is asked before it has answered"
                arrives[message_id] = self.now + seconds(kind, node - 1, start)
                busy[node] = min(arrives[message_id], self.now + self.expire)
                yield message_id

        def pulled(message_ids: Iterable[str]) -> Iterable[Message]:
            return pull([i for i in message_ids if arrives[i] <= self.now])

        grid.push_messages = pushed  # type: ignore[method-assign]
        grid.pull_messages = pulled  # type: ignore[method-assign]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    # Fewer looks, which are all that takes time here.
    monkeypatch.setattr("flower_desloc.flower.members._POLL_INTERVAL", 0.5)
    monkeypatch.setattr("flower_desloc.flower.exchange._LONGEST_IN_MEMORY", 0.5)
    return clock


class Timed:
    """A run of eight windows of two steps, whose three clients answer at once unless stated."""

    def __init__(self, clock: Clock, folder: Path, seconds: Seconds, policy: Policy, **options):
        self.clock = clock
        self.run = Run("adam", (2, 4, 8), folder, num_steps=16, policy=policy, **options)
        self.ends: list[float] = []
        self.run.watch.after.append(lambda record: self.ends.append(clock.now))
        clock.delay(self.run.grid, seconds)

    def took(self) -> list[float]:
        """The seconds of every window, the greeting first."""
        return [b - a for a, b in zip([1000.0, *self.ends], self.ends, strict=False)]

    def events(self) -> list[tuple[int, str, str]]:
        records = self.run.watch.records
        return [(r.step, e.kind, e.client) for r in records for e in r.events]

    def averaged(self) -> list[str]:
        """The clients of every window, by number."""
        records = self.run.watch.records[1:]
        return ["".join(name[-1] for name in sorted(record.clients)) for record in records]


def going_on(**settings) -> Policy:
    return Policy(on_failure="continue", **settings)


def train(seconds: Callable[[int, int], float]) -> Seconds:
    return lambda kind, client, start: seconds(client, start) if kind == "train" else 0.0


# ------------------------------------------------------------------------------------------ Hangs


def test_a_client_that_hangs_is_waited_for_once(clock, tmp_path):
    hangs = train(lambda client, start: NEVER if client == 1 and start >= 4 else 1.0)
    timed = Timed(clock, tmp_path, hangs, going_on(timeout=50))
    timed.run.strategy.start(timed.run.grid, timed.run.initial, observer=timed.run.watch)
    assert timed.averaged() == ["012", "012", *["02"] * 6]
    assert timed.events() == [(6, "late", "client-1"), (8, "left", "client-1")]
    assert "in 50 s (federation.timeout)" in timed.run.watch.records[3].left_out["client-1"]
    _, *windows = timed.took()
    assert max(windows) == windows[2] == pytest.approx(50, abs=2)
    assert clock.now - 1000 < 65  # the goodbye too does without it


@pytest.mark.parametrize(
    ("usual", "waited", "words"),
    [(20.0, 100, "5 times"), (1.0, 60, "at least 60 s"), (900.0, 3600, "federation.timeout")],
)
def test_a_window_takes_at_most_five_times_what_the_slowest_client_took_last(
    usual, waited, words, clock, tmp_path
):
    hangs = train(lambda client, start: NEVER if client == 2 and start == 4 else usual + client)
    timed = Timed(clock, tmp_path, hangs, going_on())
    timed.run.strategy.start(timed.run.grid, timed.run.initial, observer=timed.run.watch)
    # After the last reply, which is client 1's.
    assert timed.took()[3] == pytest.approx(waited + usual, rel=0.12)
    assert words in timed.run.watch.records[3].left_out["client-2"]


def test_a_first_window_may_take_the_whole_timeout(clock, tmp_path):
    compiles = train(lambda client, start: 3000.0 if client == 1 and start == 0 else 1.0)
    timed = Timed(clock, tmp_path, compiles, going_on())
    timed.run.start()
    assert timed.events() == []
    assert timed.averaged() == ["012"] * 8


@pytest.mark.parametrize(("steps", "waited"), [(5, 150), (10, 150), (100, 1500)])
def test_a_longer_window_may_take_longer(steps, waited, clock):
    grid = InProcessGrid(lambda message, _: Message(RecordDict(), reply_to=message), [{}])
    clock.delay(grid, lambda kind, client, start: NEVER if start else 30.0)
    exchange = Exchange(grid, 3600, {})
    windows = [
        WindowRequest(run_key="r", stop=10),
        WindowRequest(run_key="r", start=10, stop=10 + steps),
    ]
    for window, expected in zip(windows, [30, waited], strict=True):
        began = clock.now
        [reply] = exchange.replies([exchange.request(1, "train", window)])
        assert clock.now - began == pytest.approx(expected, rel=0.03)
    assert reply.has_error()


class Arrival:
    """Takes the place of the event that is set when the arrays of a reply have come."""

    def __init__(self, clock: Clock, at: float) -> None:
        self.clock, self.at = clock, at

    def is_set(self) -> bool:
        return self.clock.now >= self.at

    def wait(self, seconds: float) -> bool:
        self.clock.now = min(self.clock.now + seconds, max(self.at, self.clock.now))
        return self.is_set()


@pytest.mark.parametrize(("has_arrays", "most"), [(False, 1000), (True, 300)])
def test_a_reply_is_seldom_looked_for_before_its_arrays_have_come(clock, has_arrays, most):
    grid = InProcessGrid(lambda message, _: Message(RecordDict(), reply_to=message), [{}])
    clock.delay(grid, lambda *_: 100.0)
    looks = Mock(side_effect=grid.pull_messages)
    grid.pull_messages = looks  # type: ignore[method-assign]
    arrival = Arrival(clock, 1099.5) if has_arrays else None
    carrier: Any = SimpleNamespace(
        attach=lambda message: 0,
        sent=lambda: None,
        arrival=lambda node: arrival,
        collect=lambda reply, node: 0,
        release=lambda node: None,
    )
    exchange = Exchange(grid, 3600, {}, carrier=carrier)
    [_] = exchange.replies([exchange.request(1, "train", WindowRequest(run_key="r", stop=10))])
    assert looks.call_count < most
    assert clock.now - 1100 < (0.05 if has_arrays else 0.6)


# ------------------------------------------------------------------------------------ Late replies


def test_a_late_client_takes_part_again_and_has_kept_its_work(clock, tmp_path):
    """Two windows end without client 1, whose reply for the steps 5 and 6 takes 170 s."""
    late = train(lambda client, start: 170.0 if client == 1 and start == 4 else 20.0 + client)
    timed = Timed(clock, tmp_path, late, going_on())
    states = timed.run.start()
    back = timed.averaged().index("012", 2)
    assert timed.averaged() == ["012"] * 2 + ["02"] * (back - 2) + ["012"] * (8 - back)
    assert back == 5
    step = 2 * (back + 1)
    assert timed.events() == [
        (6, "late", "client-1"),
        (8, "left", "client-1"),
        (step, "returned", "client-1"),
    ]
    (what,) = [e.what for r in timed.run.watch.records for e in r.events if e.kind == "returned"]
    assert "too late to be averaged" in what
    assert_close(
        states,
        oracle(
            timed.run,
            present=lambda m, t: m != 1 or not 6 <= t < 2 * back,
            heard=lambda m, t: m != 1 or not 4 <= t < 6,
        ),
    )


def test_a_quorum_waits_for_a_late_client_and_nothing_is_lost(clock, tmp_path):
    late = train(lambda client, start: 200.0 if client == 1 and start == 4 else 20.0)
    policy = going_on(min_clients=3)
    timed = Timed(clock, tmp_path / "late", late, policy)
    calm = Timed(clock, tmp_path / "calm", train(lambda client, start: 20.0), policy)
    assert_same(timed.run.start(), calm.run.start())
    kinds = [kind for _, kind, _ in timed.events()]
    assert kinds == ["late", "repeated", "returned"]


def test_a_run_whose_quorum_hangs_ends_with_its_name(clock, tmp_path):
    hangs = train(lambda client, start: NEVER if client == 1 and start >= 4 else 1.0)
    timed = Timed(clock, tmp_path, hangs, going_on(min_clients=3, timeout=50, repeats=1))
    said = r"min_clients=3.*no answer from client-1; federation.timeout=50 is the longest wait"
    with pytest.raises(FederationError, match=said):
        timed.run.start()
    assert clock.now - 1000 < 3 * 60


def test_a_client_that_was_late_with_an_error_is_asked_again(clock, tmp_path):
    late = train(lambda client, start: 200.0 if client == 1 and start == 4 else 20.0)
    timed = Timed(clock, tmp_path, late, going_on())
    run = timed.run

    def fail(message: Message) -> None:
        if (
            message.metadata.message_type == "train"
            and message.content["config"]["start-step"] == 4
        ):
            raise OSError("stale file handle")

    app = run.grid.client_app

    def client_app(message: Message, context: Context) -> Message:
        if context.node_id == 2:
            fail(message)
        return app(message, context)

    run.grid.client_app = client_app
    run.start()
    kinds = [kind for _, kind, _ in timed.events()]
    assert kinds == ["late", "left", "failed", "returned"]
    assert timed.averaged()[-1] == "012"


def test_a_request_that_flower_no_longer_keeps_is_not_asked_for(clock, tmp_path, monkeypatch):
    """In a simulation Flower raises a KeyError for one that has expired, after twelve hours."""
    monkeypatch.setattr("flower_desloc.flower.exchange._LONGEST_IN_MEMORY", 300)
    hour = 3600.0
    hangs = train(lambda client, start: NEVER if client == 1 and start == 2 else 3 * hour)
    timed = Timed(clock, tmp_path, hangs, going_on(timeout=4 * hour))
    pull = timed.run.grid.pull_messages
    asked: dict[str, float] = {}

    def pulled(message_ids: Iterable[str]) -> Iterable[Message]:
        for message_id in message_ids:
            assert clock.now - asked.setdefault(message_id, clock.now) < 12 * hour
        return pull(message_ids)

    timed.run.grid.pull_messages = pulled  # type: ignore[method-assign]
    clock.expire = 10 * hour
    timed.run.strategy.start(timed.run.grid, timed.run.initial, observer=timed.run.watch)
    kinds = [kind for _, kind, client in timed.events()]
    assert kinds == ["late", "left", "failed", "returned"]
    assert timed.averaged()[-1] == "012"


# ------------------------------------------------------------------- Greeting, evaluation, goodbye


def test_a_client_that_greets_late_joins_without_another_greeting(clock, tmp_path):
    def seconds(kind: str, client: int, start: int) -> float:
        return {"query.hello": 90.0 if client == 2 else 0.0, "train": 20.0}.get(kind, 0.0)

    timed = Timed(clock, tmp_path, seconds, going_on(timeout=50))
    timed.run.strategy.start(timed.run.grid, timed.run.initial, observer=timed.run.watch)
    greeted = [m for m in timed.run.grid.sent if m.metadata.message_type == "query.hello"]
    assert len(greeted) == 3
    assert timed.events() == [(0, "late", "node 3"), (6, "joined", "client-2")]
    assert timed.averaged() == ["01", "01", *["012"] * 6]
    assert timed.run.watch.joiners == ["client-2"]


def test_a_client_that_hangs_in_its_evaluation_is_not_waited_for_again(clock, tmp_path):
    def seconds(kind: str, client: int, start: int) -> float:
        return NEVER if kind == "evaluate" and client == 1 and start == 4 else 1.0

    options = {"evaluate_clients": True, "eval_every": 4}
    timed = Timed(clock, tmp_path, seconds, going_on(timeout=50), **options)
    timed.run.strategy.start(timed.run.grid, timed.run.initial, observer=timed.run.watch)
    assert timed.averaged() == ["012", "012", *["02"] * 6]
    assert [kind for _, kind, _ in timed.events()] == ["late", "left"]
    assert clock.now - 1000 < 80


# ------------------------------------------------------------------------------------------- Grace


def test_grace_ends_the_wait_for_the_rest_once_the_quorum_is_there(clock, tmp_path):
    slow = train(lambda client, start: 12.0 if client == 0 else 2.0)
    timed = Timed(clock, tmp_path, slow, going_on(min_clients=2, grace=5.0))
    timed.run.strategy.start(timed.run.grid, timed.run.initial, observer=timed.run.watch)
    _, *windows = timed.took()
    assert windows[0] == pytest.approx(7, abs=0.5)
    assert max(windows) < 8
    assert "federation.grace" in timed.run.watch.records[1].left_out["client-0"]
    assert timed.averaged()[0] == "12"
    assert "returned" in [kind for _, kind, _ in timed.events()]


def test_grace_that_is_long_enough_changes_no_bit(clock, tmp_path):
    """Replies arrive in the opposite order, and are held until their turn."""
    opposite = train(lambda client, start: 10.0 - client)
    graced = Timed(clock, tmp_path / "graced", opposite, going_on(min_clients=2, grace=5.0))
    calm = Timed(clock, tmp_path / "calm", train(lambda client, start: 1.0), going_on())
    assert_same(graced.run.start(), calm.run.start())
    assert graced.events() == []


def test_grace_needs_on_failure_continue():
    with pytest.raises(ValueError, match=r"grace=5.*on_failure=continue"):
        Policy(grace=5.0)


# ------------------------------------------------------------------------------------- Simulation

STUCK = """\
import os
import sys
import time

from light_task import Light


class Stuck(Light):
    def client_data(self, site):
        while site.partition == 1:
            time.sleep(1)
        return super().client_data(site)
"""
SETTINGS = [
    *("quickstart", "task=stuck:Stuck", "run.steps=4", "run.eval_every=0"),
    *("sync.params=2", "sync.exp_avg=2", "sync.exp_avg_sq=4", "evaluation.federated=false"),
    *("simulation.num_clients=3", "federation.on_failure=continue", "federation.timeout=15"),
]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_simulation_ends_although_a_client_hangs(tmp_path):
    (tmp_path / "stuck.py").write_text(STUCK)
    desloc = [Path(sys.executable).with_name("desloc"), "run", *SETTINGS, "--workers", "2"]
    mark = {"STUCK_RUN": str(tmp_path), **WITH_LIGHT}
    said = output_of(desloc, cwd=tmp_path, env=os.environ | mark, timeout=500)
    assert "its process is killed" in said
    assert "Traceback" not in said
    assert summary(next(tmp_path.glob("runs/*")))["status"] == "completed"
    assert processes_with("STUCK_RUN", str(tmp_path)) == []
