"""Secure sums over the whole federated path: the weights of a plain run, and nothing of a site."""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from faults import Faults
from federation import Quadratic
from flower_path import RUN, Run, free_address
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord
from safetensors.torch import load_file
from tiny import TINY, train

from flower_desloc import NEVER, Checkpoint, Checkpoints, Policy, SyncSchedule, last_checkpoint
from flower_desloc.core.averaging import Drift
from flower_desloc.core.outer import OuterOptimizer
from flower_desloc.flower.arrays import from_record, records_of, to_array, to_record
from flower_desloc.flower.failures import ClientError, FederationError
from flower_desloc.flower.flight import body
from flower_desloc.flower.messages import GOODBYE, WindowRequest
from flower_desloc.flower.protection import SECURE_KEYS
from flower_desloc.flower.secure.at_server import SecureDesLoc, SecureRequests
from flower_desloc.flower.secure.record import ASK, SECURE
from flower_desloc.secure.__main__ import main
from flower_desloc.secure.agreement import stated
from flower_desloc.secure.identity import introduce

PERIODS = (2, 3, 6)


@pytest.fixture(autouse=True)
def _keys(tmp_path, monkeypatch):
    introduce(tmp_path / "keys", [f"client-{m}" for m in range(7)])
    monkeypatch.setenv(SECURE_KEYS, str(tmp_path / "keys"))


STEPS = 6
ONE = {"periods": (2, 2, 2), "num_steps": 2}
"""A run of one window."""
TWO = {**ONE, "num_steps": 4}


def secure(tmp_path, *, clients=4, periods=PERIODS, policy=None, strategy=SecureDesLoc, **options):
    options = {"num_steps": STEPS, **options}
    policy = policy or Policy(min_clients=3, on_failure="continue", repeats=1)
    return Run(
        "adam", periods, tmp_path / "secure", num_clients=clients, strategy=strategy,
        policy=policy, **options,
    )  # fmt: skip


def plain(tmp_path, monkeypatch, *, periods=PERIODS, **options):
    options = {"num_clients": 4, "num_steps": STEPS, **options}
    run = Run("adam", periods, tmp_path / "plain", **options)
    with monkeypatch.context() as patch:
        patch.delenv(SECURE_KEYS)
        run.start()
    return run


def at_phase(phase, nodes, *, window=1, kind=ASK):
    """Return what answers a question of a phase of one window by an error, at some nodes."""

    def instead(asked: Message) -> Message | None:
        config = records_of(ConfigRecord, asked.content)
        is_asked = asked.metadata.message_type == kind and asked.metadata.dst_node_id in nodes
        if not is_asked or asked.metadata.group_id != str(window):
            return None
        if kind == ASK and config[SECURE]["phase"] != phase:
            return None
        return Message(Error(7, "the site is gone"), reply_to=asked)

    return instead


def close(one: Mapping[str, Any], other: Mapping[str, Any], *, atol: float = 2e-6) -> None:
    for key in one:
        torch.testing.assert_close(one[key], other[key], rtol=0, atol=atol)


def test_a_run_by_secure_sums_ends_with_the_weights_of_the_plain_run(tmp_path, monkeypatch):
    run = secure(tmp_path)
    ours, theirs = run.start(), plain(tmp_path, monkeypatch)
    for mine, other in zip(ours, theirs.states, strict=True):
        for name in mine:
            close(mine[name], other[name])
    for record, other in zip(run.watch.records[1:], theirs.watch.records[1:], strict=True):
        assert record.streams == other.streams
        assert record.train_loss == pytest.approx(other.train_loss, abs=1e-5)
        for name, drift in record.drift.items():
            assert drift.moved == pytest.approx(other.drift[name].moved, rel=1e-5)
    assert all(len(record.clients) == 4 for record in run.watch.records[1:])
    assert not any(record.events for record in run.watch.records)


@pytest.mark.usefixtures("by_flight")
def test_masked_streams_may_travel_beside_messages(tmp_path):
    policy = Policy(min_clients=3, data_address=free_address())
    run = secure(tmp_path, policy=policy)
    beside = run.start()
    asked = [m for m in run.grid.sent if m.metadata.message_type == "train"]
    assert not any(records_of(ArrayRecord, m.content) for m in asked)
    inside = secure(tmp_path / "inside").start()
    for ours, theirs in zip(beside, inside, strict=True):
        for name in ours:
            close(ours[name], theirs[name])


def test_the_server_is_sent_masks_and_nothing_else_of_a_site(tmp_path):
    run, sent = secure(tmp_path), []
    run.grid.on_training(lambda reply: sent.append(reply.content))
    run.start()
    like = run.strategy.state.reply_templates
    for content in sent:
        records = records_of(ArrayRecord, content)
        rows = body.expected_rows(records, like, {}, {})
        assert rows
        assert body.views(rows, records)  # as Arrow Flight carries them
        for name, record in records_of(ArrayRecord, content).items():
            data = torch.cat(list(from_record(record).values()))
            assert data.dtype == torch.uint8
            assert len(data) == {"params": 4, "exp_avg": 6, "exp_avg_sq": 8}[name] * 23
            assert 100 < data.double().mean() < 155, name
        metrics = records_of(MetricRecord, content)["metrics"]
        assert metrics["num-examples"] == 1
        for hidden in ("losses", "grad-norms"):
            assert hidden not in metrics
        for hidden in ("train-loss", "param-norm"):
            assert metrics[hidden] != metrics[hidden]
    assert len({str(content["metrics"]["masked-loss"]) for content in sent}) == len(sent)
    info = run.watch.run.clients["client-0"]
    assert info.num_examples is None
    assert info.data_version is None


@pytest.mark.parametrize("phase", ["keys", "train", "confirm"])
def test_a_site_that_is_gone_in_one_phase_is_left_out_or_in_the_sum(tmp_path, phase):
    run = secure(tmp_path, **TWO)
    run.grid.instead = at_phase(phase, {2}, kind=phase if phase == "train" else ASK)
    run.start()
    first, second = run.watch.records[1:3]
    is_in = phase in ("confirm", "unmask")
    assert ("client-1" in first.clients) == is_in
    assert first.left_out == ({} if is_in else {"client-1": "the site is gone"})
    assert [event.what for event in first.events] == ["the site is gone"]
    assert len(second.clients) == 4


@pytest.mark.parametrize("phase", ["shares", "train", "unmask"])
def test_below_the_threshold_nothing_is_averaged_and_the_window_is_repeated(
    tmp_path, monkeypatch, phase
):
    run = secure(tmp_path, **ONE)
    kind = phase if phase == "train" else ASK
    gone, asked = at_phase(phase, {2, 3}, kind=kind), list[Message]()

    def once(message):
        reply = gone(message)
        if reply is None or len(asked) == (4 if phase == "unmask" else 2):
            return None
        asked.append(message)
        return reply

    run.grid.instead = once
    close(run.final(), from_record(plain(tmp_path, monkeypatch, **ONE).result.arrays))
    kinds = [event.kind for event in run.watch.records[1].events]
    assert kinds == ["failed"] * (len(asked) + 1) + ["repeated"]
    assert "only 2 sites" in run.watch.records[1].events[len(asked)].what
    assert len(run.watch.records[1].clients) == 4


def test_a_window_that_stays_below_the_threshold_ends_the_run_with_the_reasons(tmp_path):
    run = secure(tmp_path, **ONE)
    run.grid.instead = at_phase("unmask", {2, 3})
    match = r"below federation.min_clients=3 through .* left out: {'client-1': 'the site is gone'"
    with pytest.raises(FederationError, match=match):
        run.start()
    assert run.strategy.state.versions["params"] == 0


def test_with_stop_the_first_site_that_is_gone_ends_the_run(tmp_path):
    run = secure(tmp_path, policy=Policy(min_clients=3))
    run.grid.instead = at_phase("keys", {2})
    with pytest.raises(ClientError, match=r"client-1 is left out .* the site is gone"):
        run.start()


def test_a_server_that_asks_for_a_plain_stream_or_an_evaluation_is_refused(tmp_path):
    run = Run("adam", PERIODS, tmp_path / "plain")
    with pytest.raises(
        ClientError, match=r"secure sums only, by secure-keys .* privacy.secure_agg"
    ):
        run.start()
    asked = WindowRequest(run_key=RUN, stop=2, due=frozenset({"params"}))
    for kind in ("train.default", "evaluate.default"):
        with pytest.raises(ValueError, match="secure-keys in its node config"):
            run.app(Message(asked.to_content(0), 1, kind), run.grid.contexts[1])
    run = Run("adam", PERIODS, tmp_path / "evaluated", evaluate_clients=True)
    with pytest.raises(ClientError, match=r"own records .* set evaluation.federated=false"):
        run.start()


def test_an_empty_folder_of_keys_protects_nothing_and_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(SECURE_KEYS, "")
    with pytest.raises(ClientError, match="secure-keys is empty"):
        Run("adam", PERIODS, tmp_path / "plain").start()


def test_a_server_whose_codes_do_not_follow_from_the_average_is_refused(tmp_path, monkeypatch):
    scale = "flower_desloc.flower.secure.at_server.scale_after"
    monkeypatch.setattr(scale, lambda average, number, width: 30)
    with pytest.raises(ClientError, match="are not those that follow from its average"):
        secure(tmp_path, policy=Policy(min_clients=3), **ONE).start()


def test_an_answer_that_is_lost_when_a_sum_is_unmasked_is_asked_for_again(tmp_path):
    run, lost = secure(tmp_path, **ONE), list[str]()

    def meddle(asked, reply):
        record: Any = records_of(ConfigRecord, asked.content).get(SECURE, {})
        if record.get("phase") != "unmask" or len(lost) == 2:
            return reply
        lost.append("unmask")
        return Message(Error(7, "the answer is lost"), reply_to=asked)

    run.grid.meddle = meddle
    run.start()
    assert [event.kind for event in run.watch.records[1].events] == ["failed", "failed"]
    assert len(run.watch.records[1].clients) == 4


def half_unmasked(run, *, absent, away=()):
    """Let a site be ``absent`` from the sum at first, and another one then not help to unmask it.

    Those ``away`` are not online when it is repeated. Returns the nodes asked to unmask, in order.
    """
    failed, unmasking = list[int](), list[int]()

    def instead(asked: Message) -> Message | None:
        kind, node = asked.metadata.message_type, asked.metadata.dst_node_id
        record: Any = records_of(ConfigRecord, asked.content).get(SECURE, {})
        phase = record.get("phase")
        unmasking.extend([node] if phase == "unmask" else [])
        if kind == "train" and len(failed) < absent:
            failed.append(node)
        elif phase == "unmask" and node == unmasking[0] and len(failed) < absent + 2:
            failed.append(node)
            if len(failed) == absent + 2:
                run.grid.away = {unmasking[n] - 1 for n in away}
        else:
            return None
        return Message(Error(7, "the site is gone"), reply_to=asked)

    run.grid.instead = instead
    run.watch.after.clear()  # some sites have no state
    return unmasking


@pytest.mark.parametrize(("clients", "fraction"), [(4, 1.0), (5, 0.8)])
def test_a_window_that_some_have_unmasked_is_repeated_over_the_same_sites(
    tmp_path, clients, fraction
):
    """The others would refuse one with the site that was absent, or with others drawn."""
    policy = Policy(min_clients=3, on_failure="continue", repeats=1, fraction_train=fraction)
    run = secure(tmp_path, clients=clients, policy=policy, **TWO)
    unmasking = half_unmasked(run, absent=1)
    run.start()
    first, second = run.watch.records[1:3]
    assert {*first.clients} == {f"client-{node - 1}" for node in unmasking[:3]}
    assert len(second.clients) == 4


def test_of_sites_that_may_have_given_and_others_the_others_are_asked(tmp_path):
    """Those would take their steps, and then refuse."""
    policy = Policy(min_clients=3, fraction_train=0.7)
    run = secure(tmp_path, clients=7, policy=policy, **ONE)
    run.watch.after.clear()  # some sites have no state
    run.start()
    given = {f"client-{number}" for number in range(4)}
    for gone, expected in (("client-0", given), ("gone", {"client-4", "client-5", "client-6"})):
        run.strategy._given = frozenset({gone, *given})
        assert {member.name for member in run.strategy._drawn()} == expected


@pytest.mark.parametrize("away", [(0,), (0, 1)])
def test_where_a_site_is_away_when_its_sum_is_repeated_others_are_asked(tmp_path, caplog, away):
    policy = Policy(min_clients=2, on_failure="continue", repeats=1, fraction_train=0.4)
    run = secure(tmp_path, clients=5, policy=policy, **TWO)
    for context in run.grid.contexts.values():
        context.node_config["secure-min"] = 2
    unmasking = half_unmasked(run, absent=0, away=away)
    run.start()
    names = sorted(f"client-{node - 1}" for node in unmasking[:2])
    window = "the window of steps 1 to 2"
    assert f"may refuse {window} over others than {', '.join(names)}, until" in caplog.text
    assert len(run.watch.records[1].clients) == 2
    assert not {*run.watch.records[1].clients} & {*names}


def test_a_site_without_keys_or_peers_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv(SECURE_KEYS)
    with pytest.raises(ClientError, match=r"has no keys for it; .* secure-keys in the node config"):
        secure(tmp_path, policy=Policy(min_clients=3)).start()
    monkeypatch.setenv(SECURE_KEYS, str(tmp_path / "none"))
    with pytest.raises(ClientError, match=r"python -m flower_desloc\.secure"):
        secure(tmp_path, policy=Policy(min_clients=3)).start()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("masked-loss", [2**63, 1], "no masked loss"),
        ("num-examples", None, "its metrics have no number 'num-examples'"),
        ("num-examples", math.inf, "its num-examples is inf; it must be above 0"),
    ],
)
def test_a_reply_that_is_no_masked_one_is_left_out(tmp_path, name, value, why):
    run = secure(tmp_path, **ONE)

    def change(reply):
        if value is None:
            del reply.content["metrics"][name]
        else:
            reply.content["metrics"][name] = value

    run.grid.on_training(change, node=2)
    run.start()
    assert why in run.watch.records[1].left_out["client-1"]
    assert len(run.watch.records[1].clients) == 3


def test_the_sum_of_a_site_that_sends_nonsense_is_not_used(tmp_path):
    run = secure(tmp_path, **ONE)

    def change(reply):
        record = reply.content["exp_avg_sq"]
        for key, size in (("matrix", 15), ("vector", 7)):  # by chance all is positive: 2^-22
            record[key] = to_array(torch.full((8 * size,), 255, dtype=torch.uint8))

    run.grid.on_training(change, node=2)
    with pytest.raises(FederationError, match=r"below federation.min_clients"):
        run.start()
    assert run.strategy.state.versions["params"] == 0


def test_a_server_that_sends_one_site_another_model_is_refused_there(tmp_path):
    run = secure(tmp_path, **TWO)

    def other(asked: Message) -> None:
        metadata = asked.metadata
        if (metadata.message_type, metadata.dst_node_id, metadata.group_id) == ("train", 2, "1"):
            params = from_record(records_of(ArrayRecord, asked.content)["params"])
            asked.content["params"] = to_record({key: 0 * p for key, p in params.items()})

    run.grid.instead = other
    run.start()
    why = run.watch.records[1].left_out["client-1"]
    assert "the average of 'params' is not the one that all sites" in why


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("optimizer.lr", 0.0),
        ("steps", 1),
        ("steps-ahead", 1),
        ("sync-bound", True),
        ("streams-reset", ["exp_avg"]),
        ("stream-formats", ["int8"] * 3),
        ("a-list", [1]),
        ("streams-due", ["gradients"]),
    ],
)
def test_a_server_that_sends_one_site_other_settings_is_refused_there(tmp_path, setting, value):
    run = secure(tmp_path, policy=Policy(min_clients=4), **ONE)

    def other(asked: Message) -> None:
        if (asked.metadata.message_type, asked.metadata.dst_node_id) == ("train", 2):
            records_of(ConfigRecord, asked.content)["config"][setting] = value

    run.grid.instead = other
    with pytest.raises(ClientError, match=r"client-1 .* (settings of this req|sends no gradients)"):
        run.start()


def test_a_server_that_swaps_a_key_gets_no_sum(tmp_path):
    run = secure(tmp_path)

    def swapped(asked: Message) -> None:
        record: Any = asked.content.get(SECURE)
        if record is not None and record.get("phase") == "shares":
            first, second, *rest = record["data"]
            record["data"] = [first, first[:32] + second[32:], *rest]

    run.grid.instead = swapped
    with pytest.raises(FederationError, match="signed by 'client-1' is not: it was changed"):
        run.start()


def test_a_client_that_joins_or_leaves_and_one_that_has_lost_its_state(tmp_path, monkeypatch):
    def present(m, step):
        return m < 3 or step >= 2

    final = secure(tmp_path, present=present, **TWO).final()
    close(final, from_record(plain(tmp_path, monkeypatch, present=present, **TWO).result.arrays))

    run, lost = secure(tmp_path / "lost", **TWO), list[None]()

    def forget(record):
        if record.step == 2 and not lost:
            lost.append(run.files(1).delete())

    run.watch.after.append(forget)
    run.start()
    assert [len(record.clients) for record in run.watch.records[1:]] == [4] * 2


def test_a_site_whose_state_is_damaged_refuses_and_then_all_begin_from_the_averages(
    tmp_path, monkeypatch
):
    policy = Policy(min_clients=4, on_failure="continue", repeats=1)
    run = secure(tmp_path, periods=(1, 2, 2), num_steps=2, policy=policy)
    Faults(run).damage_state_at(node=1, window=2)
    ours, record = run.final(), run.watch.records[2]
    kinds = [(event.kind, event.client) for event in record.events]
    assert kinds == [("failed", "client-1"), ("failed", ""), ("repeated", ""), ("state lost", "")]
    assert "this site's state is damaged" in record.events[0].what
    assert len(record.clients) == 4
    other = Run("adam", (1, 2, 2), tmp_path / "plain", num_clients=4, num_steps=2)
    faults = Faults(other)
    for m in range(4):
        faults.damage_state_at(node=m, window=2)
    monkeypatch.delenv(SECURE_KEYS)
    close(ours, other.final())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"policy": Policy(average="median")}, "policy.average=median"),
        ({"policy": Policy(weighting="examples")}, "policy.weighting=examples"),
        ({"policy": Policy(min_steps=0.5)}, "policy.min_steps=0.5"),
        ({"sync_delay": 1}, "sync_delay=1"),
        ({"compression": {"params": "int8"}}, "compression=.*int8"),
    ],
)
def test_what_needs_a_single_clients_update_is_refused(tmp_path, options, why):
    with pytest.raises(
        ValueError, match=f"{why}.*: with privacy.secure_aggregation=true the server learns sums"
    ):
        secure(tmp_path, **options)


def test_nothing_is_left_of_a_run_that_completed(tmp_path):
    run = secure(tmp_path, **{**ONE, "num_steps": 3})  # the last window is shorter
    run.start()
    assert [record.step for record in run.watch.records[1:]] == [2, 3]
    assert not (run.folder / RUN).exists()


def test_what_a_site_keeps_of_its_states_is_of_those_that_it_has(tmp_path):
    checkpoints, seen = Checkpoints(tmp_path / "checkpoints", 2), []
    run = secure(tmp_path, periods=(2, 2, NEVER), num_steps=12, checkpoints=checkpoints)

    def look(record):
        stored = json.loads((run.folder / "secure" / "client-0.json").read_text())
        seen.append({*map(int, stored["origins"][RUN])})
        assert seen[-1] >= run.files(0).steps() - {0}

    run.watch.after[:] = [lambda record: look(record) if record.step else None]
    run.start()
    assert max(map(len, seen)) < 6
    assert not any(record.events for record in run.watch.records)  # no client has lost its state


def test_a_new_run_over_other_sites_from_the_same_averages_is_refused(tmp_path):
    secure(tmp_path, **ONE).start()  # its goodbye deletes the sites' states, and not this
    options: dict[str, Any] = {**ONE, "run_key": "other"}
    with pytest.raises(FederationError, match=r"given away already.* flower_desloc.secure forget"):
        secure(tmp_path, clients=3, **options).start()
    with pytest.raises(FederationError, match="given away already"):
        secure(tmp_path, present=lambda m, step: m > 0, **options).start()
    for m in range(3):
        main(["forget", str(tmp_path / "secure" / "secure" / f"client-{m}.json"), RUN, "1", "2"])
    run = secure(tmp_path, clients=3, **options)
    run.watch.after.clear()  # its states are not in the folder RUN
    run.start()


class Killed(KeyboardInterrupt):
    """The server is killed."""


def test_a_run_that_is_killed_and_resumed_ends_alike_and_sums_a_window_once(tmp_path):
    expected = secure(tmp_path / "whole", **TWO).final()
    options: dict[str, Any] = {
        **TWO,
        "checkpoints": Checkpoints(tmp_path / "checkpoints", 1),
        "run_key": RUN,
    }
    run = secure(tmp_path, **options)

    def kill(record):
        if record.step == 4:  # it is summed, and the checkpoint not written yet
            raise Killed

    run.watch.after.append(kill)
    with pytest.raises(Killed):
        run.start()
    options["resume"] = Checkpoint.read(last_checkpoint(tmp_path / "checkpoints"))
    without = secure(tmp_path, present=lambda m, step: m < 3, **options)
    without.leave(3)
    with pytest.raises(FederationError, match=r"steps 3 to 4 .* given away already"):
        without.strategy.start(without.grid, without.initial)
    again = secure(tmp_path, **options)
    again.strategy.start(again.grid, again.initial, observer=again.watch)
    close(from_record(again.strategy.state.averages["params"]), expected, atol=0)


def test_a_window_that_all_began_from_the_averages_is_repeated_alike_by_a_resume(tmp_path):
    options: dict[str, Any] = {
        "periods": (2, NEVER, NEVER),
        "num_steps": 8,
        "present": lambda m, step: m < 3 or step != 2,
        "run_key": RUN,
    }
    whole = secure(tmp_path / "whole", **options)
    expected = whole.final()
    assert [e.kind for e in whole.watch.records[3].events] == ["returned", "state lost"]
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
    run = secure(tmp_path, checkpoints=checkpoints, **options)

    def kill(record):
        if record.step == 6:  # in which they did; it is summed, and there is no checkpoint of it
            raise Killed

    run.watch.after.append(kill)
    with pytest.raises(Killed):
        run.start()
    resume = Checkpoint.read(last_checkpoint(tmp_path / "checkpoints"))
    again = secure(tmp_path, checkpoints=checkpoints, resume=resume, **options)
    again.leave(resume.step)
    again.strategy.start(again.grid, again.initial, observer=again.watch)
    close(from_record(again.strategy.state.averages["params"]), expected, atol=0)
    events = [(e.kind, e.client) for record in again.watch.records for e in record.events]
    assert events == [("state lost", "")]  # none of a client


def test_a_run_of_the_app_by_secure_sums_is_the_plain_run(tmp_path):
    words = [*TINY, "run.steps=2", "sync.params=2", "sync.exp_avg=2", "sync.exp_avg_sq=2"]
    words += ["run.eval_every=0", "evaluation.central=false"]
    ours = train(tmp_path / "a", *words, "privacy.secure_aggregation=true", clients=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(SECURE_KEYS)
        theirs = train(tmp_path / "b", *words, "evaluation.federated=false", clients=3)
    one, other = (load_file(run / "final" / "model.safetensors") for run in (ours, theirs))
    for key in one:
        torch.testing.assert_close(one[key], other[key], rtol=1e-6, atol=2e-7)
    left = [path for path in (tmp_path / "a" / ".clients").rglob("*") if path.is_file()]
    assert {path.parent.name for path in left} == {"secure"}  # what the sites have given


class Lying(SecureDesLoc):
    """Asks one site for the first window, and makes the second one of no effect."""

    def aggregate_train(self, server_round, replies):
        now = self.loop.round
        if now.window.start:
            return super().aggregate_train(server_round, replies)
        assert sum(not reply.has_error() for reply in replies) == 1
        nothing = {"exp_avg": 0.0, "exp_avg_sq": 1e30}
        averages = {
            name: {k: torch.full_like(t, value, device="cpu") for k, t in templates.items()}
            for name, value in nothing.items()
            for templates in [self.state.templates[name]]
        }
        drift = dict.fromkeys(averages, Drift(spread=0.0, moved=0.0, norm=0.0))
        self.state.publish(averages, now.window, drift, self.schedule.resets)
        return None, MetricRecord({"train-loss": 0.0})


def test_the_steps_that_one_site_alone_was_asked_for_are_in_no_sum(tmp_path):
    run = Run("adam", (4, 2, 2), tmp_path / "secure", num_steps=4, strategy=Lying,
              policy=Policy(min_clients=3, on_failure="continue"))  # fmt: skip
    run.grid.instead = at_phase("", {2, 3}, kind="train")
    close(run.final(), from_record(run.initial))


class Repeating(SecureDesLoc):
    """Adds up the last window twice over the same sites; all moments before it are its own."""

    moments: dict[str, float]
    between: Callable[[], object]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[Any] = []

    def configure_train(self, server_round, arrays, config, grid):
        self.sync_bound = self.loop.round.window.stop == self.windows[-1].stop
        return super().configure_train(server_round, arrays, config, grid)

    def _averages(self, sums, terms, count):
        averages = super()._averages(sums, terms, count)
        if terms.stop < self.windows[-1].stop:
            for name in self.moments.keys() & averages:
                value = self.moments[name]
                averages[name] = {k: torch.full_like(t, value) for k, t in averages[name].items()}
            return averages
        self.seen.append({name: dict(stream) for name, stream in averages.items()})
        if len(self.seen) == 1:
            self.between()
            raise ValueError("once more")
        return averages


@pytest.mark.parametrize("lie", ["one site forgets its state", "one site is sent what it has"])
def test_a_window_that_is_repeated_over_the_same_sites_has_the_same_sum(tmp_path, lie):
    forgets = lie == "one site forgets its state"
    steps = 2 if forgets else 4
    periods = (1, 1, 1) if forgets else (1, 2, 2)
    run = secure(tmp_path, periods=periods, num_steps=steps, strategy=Repeating)
    again = list[str]()

    def between():
        again.append(lie)
        if forgets:
            content = WindowRequest(run_key=RUN).to_content(0)
            run.app(Message(content, 1, GOODBYE), run.grid.contexts[1])

    def resend(asked: Message) -> None:
        metadata = asked.metadata
        asked_last = (metadata.message_type, metadata.dst_node_id, metadata.group_id) == (
            "train",
            1,
            "4",
        )
        if asked_last and again:
            for name in ("exp_avg", "exp_avg_sq"):
                asked.content[name] = to_record(run.strategy.state.average(name))

    run.strategy.moments = {"exp_avg": 8.0, "exp_avg_sq": 0.0 if forgets else 1.0}
    run.strategy.between = between
    run.grid.instead = resend
    run.start()
    one, other = run.strategy.seen
    for name in one:
        close(one[name], other[name], atol=0)


def test_a_server_that_restates_an_average_which_the_sites_have_is_refused(tmp_path, monkeypatch):
    """The scale of their codes would be its own choice."""
    run = secure(tmp_path, periods=(1, 2, 4), num_steps=4)
    agreed = SecureDesLoc._stated_averages

    def restated(self):
        averages = agreed(self)
        if self.loop.round.window.start == 3:  # since a window ago they have exp_avg
            version, digest, _ = averages["exp_avg"].split()
            averages["exp_avg"] = stated(int(version), digest, 1e-9)
        return averages

    monkeypatch.setattr(SecureDesLoc, "_stated_averages", restated)
    with pytest.raises(FederationError, match="the average of 'exp_avg' is not the one that all"):
        run.start()


def of_params_alone(terms):
    parts = ("shapes", "scales", "widths")
    return replace(terms, **{part: {"params": getattr(terms, part)["params"]} for part in parts})


@pytest.mark.parametrize(
    ("lie", "steps"),
    [
        (lambda terms: replace(terms, run="other"), "1 to 2"),
        (lambda terms: replace(terms, start=1), "2 to 2"),
        (lambda terms: replace(terms, stop=4), "1 to 4"),
        (of_params_alone, "1 to 2"),
    ],
    ids=["another run", "a later start", "a later end", "fewer streams"],
)
def test_a_site_refuses_a_window_that_is_not_the_one_its_sum_was_stated_to_be_of(
    tmp_path, monkeypatch, lie, steps
):
    """By what is stated it knows whether it gave these steps already, over other sites."""
    agreed = SecureDesLoc._terms
    monkeypatch.setattr(SecureDesLoc, "_terms", lambda *asked: lie(agreed(*asked)))
    with pytest.raises(ClientError, match=f"agreed on a sum of steps {steps}, not on what is ask"):
        secure(tmp_path, policy=Policy(min_clients=3), **ONE).start()


def test_a_site_refuses_to_begin_from_another_version_than_was_stated(tmp_path, monkeypatch):
    asked = SecureRequests._train

    def from_zeros(self, member):
        message = asked(self, member)
        config: Any = message.content["config"]
        if config["start-step"] == 3:  # since a window ago it has exp_avg
            versions = dict(zip(config["streams"], config["stream-versions"], strict=True))
            config["stream-versions"] = list({**versions, "exp_avg": 0}.values())
        return message

    monkeypatch.setattr(SecureRequests, "_train", from_zeros)
    run = secure(tmp_path, periods=(1, 2, 4), num_steps=4, policy=Policy(min_clients=3))
    with pytest.raises(ClientError, match="agreed on a sum of steps 4 to 4, not on what is asked"):
        run.start()


def test_when_a_site_joins_all_begin_from_the_averages_as_if_they_had_lost_their_states(
    tmp_path, monkeypatch
):
    options: dict[str, Any] = {"num_steps": 4, "present": lambda m, step: m < 3 or step >= 2}
    run = secure(tmp_path, periods=(4, 2, 2), **options)
    ours = run.final()
    assert [len(record.clients) for record in run.watch.records[1:]] == [3, 4]
    said = [event.what for event in run.watch.records[2].events]
    assert said == ["at node 4", "clients begin from the averages: some were away"]
    other = Run("adam", (4, 2, 2), tmp_path / "plain", num_clients=4, **options)

    def lose(record):
        other.leave(record.step)
        for m in range(3):
            other.files(m).delete()

    other.watch.after = [lose]
    monkeypatch.delenv(SECURE_KEYS)
    close(ours, other.final())


def test_sites_that_have_all_lost_their_states_begin_as_new_clients_do(tmp_path, monkeypatch):
    """Their second moments were never averaged, and from zero would be too small for a step."""

    def loses_all_states(run):
        def lose(record):
            for m in range(4 if record.step == 2 else 0):
                run.files(m).delete()

        run.watch.after = [lose]
        return run

    ours = loses_all_states(secure(tmp_path, periods=(2, 2, NEVER), num_steps=4)).final()
    monkeypatch.delenv(SECURE_KEYS)
    other = Run("adam", (2, 2, NEVER), tmp_path / "plain", num_clients=4, num_steps=4)
    close(ours, loses_all_states(other).final())


class Counted(Quadratic):
    """A model with a buffer, which counts the worker's steps."""

    def module(self):
        module = super().module()
        module.register_buffer("seen", torch.zeros(2, dtype=torch.float64))
        return module

    def loss(self, module, m, t):
        module.get_buffer("seen").add_(m + 0.5)
        return super().loss(module, m, t)


def diloco():
    return OuterOptimizer(lambda ps: torch.optim.SGD(ps, lr=0.7, momentum=0.9, nesterov=True))


@pytest.mark.parametrize("what", ["buffers", "outer"])
def test_secure_sums_together_with_buffers_and_with_the_outer_optimizer(
    tmp_path, monkeypatch, what
):
    periods = SyncSchedule(dict.fromkeys(("params", "exp_avg", "exp_avg_sq"), 2)
                           | ({"buffers": 2} if what == "buffers" else {}))  # fmt: skip

    def options():
        problem = Counted() if what == "buffers" else Quadratic()
        outer = diloco() if what == "outer" else None
        return {"problem": problem, "outer": outer, "num_steps": 4, "periods": periods}

    ours = secure(tmp_path, **options())
    ours.start()
    theirs = plain(tmp_path, monkeypatch, **options())
    for name in periods.periods:
        close(ours.strategy.state.average(name), theirs.strategy.state.average(name))
    if what == "buffers":
        assert ours.strategy.state.average("buffers")["seen"].tolist() == [8.0, 8.0]


def test_secure_sums_of_private_gradients_are_their_plain_sums(tmp_path, monkeypatch):
    pytest.importorskip("opacus")
    accountant = "flower_desloc.privacy.accounting._epsilon"  # which takes seconds
    monkeypatch.setattr(
        accountant,
        lambda steps, delta: sum(n * s.sample_rate / s.noise_multiplier for s, n in steps),
    )
    monkeypatch.setattr("secrets.token_hex", lambda number: "0" * 2 * number)  # one run's name
    words = [*TINY, "run.steps=2", "sync.params=2", "sync.exp_avg=2", "sync.exp_avg_sq=2"]
    words += ["run.eval_every=0", "evaluation.central=false", "evaluation.federated=false"]
    words += ["privacy.epsilon=1"]
    for folder in ("a", "b"):
        secrets = tmp_path / folder / ".clients" / "privacy"
        secrets.mkdir(parents=True)
        for m in range(3):
            (secrets / f"client-{m}.secret").write_bytes(bytes([m]) * 32)
    ours = train(tmp_path / "a", *words, "privacy.secure_aggregation=true", clients=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(SECURE_KEYS)
        theirs = train(tmp_path / "b", *words, clients=3)
    one, other = (load_file(run / "final" / "model.safetensors") for run in (ours, theirs))
    for key in one:
        torch.testing.assert_close(one[key], other[key], rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize("lacking", [1, 2])
def test_a_site_that_peers_files_lack_costs_their_owners_part_and_then_the_run(tmp_path, lacking):
    run = secure(tmp_path, **ONE)
    run.watch.after.clear()  # one site has no state
    shutil.copytree(tmp_path / "keys", tmp_path / "short")
    lines = (tmp_path / "keys" / "peers").read_text().splitlines()
    (tmp_path / "short" / "peers").write_text(
        "\n".join(line for line in lines if not line.startswith("client-3 "))
    )
    for node in range(1, 1 + lacking):
        run.grid.contexts[node].node_config["secure-keys"] = str(tmp_path / "short")
    why = r"'client-3' is not among the peers of 'client-0'"
    if lacking == 1:
        run.start()
        assert list(run.watch.records[1].clients) == ["client-1", "client-2", "client-3"]
        assert why in run.watch.records[1].left_out["client-0"]
        return
    with pytest.raises(FederationError, match=why):
        run.start()
