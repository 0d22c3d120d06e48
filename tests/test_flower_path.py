"""The federated path, from the strategy through records and files to the clients and back."""

import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import reference
import torch
from federation import (
    OPTIMIZERS,
    Quadratic,
    Regression,
    assert_close,
    assert_same,
    initial,
)
from flower_path import RUN, Run, oracle
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from flower_desloc import Clipping, DesLoc, SyncSchedule
from flower_desloc.flower.federation import FederationError
from flower_desloc.flower.observer import WindowRecord
from flower_desloc.flower.policy import Policy
from flower_desloc.flower.records import from_record, to_record


@pytest.mark.parametrize("num_clients", [1, 3, 7])
@pytest.mark.parametrize("some", [(5, 7, 11), (4, 12, 24), (3, "never", 6)], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_federated_path_equals_the_oracle(name, some, num_clients, tmp_path):
    case = OPTIMIZERS[name]
    schedule = SyncSchedule(case.periods(*some))
    run = Run(Quadratic(), case, schedule, tmp_path, num_clients=num_clients, num_steps=26)
    assert_close(run.start(), oracle(run))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_federated_path_equals_the_oracle_on_tied_weights_with_clipping(name, tmp_path):
    case = OPTIMIZERS[name]
    run = Run(
        Regression(),
        case,
        SyncSchedule(case.periods(2, 3, 5)),
        tmp_path,
        num_clients=3,
        num_steps=15,
        clipping=Clipping(norm=0.5),
        lr_schedule=lambda t: 1 / (1 + t),
    )
    expected = oracle(run, lr=lambda t: case.lr / (1 + t), clip=reference.clip_norm(0.5))
    assert_close(run.start(), expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_federated_path_equals_the_oracle_with_coins(name, tmp_path):
    case = OPTIMIZERS[name]
    schedule = SyncSchedule(case.periods(3, 5, 7), coin_seed=4)
    run = Run(Quadratic(), case, schedule, tmp_path, num_clients=3, num_steps=25)
    assert_close(run.start(), oracle(run))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_client_absent_for_two_windows_keeps_its_work_and_gets_the_averages(name, tmp_path):
    case = OPTIMIZERS[name]
    # Windows begin at 0 4 8 12 16 20; params are due at all, the rest at 12 and 24.
    schedule = SyncSchedule(case.periods(4, 12, 24))
    run = Run(
        Quadratic(),
        case,
        schedule,
        tmp_path,
        num_clients=3,
        num_steps=24,
        present=lambda m, t: not (m == 1 and 4 <= t < 12),
    )
    assert_close(run.start(), oracle(run, present=run.present))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_client_absent_while_params_are_not_due_is_merged_at_the_next_sync(name, tmp_path):
    case = OPTIMIZERS[name]
    schedule = SyncSchedule(case.periods(10, 2, 5))
    run = Run(
        Quadratic(),
        case,
        schedule,
        tmp_path,
        num_clients=3,
        num_steps=20,
        present=lambda m, t: not (m == 2 and 2 <= t < 4),
    )
    assert_close(run.start(), oracle(run, present=run.present))


def test_two_runs_give_the_same_bits(tmp_path):
    case = OPTIMIZERS["adopt"]
    schedule = SyncSchedule(case.periods(2, 3, 5))
    a, b = (
        Run(Regression(), case, schedule, tmp_path / name, num_clients=5, num_steps=12).start()
        for name in "ab"
    )
    assert_same(a, b)


def test_the_sum_does_not_depend_on_who_is_first(tmp_path):
    """Nodes have random ids, so neither their order nor that of the replies may matter."""
    case = OPTIMIZERS["adam"]
    schedule = SyncSchedule(case.periods(2, 3, 5))

    def final(order: list[int], name: str) -> dict[str, torch.Tensor]:
        run = Run(Regression(), case, schedule, tmp_path / name, num_clients=5, num_steps=12)
        contexts = list(run.grid.contexts.values())
        run.grid.contexts = {
            100 - i: Context(1, 100 - i, contexts[m].node_config, RecordDict(), {})
            for i, m in enumerate(order)
        }
        run.start()
        return from_record(run.result.arrays)

    expected = final([0, 1, 2, 3, 4], "a")
    got = final([3, 0, 4, 2, 1], "b")
    assert all(torch.equal(got[key], expected[key]) for key in expected)


def test_the_server_holds_one_message_at_a_time(tmp_path):
    case = OPTIMIZERS["sgdm"]
    run = Run(
        Quadratic(), case, SyncSchedule(case.periods(2, 4)), tmp_path, num_clients=9, num_steps=8
    )
    alive: list[weakref.ref[Message]] = []
    most = []

    def meddle(asked: Message, reply: Message) -> Message:
        if asked.metadata.message_type == "train":
            alive.append(weakref.ref(reply))
            most.append(sum(ref() is not None for ref in alive))
        return reply

    run.grid.meddle = meddle
    run.start()
    assert len(most) == 9 * 4
    assert max(most) == 1


def test_down_goes_what_a_client_lacks_and_up_goes_what_is_due(tmp_path):
    case = OPTIMIZERS["adam"]
    run = Run(
        Quadratic(),
        case,
        SyncSchedule({"params": 2, "exp_avg": 3, "exp_avg_sq": "never"}),
        tmp_path,
        num_clients=2,
        num_steps=8,
    )
    ups = []

    def meddle(asked: Message, reply: Message) -> Message:
        if asked.metadata.message_type == "train" and asked.metadata.dst_node_id == 1:
            ups.append(set(reply.content.array_records))
        return reply

    run.grid.meddle = meddle
    run.start()
    trains = [m for m in run.grid.sent if m.metadata.message_type == "train"]
    asked = [m for m in trains if m.metadata.dst_node_id == 1]
    x, u = {"params"}, {"exp_avg"}
    # Events after steps 2 (x), 3 (u), 4 (x), 6 (x, u), 8 (x).
    assert [set(m.content.array_records) for m in asked] == [x, x, u, x, x | u]
    assert ups == [x, u, x, x | u, x]
    for message in asked:
        assert set(message.content.config_records) == {"config"}
        assert {"start-step", "stop-step", "streams-due"} <= set(message.content["config"])


def test_the_steps_of_the_messages_are_the_federations(tmp_path):
    case = OPTIMIZERS["sgdm"]
    run = Run(
        Quadratic(), case, SyncSchedule(case.periods(3, 4)), tmp_path, num_clients=1, num_steps=7
    )
    run.start()
    windows = [
        (m.content["config"]["start-step"], m.content["config"]["stop-step"])
        for m in run.grid.sent
        if m.metadata.message_type == "train"
    ]
    assert windows == [(0, 3), (3, 4), (4, 6), (6, 7)]


def test_nothing_of_a_finished_run_is_left_on_the_clients(tmp_path):
    case = OPTIMIZERS["adam"]
    run = Run(
        Quadratic(), case, SyncSchedule(case.periods(2, 3, 5)), tmp_path, num_clients=3, num_steps=6
    )
    run.start()
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------- Joiners and lost state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_client_that_lost_its_state_is_a_joiner(name, tmp_path):
    """It continues with the last averages of every stream and the federation's step."""
    case = OPTIMIZERS[name]
    schedule = SyncSchedule(case.periods(2, 4, 6))
    run = Run(Quadratic(), case, schedule, tmp_path / "a", num_clients=3, num_steps=14)
    after = run.watch.after

    def lose(record: WindowRecord) -> None:
        after(record)
        if record.step == 8:
            run.file(1).path.unlink()

    run.watch.after = lose
    got = run.start()

    late = Run(Quadratic(), case, schedule, tmp_path / "b", num_clients=3, num_steps=14)
    averages = {}

    def remember(record: WindowRecord) -> None:
        Run._after(late, record)
        if record.step == 8:
            averages.update(late.strategy.globals.averages)
            # What the joiner is given, written into its file by hand.
            held = late.file(1).held()
            given = {name: from_record(average) for name, average in averages.items()}
            late.file(1).write(replace(held, streams=list(given)), given)

    late.watch.after = remember
    assert_same(got, late.start())


def test_a_joiner_takes_the_servers_step_for_bias_correction_and_clip(tmp_path):
    for name in ("adam", "adopt"):
        case = OPTIMIZERS[name]
        run = Run(
            Quadratic(),
            case,
            SyncSchedule(case.periods(2, 2, 2)),
            tmp_path / name,
            num_clients=2,
            num_steps=8,
            present=lambda m, t: m == 0 or t >= 4,
        )
        got = run.start()

        # The oracle's worker 1 is given worker 0's averages at step 4 and works from there on.
        expected = oracle(run, present=run.present)
        assert_close(got, expected)
        assert run.watch.joiners == ["client-1"]


def test_an_adopt_that_joins_before_v_was_averaged_seeds_v_from_its_first_batch(tmp_path):
    case = OPTIMIZERS["adopt"]
    run = Run(
        Quadratic(),
        case,
        SyncSchedule({"params": 2, "exp_avg": 2, "exp_avg_sq": "never"}),
        tmp_path,
        num_clients=2,
        num_steps=6,
        present=lambda m, t: m == 0 or t >= 4,
    )
    x_at_4 = {}

    def remember(record: WindowRecord) -> None:
        Run._after(run, record)
        if record.step == 4:
            x_at_4.update(from_record(run.strategy.globals.averages["params"]))

    run.watch.after = remember
    v = run.start()[1]["exp_avg_sq"]
    g4 = run.problem.grad(1, 4, x_at_4)
    for key in ("matrix", "vector", "scalar"):
        # v = g^2 whole, then two EMA steps with beta2 = 0.99: 98 % of it are left.
        assert (v[key] >= 0.98 * g4[key].square() - 1e-12).all()


# ------------------------------------------------------------------------------------- Failures


def failing(run: Run, client: int, start: int, times: int = 1) -> None:
    """Let the client's training raise in the window that begins at ``start``."""
    original = run.grid.client_app
    left = [times]

    def app(message: Message, context: Context) -> Message:
        asked = message.metadata.message_type == "train"
        if (
            asked
            and context.node_config["partition-id"] == client
            and message.content["config"]["start-step"] == start
            and left[0] > 0
        ):
            left[0] -= 1
            raise RuntimeError("the disk is on fire")
        return original(message, context)

    run.grid.client_app = app


def quadratic(tmp_path: Path, policy: Policy, num_clients: int = 3, seed: int = 0) -> Run:
    case = OPTIMIZERS["adam"]
    schedule = SyncSchedule(case.periods(2, 4, 8))
    return Run(
        Quadratic(),
        case,
        schedule,
        tmp_path,
        num_clients=num_clients,
        num_steps=8,
        policy=policy,
        seed=seed,
    )


def test_a_client_that_raises_stops_the_run_by_default(tmp_path):
    run = quadratic(tmp_path, Policy())
    failing(run, client=1, start=2)
    what = r"client-1 .*steps 3 to 4.*the disk is on fire.*on_failure"
    with pytest.raises(FederationError, match=what):
        run.start()


def test_a_client_that_raises_is_left_out_if_so_configured_and_comes_back(tmp_path):
    run = quadratic(tmp_path, Policy(on_failure="continue"))
    failing(run, client=1, start=2)
    got = run.start()
    assert [list(r.left_out) for r in run.watch.records] == [[], [], ["client-1"], [], []]
    assert "the disk is on fire" in run.watch.records[2].left_out["client-1"]
    # As if it had been away for that window: nothing else is lost.
    assert_close(got, oracle(run, present=lambda m, t: not (m == 1 and 2 <= t < 4)))


@pytest.mark.parametrize("start", [0, 2, 4, 6])
def test_a_window_below_the_quorum_is_repeated_and_changes_nothing(start, tmp_path):
    """Who had replied is sent the same once more, and takes its steps from what it held before."""
    policy = Policy(on_failure="continue", min_clients=3, repeats=1)
    calm, run = (quadratic(tmp_path / name, policy) for name in ("calm", "repeated"))
    failing(run, client=2, start=start)
    assert_same(run.start(), calm.start())
    for one, other in zip(run.watch.records, calm.watch.records, strict=True):
        repeated = (one.start, one.step) == (start, start + 2)
        assert [e.kind for e in one.events] == (["failed", "repeated"] if repeated else [])
        assert one.traffic.down == {
            name: sent * (2 if repeated else 1) for name, sent in other.traffic.down.items()
        }


def test_who_comes_back_elsewhere_in_a_repeated_window_has_lost_nothing(tmp_path):
    policy = Policy(on_failure="continue", min_clients=3, repeats=1)
    calm, run = (quadratic(tmp_path / name, policy) for name in ("calm", "moved"))
    failing(run, client=2, start=4)
    answer = run.grid.meddle

    def move(asked: Message, reply: Message) -> Message | None:
        trained = asked.metadata.message_type == "train" and asked.metadata.dst_node_id == 2
        if trained and asked.content["config"]["start-step"] == 4:
            run.grid.contexts[77] = run.grid.contexts.pop(2)
        return answer(asked, reply)

    run.grid.meddle = move
    assert_same(run.start(), calm.start())
    (record,) = [r for r in run.watch.records if r.start == 4]
    assert [e.kind for e in record.events] == ["failed", "repeated", "moved"]


def test_what_a_run_of_the_same_name_left_behind_is_nobodys(tmp_path):
    broken = quadratic(tmp_path / "one", Policy())
    failing(broken, client=1, start=6)
    with pytest.raises(FederationError):
        broken.start()
    assert broken.file(2).held() is not None
    after, alone = (quadratic(tmp_path / name, Policy()) for name in ("one", "other"))
    assert_same(after.start(), alone.start())
    for one, other in zip(after.watch.records, alone.watch.records, strict=True):
        assert one.traffic == other.traffic
        assert one.events == other.events


def test_a_run_that_stays_below_the_quorum_stops_and_says_so(tmp_path):
    run = quadratic(tmp_path, Policy(on_failure="continue", min_clients=3, repeats=1))
    failing(run, client=2, start=2, times=9)
    with pytest.raises(FederationError, match=r"min_clients=3.*repeats=1.*client-2"):
        run.start()
    assert run.file(0).held().step == 4  # the others' work is on their disks


def _nan(stream: ArrayRecord) -> None:
    vector = from_record(stream)["vector"].clone()
    vector[2] = torch.nan
    stream["vector"] = to_record({"vector": vector})["vector"]


def _renamed(stream: ArrayRecord) -> None:
    stream["victor"] = stream.pop("vector")


def _reshaped(stream: ArrayRecord) -> None:
    stream["vector"] = to_record({"vector": torch.zeros(6, dtype=torch.float64)})["vector"]


def _retyped(stream: ArrayRecord) -> None:
    stream["vector"] = to_record({"vector": torch.zeros(7)})["vector"]


def _torn(stream: ArrayRecord) -> None:
    stream["vector"].data = stream["vector"].data[:-9]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_nan, "not finite"),
        (_renamed, "'vector'"),
        (_reshaped, r"shape \(6,\)"),
        (_retyped, "float32"),
        (_torn, "cannot be read"),
    ],
)
def test_a_reply_that_cannot_be_averaged_is_left_out_by_name(spoil, reason, tmp_path):
    run = quadratic(tmp_path, Policy(on_failure="continue"))

    def meddle(asked: Message, reply: Message) -> Message:
        trained = asked.metadata.message_type == "train" and asked.metadata.dst_node_id == 2
        if trained and asked.content["config"]["start-step"] == 2:
            spoil(reply.content["params"])
        return reply

    run.grid.meddle = meddle
    run.start()
    (left,) = [r.left_out for r in run.watch.records if r.left_out]
    assert set(left) == {"client-1"}
    with pytest.raises(AssertionError, match=reason):
        assert not left["client-1"], left["client-1"]


def test_a_reply_that_does_not_come_is_an_absence(tmp_path):
    run = quadratic(tmp_path, Policy(on_failure="continue", timeout=0.05))
    run.grid.meddle = lambda asked, reply: (
        None
        if asked.metadata.message_type == "train"
        and asked.metadata.dst_node_id == 2
        and asked.content["config"]["start-step"] == 2
        else reply
    )
    run.start()
    (left,) = [r.left_out for r in run.watch.records if r.left_out]
    assert "not answered" in left["client-1"]


def test_a_due_stream_that_is_missing_or_one_too_many_is_refused(tmp_path):
    for change in (lambda c: c.pop("params"), lambda c: c.update({"exp_avg": c["params"]})):
        run = quadratic(tmp_path, Policy())

        def meddle(asked, reply, change=change):
            if asked.metadata.message_type == "train":
                change(reply.content)
            return reply

        run.grid.meddle = meddle
        with pytest.raises(FederationError, match="due are"):
            run.start()


def test_an_answer_to_another_window_is_left_out(tmp_path):
    run = quadratic(tmp_path, Policy())

    def meddle(asked: Message, reply: Message) -> Message:
        if asked.metadata.message_type == "train":
            reply.content["metrics"]["start-step"] = 17
        return reply

    run.grid.meddle = meddle
    with pytest.raises(FederationError, match="answers for the steps"):
        run.start()


def test_two_nodes_of_one_name_are_told_apart_by_an_error(tmp_path):
    run = quadratic(tmp_path, Policy())
    run.grid.contexts[2].node_config["partition-id"] = 0
    with pytest.raises(FederationError, match=r"client-0.*partition-id"):
        run.start()


def test_a_client_of_other_code_is_refused(tmp_path, monkeypatch):
    run = quadratic(tmp_path, Policy())
    monkeypatch.setattr("flower_desloc.flower.client.fingerprint", lambda: "other")
    with pytest.raises(FederationError, match="runs other code"):
        run.start()


def test_the_servers_streams_must_be_the_clients(tmp_path):
    run = quadratic(tmp_path, Policy())
    run.strategy = DesLoc(SyncSchedule({"params": 2, "exp_avg": 2}), 8, run_key=RUN)
    with pytest.raises(FederationError, match=r"exp_avg_sq"):
        run.start()


def test_no_client_at_all_is_an_error_that_names_the_setting(tmp_path):
    run = quadratic(tmp_path, Policy(timeout=0.05))
    run.grid.contexts.clear()
    with pytest.raises(FederationError, match=r"federation\.min_clients=1"):
        run.start()


# ----------------------------------------------------------------------------- Weights and draws


def test_weighting_by_examples_weighs_by_examples(tmp_path):
    run = quadratic(tmp_path, Policy(weighting="examples"))
    assert_close(run.start(), oracle(run, weights=[1.0, 2.0, 3.0]))


def test_a_share_of_the_clients_trains_drawn_by_the_seed(tmp_path):
    policy = Policy(fraction_train=0.5)
    runs = [quadratic(tmp_path / str(i), policy, num_clients=6, seed=3) for i in range(2)]
    states = [run.start() for run in runs]
    assert_same(*states)
    chosen = [set(record.clients) for record in runs[0].watch.records[1:]]
    assert all(len(names) == 3 for names in chosen)
    assert len({frozenset(names) for names in chosen}) > 1


def test_the_traffic_counted_is_that_of_the_messages(tmp_path):
    run = quadratic(tmp_path, Policy())
    run.start()
    size = sum(t.numel() * t.element_size() for t in initial(run.problem).values())
    up: dict[str, int] = {}
    for record in run.watch.records:
        for stream, count in record.traffic.up.items():
            up[stream] = up.get(stream, 0) + count
    assert up == {"params": 3 * 4 * size, "exp_avg": 3 * 2 * size, "exp_avg_sq": 3 * size}


def test_config_records_of_the_app_reach_the_clients(tmp_path):
    seen = []
    run = quadratic(tmp_path, Policy())
    original = run.grid.client_app

    def app(message: Message, context: Context) -> Message:
        seen.append(message.content["config"].get("colour"))
        return original(message, context)

    run.grid.client_app = app
    run.strategy.start(run.grid, run.initial, ConfigRecord({"colour": "blue"}))
    assert set(seen[:-3]) == {"blue"}  # the farewell brings no settings


# ------------------------------------------------------------------ What a long life brings along


@pytest.mark.parametrize(
    ("every", "expected"), [(0, [0, 60]), (4, [0, 10, 20, 30, 40, 50, 60]), (25, [0, 30, 50, 60])]
)
def test_the_model_is_evaluated_at_the_first_average_after_each_multiple(every, expected, tmp_path):
    case = OPTIMIZERS["sgdm"]
    schedule = SyncSchedule(case.periods(10, 3))
    run = Run(Quadratic(), case, schedule, tmp_path, num_clients=1, num_steps=60)
    run.strategy.eval_every = every
    at = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        at.append(run.strategy.globals.step)

    run.strategy.start(run.grid, run.initial, evaluate_fn=evaluate)
    assert at == expected


def test_a_client_whose_app_does_not_evaluate_loses_nothing(tmp_path, caplog):
    run = quadratic(tmp_path, Policy())
    run.strategy.evaluate_clients = True
    run.start()
    assert "lost its state" not in caplog.text
    size = sum(t.numel() * t.element_size() for t in initial(run.problem).values())
    assert run.watch.records[0].traffic.down == {"params": 3 * size}
    assert run.watch.records[1].traffic.down == {}


def test_a_client_that_moves_takes_its_place_once_whatever_its_old_node_does(tmp_path):
    run = quadratic(tmp_path, Policy())

    def move(record: WindowRecord) -> None:
        Run._after(run, record)
        if record.step == 2:  # its old node stays online
            old = run.grid.contexts[2]
            run.grid.contexts[77] = Context(1, 77, old.node_config, RecordDict(), {})

    run.watch.after = move
    assert_close(run.start(), oracle(run))
    assert run.watch.joiners == ["client-1"]


def test_a_damaged_state_file_makes_a_new_client(tmp_path, caplog):
    run = quadratic(tmp_path, Policy())

    def flip(record: WindowRecord) -> None:
        Run._after(run, record)
        if record.step == 2:
            data = bytearray(run.file(1).path.read_bytes())
            kept = run.file(1).read(["exp_avg"])["exp_avg"]["vector"]
            data[data.index(kept.numpy().tobytes()) + 3] ^= 4
            run.file(1).path.write_bytes(data)

    run.watch.after = flip
    run.start()
    assert "is not what was written" in caplog.text


def test_values_that_are_not_finite_never_reach_a_clients_file(tmp_path):
    run = quadratic(tmp_path, Policy(on_failure="continue"))
    loss = Quadratic.loss

    def exploding(self: Quadratic, module: torch.nn.Module, m: int, t: int) -> torch.Tensor:
        factor = torch.inf if (m, t) == (1, 2) else 1.0
        return factor * loss(self, module, m, t)

    object.__setattr__(run.problem, "loss", exploding.__get__(run.problem))
    run.start()
    left = [record.left_out for record in run.watch.records]
    assert [set(out) for out in left] == [set(), set(), {"client-1"}, set(), set()]
    assert "diverged" in left[2]["client-1"]


@pytest.mark.parametrize("examples", [float("nan"), float("inf"), 0, -3])
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_a_number_of_examples_that_cannot_be_is_left_out_by_name(examples, weighting, tmp_path):
    run = quadratic(tmp_path, Policy(on_failure="continue", weighting=weighting))

    def meddle(asked: Message, reply: Message) -> Message:
        if asked.metadata.message_type == "train" and asked.metadata.dst_node_id == 2:
            reply.content["metrics"]["num-examples"] = examples
        return reply

    run.grid.meddle = meddle
    run.start()
    assert all("num-examples" in r.left_out["client-1"] for r in run.watch.records[1:])


@pytest.mark.parametrize(
    "data", [b"PK\x03\x04 no archive", b"", b"\x93NUMPY\x01\x00\x07\x00{'descr"]
)
@pytest.mark.parametrize("dtype", ["float64", "foo"])
def test_bytes_that_are_no_array_are_left_out_by_name(data, dtype, tmp_path):
    run = quadratic(tmp_path, Policy(on_failure="continue"))

    def meddle(asked: Message, reply: Message) -> Message:
        if asked.metadata.message_type == "train" and asked.metadata.dst_node_id == 2:
            stream = next(iter(reply.content.array_records.values()))
            stream["vector"].data, stream["vector"].dtype = data, dtype
        return reply

    run.grid.meddle = meddle
    run.start()
    assert all("cannot be read" in r.left_out["client-1"] for r in run.watch.records[1:])


def test_a_strategy_runs_once(tmp_path):
    run = quadratic(tmp_path, Policy())
    run.start()
    with pytest.raises(ValueError, match="runs once"):
        run.strategy.start(run.grid, run.initial)


@pytest.mark.parametrize(
    ("key", "value"),
    [("on_failure", "contineu"), ("weighting", "size"), ("fraction_train", -1), ("timeout", 0)],
)
def test_a_policy_that_cannot_be_is_refused(key, value):
    with pytest.raises(ValueError, match=key):
        Policy(**{key: value})


@pytest.mark.parametrize("settings", [{"streams": "x"}, {"mine": [1, 2]}])
def test_settings_that_would_not_arrive_are_refused(settings, tmp_path):
    run = quadratic(tmp_path, Policy())
    with pytest.raises(ValueError, match=next(iter(settings))):
        run.strategy.start(run.grid, run.initial, ConfigRecord(settings))


@pytest.mark.parametrize("total", [float("nan"), float("inf"), -1.0])
def test_totals_that_cannot_be_added_are_left_out_of_an_evaluation_by_name(total, tmp_path):
    run = quadratic(tmp_path, Policy(on_failure="continue"))
    run.strategy.evaluate_clients = True

    def meddle(asked: Message, reply: Message) -> Message:
        if asked.metadata.message_type == "evaluate":
            bad = asked.metadata.dst_node_id == 2
            reply.content["metrics"]["totals/nats"] = total if bad else 6.0
            reply.content["metrics"]["totals/tokens"] = 2.0
            reply.content["metrics"]["loss"] = 3.0
        return reply

    run.grid.meddle = meddle
    run.strategy.metrics = lambda totals: {"loss": totals["nats"] / totals["tokens"]}
    assert_close(run.start(), oracle(run))
    last = run.watch.records[-1]
    assert "evaluation" in last.left_out["client-1"]
    assert last.federated is not None
    assert last.federated.overall["loss"] == 3.0
    assert set(last.federated.parts) == {"client-0", "client-2"}
