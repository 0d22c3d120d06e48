"""Sites that the operator of a run invites, pauses and ejects while it goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
from command import accepted, refused
from tiny import TINY, summary, train

from flower_desloc.app.engines import in_process
from flower_desloc.app.runs.roster import Governed, Roster
from flower_desloc.flower.failures import FederationError
from flower_desloc.flower.inprocess import InProcessGrid

SHORT = (*TINY, "run.steps=10", "run.eval_every=0", "sync.params=2", "run.name=a")
TOLERANT = ("federation.min_clients=1", "federation.on_failure=continue")


def windows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]


@pytest.fixture
def before_step(monkeypatch, tmp_path):
    """Let the operator type commands before the window that starts at a step."""

    def type_them(commands: dict[int, list[str]]) -> None:
        class Grid(InProcessGrid):
            def push_messages(self, messages):
                messages = list(messages)
                for message in messages:
                    config: Any = message.content.get("config", {})
                    if message.metadata.message_type == "train":
                        for words in commands.pop(config["start-step"], []):
                            accepted("members", tmp_path / "a", *words.split("/"))
                return super().push_messages(messages)

        monkeypatch.setattr(in_process, "InProcessGrid", Grid)

    return type_them


def test_a_change_holds_from_the_next_window_and_is_in_the_record(before_step, tmp_path):
    commands = {
        2: ["pause/client-1/--reason/an audit"],
        4: ["resume/client-1"],
        6: ["eject/client-1"],
    }
    before_step(commands)
    folder = train(tmp_path, *SHORT, *TOLERANT)
    found = windows(folder)
    assert [len(window["clients"]) for window in found] == [2, 2, 1, 2, 1]
    events = [(event["kind"], event["what"]) for window in found for event in window["events"]]
    assert events == [
        ("left", "client-1 was paused by the operator: an audit"),
        ("returned", events[1][1]),
        ("left", "client-1 was ejected by the operator"),
    ]
    states = [json.loads(line) for line in (folder / "members.jsonl").read_text().splitlines()]
    assert [line["state"] for line in states if line["site"] == "client-1"] == [
        "active", "paused", "active", "ejected",
    ]  # fmt: skip
    assert len({line["node"] for line in states if line["site"] == "client-1"}) == 1
    # What it sent is accounted for: six windows' streams of both, and two of one.
    sent = sum(window["bytes_up"]["params"] for window in found)
    assert summary(folder)["bytes"]["measured"]["up"]["params"] == sent
    table = accepted("members", folder)
    assert "client-0  active" in table
    assert "windows 5" in table
    assert "client-1  ejected" in table
    assert "windows 3" in table
    assert "is complete: it has no window left" in refused("members", folder, "pause", "client-0")


def test_a_site_that_is_invited_again_is_active_once_it_takes_part(before_step, tmp_path):
    before_step({2: ["eject/client-1"], 6: ["invite/client-1"]})
    folder = train(tmp_path, *SHORT, *TOLERANT)
    assert [len(window["clients"]) for window in windows(folder)] == [2, 2, 1, 1, 2]
    assert Roster(folder / "members.jsonl").sites["client-1"].state == "active"


def test_a_run_that_begins_with_invitations_has_only_these_sites(tmp_path):
    accepted("members", tmp_path / "a", "invite", "client-0", "site-b")
    folder = train(tmp_path, *SHORT, *TOLERANT)
    assert folder == tmp_path / "a"
    assert [list(window["clients"]) for window in windows(folder)] == [["client-0"]] * 5
    roster = Roster(folder / "members.jsonl")
    assert {name: site.state for name, site in roster.sites.items()} == {
        "client-0": "active",
        "site-b": "invited",
    }
    again = train(tmp_path, *SHORT, *TOLERANT)  # as after an early failure
    assert again == tmp_path / "a-2"
    assert [list(window["clients"]) for window in windows(again)] == [["client-0"]] * 5


def test_a_key_that_was_ejected_has_no_other_name(tmp_path):
    governed = Governed(roster := Roster(tmp_path / "members.jsonl"))
    for node in (7, 8):  # it has had two keys
        assert governed.refusal("a", node) == ""
        governed.joined("a", node)
    roster.set("a", "ejected", reason="it left the consortium")
    for name, node in (("a", 7), ("a", 9), ("b", 7), ("b", 8), (None, 7), ("", 8)):
        assert governed.refusal(name, node) == (
            "a was ejected by the operator: it left the consortium"
        )
    assert governed.refusal("b", 9) == ""
    roster.set("a", "invited")
    assert governed.refusal("a", 7) == ""
    assert governed.refusal(None, 10) == ""  # it may be one that was invited
    assert "not invited" in governed.refusal("", 10)  # it did not say
    assert "not invited" in governed.refusal("b", 9)


def test_an_ejected_node_takes_nobodys_place(tmp_path, monkeypatch):
    """It comes first, and says that it is client-1."""

    def grid(app, nodes, **options):
        return InProcessGrid(app, [{**nodes[0], "name": "client-1"}, nodes[1]], **options)

    monkeypatch.setattr(in_process, "InProcessGrid", grid)
    (tmp_path / "a").mkdir()
    roster = Roster(tmp_path / "a" / "members.jsonl")
    roster.set("client-0", "ejected", node=1)
    folder = train(tmp_path, *SHORT, *TOLERANT)
    assert [list(window["clients"]) for window in windows(folder)] == [["client-1"]] * 5
    assert {line["node"] for line in map(json.loads, roster.path.read_text().splitlines())} == {
        1,
        2,
    }


def test_a_node_that_was_not_invited_and_fails_does_not_end_the_run(tmp_path, monkeypatch):
    def grid(app, nodes, **options):
        return InProcessGrid(app, [nodes[0], {"name": "stranger"}], **options)

    monkeypatch.setattr(in_process, "InProcessGrid", grid)
    accepted("members", tmp_path / "a", "invite", "client-0")
    folder = train(tmp_path, *SHORT, "federation.min_clients=1")
    assert [list(window["clients"]) for window in windows(folder)] == [["client-0"]] * 5
    first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert [(event["kind"], event["client"]) for event in first["events"]] == [
        ("refused", "node 2")
    ]


def test_half_a_line_never_counted(tmp_path):
    roster = Roster(tmp_path / "members.jsonl")
    roster.set("a", "paused")
    with roster.path.open("a") as file:
        file.write('{"site": "a", "sta')
    assert roster.sites["a"].state == "paused"
    roster.set("b", "invited")
    again = Roster(roster.path)
    assert {name: site.state for name, site in again.sites.items()} == {
        "a": "paused",
        "b": "invited",
    }


def test_below_the_quorum_the_run_stops_and_names_who_was_excluded(before_step, tmp_path):
    before_step({2: ["pause/client-1/--reason/an audit"]})
    with pytest.raises(FederationError, match="client-1 was paused by the operator: an audit"):
        train(tmp_path, *SHORT, "federation.min_clients=2", "federation.timeout=0.2")
    (run,) = (path.parent for path in tmp_path.glob("*/config.yaml"))
    assert "1 can take part, and federation.min_clients=2: the run waits" in accepted(
        "members", run
    )
    assert "the run waits" not in accepted("members", run, "resume", "client-1")


def test_a_change_that_is_none_is_refused(tmp_path):
    assert "is not the folder of a run" in refused("members", tmp_path)
    (tmp_path / "config.yaml").write_text("")
    assert "no site has come yet" in accepted("members", tmp_path)
    assert "pause: name the sites" in refused("members", tmp_path, "pause")
    accepted("members", tmp_path, "invite", "b", "a")
    assert "a is invited already" in refused("members", tmp_path, "invite", "a")
    assert "c is not a site of this run; it has a, b" in refused("members", tmp_path, "eject", "c")
    accepted("members", tmp_path, "eject", "b")
    assert "b is ejected; invite it again" in refused("members", tmp_path, "resume", "b")
    (tmp_path / "members.jsonl").write_text('{"site": "a", "state": "gone", "since": ""}\n')
    assert "state must be one of" in refused("members", tmp_path)
