"""The federated path, from the strategy through records and files to the clients and back."""

import gc
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import (
    OPTIMIZERS,
    Quadratic,
    Regression,
    assert_close,
    assert_same,
    initial,
    size_of,
)
from flower_path import RUN, Run, oracle
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from reference import Tree
from torch.nn import BatchNorm1d

from flower_desloc import (
    Checkpoint,
    Checkpoints,
    ClientInfo,
    DesLoc,
    InProcessGrid,
    SyncSchedule,
    Worker,
    client_app,
    from_record,
    to_record,
)
from flower_desloc.core.streams import digest
from flower_desloc.flower.failures import FederationError
from flower_desloc.flower.fingerprint import code_of
from flower_desloc.flower.observer import WindowRecord
from flower_desloc.flower.policy import Policy
from flower_desloc.flower.replies import ClientEvaluation

# Windows of (4, 12, 24) begin at 0 4 8 12 16 20; params are due at all, the rest at 12 and 24.
SITUATIONS: dict[str, dict[str, Any]] = {
    "periods without a common divisor": {"periods": (5, 7, 11)},
    "one client": {"periods": (4, 12, 24), "num_clients": 1},
    "a state that is never averaged": {"periods": (3, "never", 6), "num_clients": 7},
    "coins": {"periods": (3, 5, 7), "coin_seed": 4},
    "away for two windows": {
        "periods": (4, 12, 24),
        "present": lambda m, t: not (m == 1 and 4 <= t < 12),
    },
    "away while params are not due": {
        "periods": (10, 2, 5),
        "present": lambda m, t: not (m == 2 and 2 <= t < 4),
    },
    # It takes the server's step for its bias correction and clip.
    "joins later": {
        "periods": (2, 2, 2),
        "present": lambda m, t: m != 1 or t >= 4,
    },
    # Its first batch seeds ADOPT's v.
    "joins before v was averaged": {
        "periods": (2, 2, "never"),
        "present": lambda m, t: m != 1 or t >= 4,
    },
}


@pytest.mark.parametrize(
    ("name", "situation"),
    [
        *(("adopt", situation) for situation in SITUATIONS),
        *(("amsgrad", situation) for situation in ("coins", "away for two windows", "joins later")),
    ],
)
def test_the_federated_path_is_algorithm_1(name, situation, tmp_path):
    options = {**SITUATIONS[situation]}
    periods = OPTIMIZERS[name].periods(*options.pop("periods"))
    schedule = SyncSchedule(periods, options.pop("coin_seed", None))
    run = Run(name, schedule, tmp_path, num_steps=26, **options)
    assert_close(run.start(), oracle(run, present=run.present))


class Late(Quadratic):
    """A problem whose clients first need some tensors late, each at its own step, or never."""

    @staticmethod
    def _needs(key: str, m: int, t: int) -> bool:
        return {"matrix": t >= 3 + 2 * m, "vector": t % 3 == m, "empty": False}.get(key, True)

    def loss(self, module: torch.nn.Module, m: int, t: int) -> torch.Tensor:
        needed = {k: p for k, p in module.named_parameters() if self._needs(k, m, t)}
        return super().loss(torch.nn.ParameterDict(needed), m, t)

    def grad(self, m: int, t: int, x: Tree) -> Tree:
        gradient = super().grad(m, t, x)
        return {key: g for key, g in gradient.items() if self._needs(key, m, t)}


@pytest.mark.parametrize("periods", [(4, 5, 7), (12, 12, 12)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_parameter_has_its_states_and_the_runs_step_count_before_its_first_gradient(
    name, periods, tmp_path
):
    """However the steps are cut into windows; without a gradient it takes no step."""
    run = Run(name, periods, tmp_path, problem=Late())
    got = run.start()
    assert_close(got, oracle(run))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_parameter_that_never_has_a_gradient_stays_and_its_states_are_zero(name, tmp_path):
    class Never(Late):
        @staticmethod
        def _needs(key: str, m: int, t: int) -> bool:
            return key != "matrix"

    run = Run(name, (4, 5, 7), tmp_path, problem=Never())
    for state in run.start():
        before = initial(Never())["matrix"]
        assert torch.equal(state["params"]["matrix"], before)  # no weight decay either
        others = [s["matrix"] for name, s in state.items() if name != "params" and "matrix" in s]
        assert not any(tensor.any() for tensor in others)


def test_the_order_of_the_nodes_changes_no_bit(tmp_path):
    def final(order: list[int], name: str) -> dict[str, torch.Tensor]:
        run = Run("adam", (2, 3, 5), tmp_path / name, problem=Regression(), num_clients=5)
        run.renumber(order)
        return run.final()

    assert_same(final([3, 0, 4, 2, 1], "b"), final([0, 1, 2, 3, 4], "a"))


def test_the_server_holds_one_reply_at_a_time(tmp_path):
    run = Run("sgdm", (2, 4), tmp_path, num_clients=9, num_steps=8)
    alive: list[weakref.ref[Message | Array]] = []
    most = []

    def count(reply: Message) -> None:
        alive.append(weakref.ref(reply))
        params: Any = reply.content["params"]
        alive.append(weakref.ref(params["vector"]))
        most.append(sum(ref() is not None for ref in alive))

    run.grid.on_training(count)
    gc.disable()  # no cycle may keep them
    try:
        run.start()
    finally:
        gc.enable()
    assert len(most) == 9 * 4
    assert max(most) == 2  # the reply and its array


def test_a_client_is_sent_the_streams_it_lacks_and_replies_with_the_due_ones(tmp_path):
    run = Run("adam", (2, 3, "never"), tmp_path, num_clients=2, num_steps=8)
    ups = []
    run.grid.on_training(lambda reply: ups.append(set(reply.content.array_records)), node=1)
    run.start()
    trains = [m for m in run.grid.sent if m.metadata.message_type == "train"]
    asked = [m for m in trains if m.metadata.dst_node_id == 1]
    x, u = {"params"}, {"exp_avg"}
    # Events after steps 2 (x), 3 (u), 4 (x), 6 (x, u), 8 (x).
    assert [set(m.content.array_records) for m in asked] == [x, x, u, x, x | u]
    assert ups == [x, u, x, x | u, x]


# ------------------------------------------------------------------------------------- Failures


def failing(run: Run, client: int, start: int, times: int = 1) -> None:
    """Let the client's training raise in the window that begins at ``start``, so many times."""
    original = run.grid.client_app
    errors = [RuntimeError("the disk is on fire")] * times

    def app(message: Message, context: Context) -> Message:
        asked = message.metadata.message_type, context.node_config["partition-id"]
        due = asked == ("train", client) and message.content["config"]["start-step"] == start
        if due and errors:
            raise errors.pop()
        return original(message, context)

    run.grid.client_app = app


def quadratic(folder: Path, policy: Policy | None = None, **options: Any) -> Run:
    return Run("adam", (2, 4, 8), folder, num_steps=8, policy=policy or Policy(), **options)


def test_a_client_that_raises_stops_the_run_by_default(tmp_path):
    run = quadratic(tmp_path)
    failing(run, client=1, start=2)
    what = r"client-1 .*steps 3 to 4.*the disk is on fire.*on_failure"
    with pytest.raises(FederationError, match=what):
        run.start()


@pytest.mark.parametrize("start", [0, 4])
def test_a_window_below_the_quorum_is_repeated_and_changes_nothing(start, tmp_path):
    """Every client is sent the same again, and repeats its steps from what it held before."""
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


def test_a_client_that_moves_in_a_repeated_window_loses_nothing(tmp_path):
    policy = Policy(on_failure="continue", min_clients=3, repeats=1)
    calm, run = (quadratic(tmp_path / name, policy) for name in ("calm", "moved"))
    failing(run, client=2, start=4)

    def move(reply: Message) -> None:
        if reply.content["metrics"]["start-step"] == 4:
            run.grid.contexts[77] = run.grid.contexts.pop(2)

    run.grid.on_training(move, node=2)
    assert_same(run.start(), calm.start())
    (record,) = [r for r in run.watch.records if r.start == 4]
    assert [e.kind for e in record.events] == ["failed", "repeated", "moved"]
    assert record.events[-1].what == "from node 2 to node 77"


def test_a_client_may_move_back_to_the_node_it_came_from(tmp_path):
    """As when a site fails over to another SuperNode and back: a node's id is its key's."""
    run = Run("adam", (2, 2, 2), tmp_path, num_steps=10, policy=Policy(on_failure="continue"))
    nodes = run.grid.contexts
    site = nodes[2].node_config

    def move(record: WindowRecord) -> None:
        if record.step in (2, 8):
            nodes.pop(2 if record.step == 2 else 77, None)
            number = 77 if record.step == 2 else 2
            nodes[number] = Context(1, number, site, RecordDict(), {})
        if record.step == 6:
            del nodes[77]

    run.watch.after.append(move)
    run.start()
    events = [e for record in run.watch.records for e in record.events]
    assert [e.kind for e in events] == ["moved", "left", "moved"]
    assert len(run.watch.records[-1].clients) == 3


def test_a_run_whose_clients_have_gone_stops_with_a_checkpoint(tmp_path):
    policy = Policy(on_failure="continue", min_clients=3, timeout=0.2)
    checkpoints = Checkpoints(tmp_path / "checkpoints", every=5)
    run = Run(
        "adam", (1, 1, 1), tmp_path, num_steps=6, policy=policy, checkpoints=checkpoints,
        present=lambda m, step: m != 1 or step < 3,
    )  # fmt: skip
    run.leave(0)
    with pytest.raises(FederationError, match=r"only 2 of federation\.min_clients=3"):
        run.start()
    assert [Checkpoint.read(path).step for path in checkpoints.all()] == [0, 3]


def test_a_run_that_stays_below_the_quorum_stops_with_the_reason(tmp_path):
    run = quadratic(tmp_path, Policy(on_failure="continue", min_clients=3, repeats=1))
    failing(run, client=2, start=2, times=9)
    with pytest.raises(FederationError, match=r"min_clients=3.*repeats=1.*client-2"):
        run.start()
    last = run.files(0).last()
    assert last is not None
    assert last.step == 4  # the others' work is on their disks


def two_nodes_of_one_name(run: Run) -> None:
    run.grid.contexts[2].node_config["partition-id"] = 0


def streams_of_another_optimizer(run: Run) -> None:
    run.strategy = DesLoc(SyncSchedule({"params": 2, "exp_avg": 2}), 8, run_key=RUN)


def no_client(run: Run) -> None:
    run.grid.contexts.clear()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (two_nodes_of_one_name, r"client-0.*partition-id"),
        (streams_of_another_optimizer, "exp_avg_sq"),
        (no_client, r"federation\.min_clients=1"),
    ],
)
def test_a_federation_that_cannot_begin_says_what_to_change(change, words, tmp_path):
    run = quadratic(tmp_path, Policy(timeout=0.05))
    change(run)
    with pytest.raises(FederationError, match=words):
        run.start()


def test_a_client_of_other_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("flower_desloc.flower.fingerprint.fingerprint", lambda: "other")
    with pytest.raises(FederationError, match="runs other code"):
        quadratic(tmp_path).start()


def test_a_client_whose_task_is_another_version_is_refused_with_its_name_and_the_file(
    tmp_path, monkeypatch
):
    run, file = quadratic(tmp_path / "run"), tmp_path / "task_here.py"
    file.write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    run.strategy.code = code_of(["task_here"])
    assert run.strategy.code
    file.write_text("x = 2")
    with pytest.raises(FederationError, match=r"client-0 runs other code.* of task_here\.py; copy"):
        run.start()


def test_of_a_worker_without_information_its_examples_and_data_are_stated(tmp_path):
    run = quadratic(tmp_path)
    run.start()
    stated = ClientInfo(num_examples=2, data_version="the same")
    assert run.watch.run is not None
    assert run.watch.run.clients["client-1"] == stated


def test_data_that_changed_while_a_client_was_away_is_recorded(tmp_path):
    run = quadratic(tmp_path)

    def move(record: WindowRecord) -> None:
        if record.step == 4:
            run.data_versions[1] = "another"
            run.renumber([2, 1, 0])

    run.watch.after.append(move)
    run.start()
    events = [e for record in run.watch.records for e in record.events if e.kind != "moved"]
    assert [(e.kind, e.client, e.what) for e in events] == [
        ("data changed", "client-1", "it was the same; it is another")
    ]


# ------------------------------------------------------------------------------ Draws and settings


def test_a_share_of_the_clients_trains_drawn_by_the_seed(tmp_path):
    policy = Policy(fraction_train=0.5)
    runs = [quadratic(tmp_path / str(i), policy, num_clients=6, seed=3) for i in range(2)]
    states = [run.start() for run in runs]
    assert_same(*states)
    chosen = [set(record.clients) for record in runs[0].watch.records[1:]]
    assert all(len(names) == 3 for names in chosen)
    assert len({frozenset(names) for names in chosen}) > 1


def test_a_repeated_window_draws_other_clients(tmp_path):
    """Those that failed are drawn last; every first draw is that of a run without failures."""
    policy = Policy(fraction_train=0.2, on_failure="continue", repeats=4)
    run = quadratic(tmp_path, policy, num_clients=5, seed=3)
    names = [f"client-{m}" for m in range(5)]
    first = {t: random.Random(f"3/clients/{t}").sample(names, 1)[0] for t in (0, 2, 4, 6)}
    tried: list[str] = []
    app = run.grid.client_app

    def client_app(message: Message, context: Context) -> Message:
        config = message.content["config"]
        if (message.metadata.message_type, config["start-step"]) == ("train", 4):
            tried.append(f"client-{context.node_config['partition-id']}")
            if len(tried) < 5:
                raise OSError("Input/output error")
        return app(message, context)

    run.grid.client_app = client_app
    run.watch.after.clear()  # most clients are never drawn, and hold nothing
    run.strategy.start(run.grid, run.initial, observer=run.watch)
    assert tried[0] == first.pop(4)
    assert sorted(tried) == names
    assert {r.start: [*r.clients] for r in run.watch.records[1:] if r.start != 4} == {
        start: [name] for start, name in first.items()
    }


def test_config_records_of_the_app_reach_the_clients(tmp_path):
    run = quadratic(tmp_path)
    run.strategy.start(run.grid, run.initial, ConfigRecord({"colour": "blue"}))
    *asked, _, _, _ = run.grid.sent  # the farewell brings no settings
    assert {message.content["config"].get("colour") for message in asked} == {"blue"}


@pytest.mark.parametrize(
    ("every", "expected"), [(0, [0, 30]), (4, [0, 5, 10, 15, 20, 25, 30]), (12, [0, 15, 25, 30])]
)
def test_the_model_is_evaluated_at_the_first_average_after_each_multiple(every, expected, tmp_path):
    run = Run("sgdm", (5, 3), tmp_path, num_clients=1, num_steps=30)
    run.strategy.eval_every = every
    at = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        at.append(run.strategy.state.step)

    run.strategy.start(run.grid, run.initial, evaluate_fn=evaluate)
    assert at == expected


@pytest.mark.parametrize("period", [1, 2, 64])
def test_the_averaged_model_has_the_buffers_of_its_parameters(period, tmp_path):
    """Whatever their period: at the end of a run that is shorter, and in mid-run."""
    rows = [torch.randn(8, 2, generator=torch.Generator().manual_seed(m)) + m for m in range(3)]

    def build(config: Any, context: Context) -> Worker:
        x, module = rows[int(context.node_config["partition-id"])], BatchNorm1d(2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return Worker(module=module, optimizer=optimizer, num_examples=8,
                      loss_at=lambda step: module(x).square().sum())  # fmt: skip

    new, alone = BatchNorm1d(2), [BatchNorm1d(2) for _ in rows]
    for module, x in zip(alone, rows, strict=True):
        for _ in range(4):
            module(x)  # its statistics do not depend on the weights
    means = {
        name: torch.stack([dict(module.named_buffers())[name] for module in alone]).mean(0)
        for name in ("running_mean", "running_var")
    }
    states = {"buffers": {name: dict(new.named_buffers())[name] for name in means}}
    schedule = SyncSchedule({"params": 3, "buffers": period})
    strategy = DesLoc(schedule, 4, templates=states, eval_every=3)
    seen: list[ArrayRecord] = []
    nodes = [{"partition-id": m, "state-dir": str(tmp_path)} for m in range(3)]
    start = to_record(dict(new.named_parameters()))
    result = strategy.start(
        InProcessGrid(client_app(build), nodes),
        start,
        evaluate_fn=lambda _, model: seen.append(model),
    )
    last = from_record(result.arrays)
    assert [set(model) for model in seen] == [{"weight", "bias", *means}] * 3
    assert digest(last) == digest(from_record(seen[-1]))
    for name, mean in means.items():
        assert torch.allclose(last[name], mean)


def test_a_client_whose_app_does_not_evaluate_keeps_its_state(tmp_path, caplog):
    run = quadratic(tmp_path)
    run.strategy.evaluate_clients = True
    run.start()
    assert "lost its state" not in caplog.text
    assert run.watch.records[0].traffic.down == {"params": 3 * size_of(run.problem)}
    assert run.watch.records[1].traffic.down == {}


def test_a_client_that_moves_is_asked_once_even_if_its_old_node_is_online(tmp_path):
    run = quadratic(tmp_path)

    def move(record: WindowRecord) -> None:
        if record.step == 2:  # its old node stays online
            old = run.grid.contexts[2]
            run.grid.contexts[77] = Context(1, 77, old.node_config, RecordDict(), {})

    run.watch.after.append(move)
    assert_close(run.start(), oracle(run))
    assert run.watch.joiners == ["client-1"]


def test_a_strategy_runs_once(tmp_path):
    run = quadratic(tmp_path)
    run.start()
    with pytest.raises(ValueError, match="runs once"):
        run.strategy.start(run.grid, run.initial)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("on_failure", "contineu"),
        ("weighting", "size"),
        ("average", "mode"),
        ("fraction_train", -1),
        ("timeout", 0),
        ("norm_bound", 0.9),
        ("attendance", {-1: 2}),
    ],
)
def test_a_policy_names_the_field_that_is_invalid(key, value):
    with pytest.raises(ValueError, match=key):
        Policy(**{key: value})


@pytest.mark.parametrize("options", [{"num_steps": 0}, {"eval_every": -1}, {"sync_delay": -1}])
def test_a_strategy_names_the_option_that_is_invalid(options, tmp_path):
    with pytest.raises(ValueError, match=str(*options)):
        Run("adam", (2, 4, 8), tmp_path, **options)


def test_an_observer_that_is_none_is_refused_before_the_run(tmp_path):
    run = quadratic(tmp_path)
    with pytest.raises(TypeError, match=r"observer=.*must be a flower_desloc\.Observer"):
        run.strategy.start(run.grid, run.initial, observer=print)  # type: ignore[arg-type]


def test_metrics_that_are_averaged_may_be_negative_and_totals_not():
    def check(value: float, metrics: Any = None) -> None:
        reported = {"num-examples": 1, "x": value, "totals/x": value}
        ClientEvaluation.measured(reported, metrics)

    check(-2.0)
    check(2.0, dict)
    with pytest.raises(ValueError, match="at least 0"):
        check(-2.0, dict)
    with pytest.raises(ValueError, match=r"at most 1e\+30"):
        check(float("inf"))
    with pytest.raises(ValueError, match="look for NaN"):
        check(float("nan"))


@pytest.mark.parametrize(("name", "value"), [("streams", "x"), ("code", "x"), ("mine", [1, 2])])
def test_settings_that_cannot_be_sent_are_refused(name, value, tmp_path):
    run = quadratic(tmp_path)
    with pytest.raises(ValueError, match=name):
        run.strategy.start(run.grid, run.initial, ConfigRecord({name: value}))


def test_a_grid_in_one_process_gives_a_client_its_run_config_and_its_threads():
    seen = []

    def client(message: Message, context: Context) -> Message:
        seen.append((torch.get_num_threads(), context.run_config, context.node_config["m"]))
        context.run_config["own"] = True
        return Message(RecordDict(), reply_to=message)

    before = torch.get_num_threads()
    given = {"lr": 0.1}
    both: dict[str, Any] = {"threads": 2, "run_config": given}
    for options, threads in (({}, 1), (both, 2)):
        grid = InProcessGrid(client, [{"m": 0}, {"m": 1}], **options)
        grid.send_and_receive([Message(RecordDict(), node, "train") for node in (1, 2)])
        config = options.get("run_config", {})
        assert [s[0] for s in seen] == [threads] * 2
        assert [(s[1], s[2]) for s in seen] == [({**config, "own": True}, m) for m in (0, 1)]
        seen.clear()
    assert torch.get_num_threads() == before
    assert given == {"lr": 0.1}
