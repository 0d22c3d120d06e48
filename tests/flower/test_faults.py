"""A failed client costs the window its contribution and nothing else, and is recorded by name."""

import json
import re
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from faults import Faults, Phase, Spoil
from federation import OPTIMIZERS, assert_close
from flower_path import Run
from flwr.app import Context, Error, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from flower_desloc import SyncSchedule
from flower_desloc.app.runs.recorder import to_line
from flower_desloc.flower.arrays import to_record
from flower_desloc.flower.exchange import Exchange, Probe
from flower_desloc.flower.inprocess import InProcessGrid
from flower_desloc.flower.policy import Policy

PHASES: list[Phase] = ["starting", "training", "saving", "uploading"]
COINS = {"adopt": None, "adam": 4}
"""ADOPT is run with periods, Adam with coins."""


def faulty(name: str, coins: int | None, folder: Path, timeout: float = 0.02) -> Faults:
    """Three clients, twelve steps; with periods the windows end at 2 3 4 5 6 8 9 10 12."""
    schedule = SyncSchedule(OPTIMIZERS[name].periods(2, 3, 5), coin_seed=coins)
    return Faults(
        Run(name, schedule, folder, policy=Policy(on_failure="continue", timeout=timeout))
    )


def check(faults: Faults) -> None:
    """What every client holds in the end is the oracle's.

    The lines of metrics have the events of the faults, in the window and of the client they
    belong to.
    """
    assert_close(faults.run.start(), faults.expected())
    for record in faults.run.watch.records[1:]:
        line = json.loads(json.dumps(to_line(record)))
        here = [fault for fault in faults.planned if fault.window == record.round]
        told = [fault for fault in here if fault.kind is not None]
        late = {f"client-{f.node}" for f in faults.planned
                if f.kind == "late" and f.window == record.round - 1}  # fmt: skip
        # Names and shapes are looked at before values: the order is of no account.
        told.sort(key=lambda fault: fault.node)
        returned = [event for event in line["events"] if event["kind"] == "returned"]
        assert {event["client"] for event in returned} == late
        events = [event for event in line["events"] if event not in returned]
        events.sort(key=lambda event: event["client"])
        for fault, event in zip(told, events, strict=True):
            assert (event["kind"], event["client"]) == (fault.kind, f"client-{fault.node}")
            assert re.search(fault.words, event["what"])
        out = {f"client-{f.node}" for f in here if f.outcome in ("undone", "unheard")}
        assert line["left_out"].keys() == out


# ------------------------------------------------------------------------------------------ Faults


def with_vector(values: torch.Tensor) -> Spoil:
    """Replace one tensor of the first stream of a reply."""

    def spoil(content: RecordDict) -> None:
        content.array_records[min(content.array_records)]["vector"] = to_record({"": values})[""]

    return spoil


# test_malformed_replies.py has thousands; these show that the reason is recorded.
SPOILS: dict[str, tuple[Spoil, str]] = {
    "NaN": (with_vector(torch.full((7,), torch.nan, dtype=torch.float64)), "not finite"),
    "huge values": (with_vector(torch.full((7,), 1.7e308, dtype=torch.float64)), "too large"),
    "another shape": (with_vector(torch.zeros(6, dtype=torch.float64)), r"shape \(6,\)"),
    "another type": (with_vector(torch.zeros(7)), "float32"),
    "nothing": (lambda content: content.clear(), "no MetricRecord"),
}
FAULTS: dict[str, Callable[..., None]] = {
    **{f"killed while {phase}": partial(Faults.fail_at, phase=phase) for phase in PHASES},
    **{
        f"a reply with {what}": partial(Faults.spoil_at, spoil=spoil, words=words)
        for what, (spoil, words) in SPOILS.items()
    },
    "its state is lost": Faults.lose_state_at,
    "its loss is infinite": Faults.diverge_at,
    "it exits": Faults.exit_at,
    "a late reply": Faults.be_late_at,
    "a reply that comes twice": Faults.answer_twice_at,
    "a full disk": Faults.fill_disk_at,
}
AFTER_THE_FIRST_WINDOW: dict[str, Callable[..., None]] = {
    "its state is damaged": Faults.damage_state_at,
    "its reply to the window before": Faults.answer_the_last_at,
}


@pytest.mark.parametrize(
    ("name", "window", "what"),
    [
        *(("adopt", 1, f"killed while {phase}") for phase in PHASES),
        *(("adopt", 3, what) for what in FAULTS | AFTER_THE_FIRST_WINDOW),
        *(("adam", 3, what) for what in ("its state is lost", "a late reply")),
    ],
)
def test_a_fault_costs_only_the_clients_contribution(name, window, what, tmp_path):
    faults = faulty(name, COINS[name], tmp_path)
    (FAULTS | AFTER_THE_FIRST_WINDOW)[what](faults, node=1, window=window)
    check(faults)


@given(
    st.sampled_from(["adopt", "adam"]),
    st.none() | st.integers(0, 5),
    st.dictionaries(
        st.tuples(st.integers(1, 2), st.integers(1, 5)),
        st.sampled_from(sorted(FAULTS)),
        max_size=8,
    ),
)
def test_any_combination_of_faults_costs_only_the_contributions(tmp_path_factory, name, coins, at):
    """Client 0 alone is spared, so that there is always somebody to average."""
    faults = faulty(name, coins, tmp_path_factory.mktemp("run"))
    for (node, window), what in sorted(at.items()):
        FAULTS[what](faults, node=node, window=window)
    check(faults)


# ------------------------------------------------------------------------------ Comings and goings


def events(run: Run) -> list[tuple[int, str, str]]:
    return [(r.step, e.kind, e.client) for r in run.watch.records for e in r.events]


def test_clients_that_come_and_go_are_recorded(tmp_path):
    faults = faulty("adam", None, tmp_path)
    run = faults.run
    # Client 1 is away from step 3 to 6, client 2 joins at 5.
    run.present = lambda m, t: (m != 1 or not 3 <= t < 6) and (m != 2 or t >= 5)
    run.start()
    assert events(run) == [
        (4, "left", "client-1"),
        (6, "joined", "client-2"),
        (8, "returned", "client-1"),
    ]


def test_a_node_that_has_lost_its_request_is_not_waited_for(tmp_path, monkeypatch):
    """Flower tells of a dead node only while it is dead, and never hands out a message twice."""
    monkeypatch.setattr("flower_desloc.flower.exchange.Probe", partial(Probe, after=0.0))
    monkeypatch.setattr(
        "flower_desloc.flower.internals.is_grid", lambda _, name: name == "HttpGrid"
    )
    faults = faulty("adam", None, tmp_path, timeout=10**6)
    faults.lose_request_at(node=2, window=3)  # what it was asked is gone with its process
    assert_close(faults.run.start(), faults.expected())
    assert events(faults.run) == [(4, "failed", "client-2")]
    assert "has lost the request" in faults.run.watch.records[3].left_out["client-2"]


def echo(message: Message, _: Context) -> Message:
    return Message(RecordDict(), reply_to=message)


def ask(grid: InProcessGrid, probe: Probe | None = None) -> Message:
    """Return the reply of the grid's only node to a message."""
    [node] = grid.get_node_ids()
    exchange = Exchange(grid, 60, {})
    exchange.probe = probe
    [reply] = exchange.replies([Message(RecordDict(), node, "train")])
    return reply


def there(node: int) -> Message:
    return Message(RecordDict(), node, "query.there")


@pytest.mark.parametrize("looks", range(1, 7))
def test_a_slow_node_is_probed_and_waited_for(looks):
    """It answers in turn, and both answers are there at whatever moment the server looks."""
    sent: list[Message] = []
    looked = [0]

    class Node(InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            sent.extend(messages)
            return super().push_messages(messages)

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            (message_id,) = message_ids
            looked[0] += 1
            if looked[0] >= looks:
                return super().pull_messages([message_id])
            if message_id == sent[0].metadata.message_id:
                return []
            return [Message(Error(5, "Node Unavailable"), reply_to=sent[-1])]  # not from the node

    assert not ask(Node(echo, [{}]), Probe(there, after=0.0)).has_error()
    types = [m.metadata.message_type for m in sent]
    assert types == ["train", *["query.there"] * (len(sent) - 1)]
    assert len(sent) == [1, 2, 2, 2, 3, 3][looks - 1]  # again where the question is gone


class Slow(InProcessGrid):
    """A node whose replies are there so many seconds after they were asked for."""

    def __init__(self, seconds: float) -> None:
        super().__init__(echo, [{}])
        self.seconds = seconds
        self.asked: dict[str, float] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for message_id in super().push_messages(messages):
            self.asked[message_id] = time.monotonic()
            yield message_id

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        now = time.monotonic()
        there = [i for i in message_ids if now >= self.asked[i] + self.seconds]
        return super().pull_messages(there)


@pytest.mark.parametrize(
    ("deployment", "seconds", "longest"),
    [(False, 60, 0.02), (False, 0.1, 0.005), (True, 2, 0.1), (True, 60, 0.25)],
)
def test_between_two_looks_for_a_reply_passes_little_time(
    deployment, seconds, longest, monkeypatch
):
    pauses = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: sum(pauses))
    monkeypatch.setattr(time, "sleep", pauses.append)
    if deployment:
        monkeypatch.setattr(
            "flower_desloc.flower.internals.is_grid", lambda _, name: name == "HttpGrid"
        )
    assert not ask(Slow(seconds)).has_error()
    assert longest / 2 < max(pauses) <= 1.1 * longest


def test_a_probe_is_sent_only_after_more_silence_than_before_any_reply():
    grid = Slow(0.4)
    probe = Probe(there, after=0.1)
    numbers = []
    for _ in range(3):
        grid.asked.clear()
        assert not ask(grid, probe).has_error()
        numbers.append(len(grid.asked))
    assert numbers == [2, 1, 1]
    assert 0.4 < probe.after < 60


def test_a_request_that_flower_does_not_accept_fails_at_once():
    grid = InProcessGrid(echo, [{}])
    # As Flower's link says it.
    grid.push_messages = lambda messages: ["" for _ in messages]  # type: ignore[method-assign]
    assert ask(grid).error.reason == "Flower did not accept the request"


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("<class 'OSError'>:<'cannot write \n this'>", "cannot write this"),
        ("<class 'a.B'>:<'\nException B occurred. Message: lower optimizer.lr'>",
         "lower optimizer.lr"),
        ("ClientApp stopped responding.", "ClientApp stopped responding."),
        ("\x1b[2Jno disk", "\N{REPLACEMENT CHARACTER}[2Jno disk"),
        ("\x1b[36mray::train()\x1b[39m died", "ray::train() died"),
        ("", "no reason given"),
        (None, "no reason given"),
    ],
    ids=["a client process", "Ray's actor", "Flower's own", "an escape", "Ray's colours", "empty",
         "none"],
)  # fmt: skip
def test_a_clients_message_is_shown_without_flowers_wrapping(reason, said):
    grid = InProcessGrid(lambda m, _: Message(Error(1, reason), reply_to=m), [{}])
    assert ask(grid).error.reason == said
