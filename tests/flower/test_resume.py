"""A server that is killed and resumes ends with the same weights, bit for bit."""

import dataclasses
import os
import random
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from faults import files_of_at_most
from federation import OPTIMIZERS, assert_same
from flower_path import RUN, Run
from flwr.app import Error, Message

from flower_desloc import SyncSchedule
from flower_desloc.app.config import ConfigError, dump, load
from flower_desloc.app.runs import RunFolder
from flower_desloc.app.runs.resume import to_resume
from flower_desloc.core.outer import OuterOptimizer
from flower_desloc.core.schedule import GRADIENTS, NEVER, PARAMS, RESET, Period
from flower_desloc.core.streams import digest
from flower_desloc.flower import tensor_file
from flower_desloc.flower.arrays import from_record
from flower_desloc.flower.checkpoint import (
    Checkpoint,
    CheckpointError,
    Checkpoints,
    last_checkpoint,
)
from flower_desloc.flower.client_state import STATE_MEMORY, StateMemory
from flower_desloc.flower.failures import FederationError
from flower_desloc.flower.policy import Policy


class Killed(KeyboardInterrupt):
    """The server is killed: no message, no clean-up."""


@dataclass
class Fuse:
    """Kills the server at the given point; counts the points where it may die."""

    length: float = float("inf")
    burnt: list[str] = field(default_factory=list)

    def burn(self, where: str) -> None:
        self.burnt.append(where)
        if len(self.burnt) > self.length:
            raise Killed(where)


@dataclass
class Case:
    """A run whose server is to die; ``options`` are those of ``Run``."""

    optimizer: str = "adopt"
    schedule: SyncSchedule | Sequence[Period] = (2, 3, 5)
    every: int = 1
    outer: Callable[[], OuterOptimizer] | None = None
    policy: Policy = field(default_factory=Policy)
    present: Callable[[int, int], bool] = lambda m, t: True
    instead: Callable[[Message], Message | None] = lambda asked: None
    in_memory: bool = False
    """Whether states that no resume looks for are in memory, which is lost with the server."""
    later: bool = False
    """Whether they are written as late as may be, as by a process that outlives its messages."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(
        self, folder: Path, fuse: Fuse | None = None, *, resume: bool = False, last: int = -1
    ) -> Run:
        fuse = fuse or Fuse()
        checkpoints = Burning(fuse, folder / "checkpoints", self.every)
        # Killed before the first checkpoint, it starts anew.
        latest = Checkpoint.read(checkpoints.all()[last]) if resume and checkpoints.all() else None
        run = Run(
            self.optimizer,
            self.schedule,
            folder / "clients",
            outer=self.outer() if self.outer else None,
            policy=self.policy,
            seed=5,
            present=self.present,
            evaluate_clients=True,
            eval_every=4,
            checkpoints=checkpoints,
            resume=latest,
            **self.options,
        )
        run.leave(latest.step if latest else 0)
        run.grid.instead = self.instead
        run.keep_workers = self.later
        if self.later:
            run.app.outlive_messages()
        pull = run.grid.pull_messages

        def pull_messages(message_ids: Iterable[str]) -> Iterable[Message]:
            fuse.burn("before a reply")
            run.app.write_state()
            replies = pull(message_ids)
            fuse.burn("after a reply")
            return replies

        run.grid.pull_messages = pull_messages  # type: ignore[method-assign]
        run.watch.after.insert(0, lambda record: fuse.burn("before the record"))
        run.watch.after.append(lambda record: fuse.burn("after the record"))
        memory = StateMemory(
            folder / "memory", folder / "clients", 1 << 30 if self.in_memory else 0
        )
        shutil.rmtree(memory.folder, ignore_errors=True)
        memory.folder.mkdir(parents=True)
        with patch.dict(os.environ, {STATE_MEMORY: memory.to_text()}):
            run.strategy.start(run.grid, run.initial, observer=run.watch)
        return run


class Burning(Checkpoints):
    """Checkpoints whose writing may be the server's last act."""

    def __init__(self, fuse: Fuse, folder: Path, every: int) -> None:
        super().__init__(folder, every)
        self.fuse = fuse

    def write(self, checkpoint: Checkpoint) -> None:
        self.fuse.burn("before the checkpoint")
        (self.folder / "step-99999999.partial").write_bytes(b"half") if self.all() else None
        self.fuse.burn("within the checkpoint")
        super().write(checkpoint)
        self.fuse.burn("after the checkpoint")


def nesterov() -> OuterOptimizer:
    return OuterOptimizer(lambda p: torch.optim.SGD(p, 0.7, momentum=0.9, nesterov=True))


ADAM = OPTIMIZERS["adam"]
DILOCO: tuple[Period, ...] = (3, NEVER, NEVER)
CODES = {PARAMS: "int4", "exp_avg": "int8", "exp_avg_sq": "int8"}
SOME = Policy(fraction_train=0.6)
PACES = {"client-0": 1.0, "client-1": 1.5, "client-2": 4.0}
CASES = {
    "periods": Case(),
    "coins": Case("amsgrad", SyncSchedule(OPTIMIZERS["amsgrad"].periods(2, 3, 5), coin_seed=3)),
    "every third window": Case("adam", every=3),
    "some of the clients": Case(every=4, policy=SOME),
    "states in memory": Case("adam", every=3, in_memory=True),
    "states of some of the clients in memory": Case(every=4, policy=SOME, in_memory=True),
    "states in memory, and written later": Case(every=2, later=True, in_memory=True),
    "a client that comes and goes": Case(every=2, present=lambda m, t: m != 1 or not 3 <= t < 8),
    "DiLoCo": Case(schedule=DILOCO, outer=nesterov, every=2),
    "coded streams": Case(
        "muon",
        options={"compression": {**CODES, "momentum_buffer": "int8"}},
        present=lambda m, t: m != 2 or not 4 <= t < 7,
    ),
    "coded DiLoCo": Case(
        schedule=DILOCO, outer=nesterov, every=2, options={"compression": {PARAMS: "int8"}}
    ),
    "reset states": Case("adam", (3, RESET, RESET)),
    "late averages": Case("adam", (3, 4, 6), options={"sync_delay": 2}),
    "late averages of some of the clients": Case(every=2, policy=SOME, options={"sync_delay": 1}),
    "late averages in codes": Case(
        "adam",
        SyncSchedule(ADAM.periods(2, 4, 6), phases={"exp_avg": 2, "exp_avg_sq": 4}),
        present=lambda m, t: m != 2 or not 4 <= t < 8,
        options={"compression": CODES, "sync_delay": 1},
    ),
    "late DiLoCo": Case(schedule=DILOCO, outer=nesterov, options={"sync_delay": 2}),
    "sites of unequal speed": Case(
        "adam",
        (4, 6, 9),
        every=2,
        policy=Policy(min_steps=0.3, step_seconds=PACES),
        present=lambda m, t: m != 1 or not 4 <= t < 6,
        options={"compression": {PARAMS: "int8"}, "sync_delay": 1},
    ),
    "data parallelism": Case(
        schedule=SyncSchedule({GRADIENTS: 1}), outer=lambda: OuterOptimizer(ADAM.make), every=3
    ),
}


class Whole:
    """A run to the end, and the points where its server might have died."""

    def __init__(self, case: Case, folder: Path) -> None:
        fuse = Fuse()
        self.run = case.run(folder, fuse)
        self.points = fuse.burnt

    def at(self, where: str) -> list[int]:
        return [i for i, point in enumerate(self.points) if point == where]


def killed(case: Case, folder: Path, point: int, **options: Any) -> None:
    with pytest.raises(Killed):
        case.run(folder, Fuse(point), **options)


def outcome(run: Run) -> dict[str, str]:
    return {name: digest(from_record(a)) for name, a in run.strategy.state.averages.items()}


@pytest.mark.parametrize("number", [1, pytest.param(8, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", CASES)
def test_a_run_killed_anywhere_and_resumed_ends_with_the_same_bits(name, number, tmp_path):
    """At points drawn by the case's name, half of them after a checkpoint."""
    case, draw = CASES[name], random.Random(name)
    whole = Whole(case, tmp_path / "whole")
    saved = whole.at("after the checkpoint")
    anywhere = range(1, len(whole.points))
    points = {draw.choice(draw.choice([saved, anywhere])) for _ in range(number)}
    for point in sorted(points):
        folder = tmp_path / str(point)
        killed(case, folder, point)
        if point % 3 == 0 and point < len(whole.points) // 2:  # a server may die twice
            killed(case, folder, 9, resume=True)
        resumed = case.run(folder, resume=True)
        assert outcome(resumed) == outcome(whole.run), point
        assert resumed.strategy.state.versions == whole.run.strategy.state.versions
        if resumed.states and whole.run.states:
            assert_same(resumed.states, whole.run.states)
        assert not (folder / "clients" / RUN).exists()  # goodbye deletes it all


@pytest.mark.parametrize("name", ["coded streams", "late averages in codes"])
def test_a_run_resumed_from_the_checkpoint_before_the_last_ends_with_the_same_bits(name, tmp_path):
    """Killed when some of the clients have gone on from the last one, and when none has."""
    case = CASES[name]
    whole = Whole(case, tmp_path / "whole")
    saved = whole.at("after the checkpoint")
    points = (saved[2], saved[2] + 4, saved[3] - 1, saved[4] + 2)
    which = slice(0, 2) if name == "coded streams" else slice(2, 4)
    for point, again in list(zip(points, (0, 12, 3, 12), strict=True))[which]:
        folder = tmp_path / str(point)
        killed(case, folder, point)
        killed(case, folder, again, resume=True, last=-2)  # at the start or on the way back
        # From the last there is, which is none of the first course.
        assert outcome(case.run(folder, resume=True)) == outcome(whole.run), point


def test_a_client_that_was_away_when_the_server_resumed_drops_the_abandoned_work(tmp_path):
    """Its state after step 8 is abandoned; at its return the server's checkpoint is 8 again."""
    always = Case("adam", every=2)
    away = dataclasses.replace(always, present=lambda m, t: m != 1 or not 5 <= t < 8)
    saves = Whole(always, tmp_path / "always").at("before the checkpoint")
    killed(always, tmp_path / "killed", saves[3])  # of the steps 0, 3, 5, 8
    resumed = away.run(tmp_path / "killed", resume=True)
    assert outcome(resumed) == outcome(away.run(tmp_path / "whole"))


def test_an_evaluation_does_not_change_a_clients_state_at_a_checkpoint(tmp_path):
    """Client 1 fails in the window before the evaluation of step 4; then the server is killed.

    Resumed, client 2 fails as well, so the average of step 4 is another one.
    """
    failing = {1, 2}

    def fail(message: Message) -> Message | None:
        metadata, stop = message.metadata, message.content["config"]["stop-step"]
        if (metadata.message_type, stop) == ("train", 4) and metadata.dst_node_id - 1 in failing:
            return Message(Error(8, "out of memory"), reply_to=message)
        return None

    case = Case("adam", every=2, policy=Policy(on_failure="continue"), instead=fail)
    whole = Whole(case, tmp_path / "whole")
    failing.discard(2)
    killed(case, tmp_path / "killed", whole.at("before the checkpoint")[2])  # of step 5
    failing.add(2)
    assert outcome(case.run(tmp_path / "killed", resume=True)) == outcome(whole.run)


def test_auto_resumes_from_no_window_that_is_off_the_record(tmp_path):
    """A start from an earlier checkpoint may end after it has rewound the record."""
    config = load("quickstart")
    folder = RunFolder.create(tmp_path, "quickstart")
    folder.write_config(dump(config))
    checkpoints = Checkpoints(folder.checkpoints, 1, dump(config))
    for number in range(4):
        folder.append_metrics({"round": number, "step": 4 * number, "evaluation": {}})
        if number >= 2:  # the last two are kept
            checkpoints.write(a_checkpoint(round=number, step=4 * number))
    folder.rewind(2)
    for resume in ("auto", str(folder.path)):
        found = to_resume(load("quickstart", f"run.resume={resume}"), tmp_path)
        assert found is not None
        assert found[1].round == 2
    assert len(checkpoints.all()) == 2  # of which the next start deletes what it repeats


def test_a_run_that_a_broken_client_ended_is_resumed_with_another(tmp_path):
    """It draws whom a repeat would have drawn, also from a checkpoint of an earlier window."""

    def fail(message: Message) -> Message | None:
        at = (message.metadata.message_type, message.content["config"]["start-step"])
        return Message(Error(2, "disk"), reply_to=message) if at == ("train", 6) else None

    def broken(message: Message) -> Message | None:
        return fail(message) if message.metadata.dst_node_id == 1 + int(drawn[-1]) else None

    policy = Policy(fraction_train=0.3, on_failure="continue", repeats=0)
    calm = Case(every=3, policy=policy).run(tmp_path / "calm")
    (drawn,) = next(r.clients for r in calm.watch.records if r.start == 6)
    case = Case(every=3, policy=policy, instead=broken)
    with pytest.raises(FederationError, match=f"repeats=0.*{drawn}"):
        case.run(tmp_path / "run")
    kept = Checkpoint.read(Checkpoints(tmp_path / "run/checkpoints").all()[-1])
    assert (kept.step, kept.failures) == (6, {drawn: 1})
    repeating = dataclasses.replace(case, policy=dataclasses.replace(policy, repeats=1))
    assert outcome(case.run(tmp_path / "run", resume=True)) == outcome(
        repeating.run(tmp_path / "repeating")
    )


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_run_that_stays_below_the_quorum_is_resumed_with_all_local_steps(tmp_path, in_memory):
    """The clients that took part in the failed window have a later state than the checkpoint."""
    left = [1]

    def fail(message: Message) -> Message | None:
        at = (message.metadata.message_type, message.content["config"]["start-step"])
        if (*at, message.metadata.dst_node_id) != ("train", 8, 3) or not left[0]:
            return None
        left[0] -= 1
        return Message(Error(2, "disk"), reply_to=message)

    policy = Policy(min_clients=3, on_failure="continue", repeats=1)
    case = Case(
        "adam", (4, 9, 12), every=3, policy=policy, instead=fail, in_memory=in_memory,
        options={"num_steps": 12},
    )  # fmt: skip
    repeated = case.run(tmp_path / "repeated")
    left[0] = 1
    case = dataclasses.replace(case, policy=dataclasses.replace(policy, repeats=0))
    with pytest.raises(FederationError, match="repeats=0"):
        case.run(tmp_path / "run")
    resumed = case.run(tmp_path / "run", resume=True)
    assert outcome(resumed) == outcome(repeated)
    assert not [e for record in resumed.watch.records for e in record.events]


def test_clients_need_no_files_where_every_stream_was_just_averaged(tmp_path):
    """At step 6 every stream has just been averaged: clients that lose all have lost nothing."""
    case, folder = Case("adam", (2, 3, 6)), tmp_path / "killed"
    whole = Whole(case, tmp_path / "whole")
    killed(case, folder, whole.at("after the checkpoint")[4])  # of the steps 0, 2, 3, 4, 6
    assert Checkpoint.read(Checkpoints(folder / "checkpoints").all()[-1]).step == 6
    shutil.rmtree(folder / "clients")
    resumed = case.run(folder, resume=True)
    assert outcome(resumed) == outcome(whole.run)
    assert not any(record.events for record in resumed.watch.records)


def test_a_resumed_run_takes_a_client_without_files_as_a_new_one(tmp_path):
    """Elsewhere its own work since the last average is gone, and the run goes on all the same."""
    case, folder = Case(), tmp_path / "killed"
    whole = Whole(case, tmp_path / "whole")
    killed(case, folder, len(whole.points) // 2)
    shutil.rmtree(folder / "clients" / RUN / "client-1")
    resumed = case.run(folder, resume=True)
    assert resumed.strategy.state.versions == whole.run.strategy.state.versions
    assert outcome(resumed) != outcome(whole.run)
    events = [event for record in resumed.watch.records for event in record.events]
    assert [(e.kind, e.client) for e in events] == [("state lost", "client-1")]


def test_data_and_code_that_changed_since_the_checkpoint_are_recorded(tmp_path):
    case = Case()
    killed(case, tmp_path, Whole(case, tmp_path / "whole").at("after the checkpoint")[2])
    file = Checkpoints(tmp_path / "checkpoints").all()[-1]
    last = Checkpoint.read(file)
    assert last.data == dict.fromkeys(["client-0", "client-1", "client-2"], "the same")
    data = {**last.data, "client-1": "3 rows", "client-9": "of one that is away"}
    code = {**last.code, "mine.py": "a digest"}
    Checkpoints(file.parent).write(dataclasses.replace(last, data=data, code=code))
    events = [e for r in case.run(tmp_path, resume=True).watch.records for e in r.events]
    assert [(e.kind, e.client, e.what) for e in events] == [
        ("data changed", "client-1", "it was 3 rows; it is the same"),
        ("code changed", "", "mine.py changed since the checkpoint; the run continues with it"),
    ]
    last = Checkpoint.read(Checkpoints(file.parent).all()[-1])
    assert (last.data["client-1"], last.data["client-9"]) == ("the same", "of one that is away")


def a_checkpoint(**changes: Any) -> Checkpoint:
    about: dict[str, Any] = {
        "run_key": "run",
        "round": 2,
        "step": 4,
        "evaluated": 4,
        "versions": {PARAMS: 4, "exp_avg": 3},
        "averages": {PARAMS: {"w": torch.randn(3, 2)}, "exp_avg": {"w": torch.randn(3, 2)}},
        "outer": {"step": {"w": torch.tensor(2.0)}},
    }
    return Checkpoint(**about | changes)


HARMS: dict[str, Callable[[bytes], bytes]] = {
    "torn": lambda data: data[: len(data) // 2],
    "flipped": lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
}


@pytest.mark.parametrize("harm", [*HARMS, "of a client"])
def test_a_damaged_checkpoint_is_refused_in_one_sentence(harm, tmp_path):
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.write(a_checkpoint())
    (path,) = checkpoints.all()
    before = path.read_bytes()
    if harm == "of a client":
        tensor_file.write(path, {"step": 4, "versions": {}}, {PARAMS: {"w": torch.zeros(2)}})
    else:
        path.write_bytes(HARMS[harm](before))
    assert path.read_bytes() != before
    with pytest.raises(CheckpointError, match=r"step-00000004.*take the (one|checkpoint) before"):
        Checkpoint.read(path)


def test_a_checkpoint_outside_a_runs_folder_is_not_resumed(tmp_path):
    """Nothing is written beside it."""
    folder = tmp_path / "mine" / "other"
    folder.mkdir(parents=True)
    Checkpoints(folder, every=1).write(a_checkpoint())
    (path,) = Checkpoints(folder).all()
    config = load("quickstart", f"run.resume={path}")
    with pytest.raises(ConfigError, match=r"it is not in a run's folder"):
        to_resume(config, tmp_path)
    assert list(tmp_path.rglob("*.*")) == [path]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"versions": {PARAMS: 4}}, "has the streams"),
        ({"averages": {PARAMS: {"w": torch.zeros(7)}}}, "which the model does not have"),
    ],
)
def test_a_checkpoint_of_other_streams_or_another_model_is_refused(changes, words, tmp_path):
    Case().run(tmp_path / "a")
    last = Checkpoint.read(Checkpoints(tmp_path / "a" / "checkpoints").all()[-1])
    run = Run("adopt", (2, 3, 5), tmp_path, resume=dataclasses.replace(last, **changes))
    with pytest.raises(ValueError, match=words):
        run.start()


@pytest.mark.parametrize(
    "changes", [{"schedule": (4, 6, 10)}, {"schedule": (1, 1, 1)}, {"num_steps": 4}]
)
def test_a_checkpoint_that_ends_no_window_of_the_schedule_is_refused(changes, tmp_path):
    now = {"schedule": (2, 3, 5), "num_steps": 12} | changes
    with pytest.raises(ValueError, match=r"after window 6 and step 8; no window of .*resume with"):
        Run("adam", folder=tmp_path, resume=a_checkpoint(round=6, step=8), **now)


def test_a_run_from_the_start_keeps_the_checkpoints_of_another(tmp_path):
    Case().run(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="another run; resume from the last"):
        Case().run(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_checkpoints_that_are_not_written_are_not_in_the_way(tmp_path):
    Checkpoints(tmp_path).write(a_checkpoint())
    Run("adam", (2, 3, 5), tmp_path, checkpoints=Checkpoints(tmp_path, every=0)).start()


def test_the_last_checkpoint_is_that_of_the_folder_or_of_the_run(tmp_path):
    folder = tmp_path / "checkpoints"
    for step in (4, 8):
        Checkpoints(str(folder)).write(a_checkpoint(step=step))
    assert last_checkpoint(folder) == last_checkpoint(tmp_path) == Checkpoints(folder).all()[-1]


def test_a_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"step-8\.safetensors: no such file"):
        Checkpoint.read(tmp_path / "step-8.safetensors")


def test_a_full_disk_leaves_the_earlier_checkpoints_intact(tmp_path):
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.write(a_checkpoint())
    big = a_checkpoint(step=8, averages={PARAMS: {"w": torch.zeros(5000)}})
    with (
        files_of_at_most(2000),
        pytest.raises(OSError, match=r"step-00000008.*free disk space"),
    ):
        checkpoints.write(big)
    (path,) = checkpoints.all()
    assert Checkpoint.read(path).step == 4
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_checkpoint_is_resumed_with_its_own_settings_only(tmp_path):
    folder = tmp_path / "quickstart" / "checkpoints"
    folder.mkdir(parents=True)
    Checkpoints(folder, 1, dump(load("quickstart"))).write(a_checkpoint())
    resumed = to_resume(load("quickstart", f"run.resume={folder.parent}"), tmp_path)
    assert resumed is not None
    assert resumed[1].step == a_checkpoint().step
    with pytest.raises(ConfigError, match=r"under other settings: federation\.norm_bound"):
        to_resume(
            load("quickstart", f"run.resume={folder.parent} federation.norm_bound=3"), tmp_path
        )


def test_a_value_that_nothing_uses_does_not_keep_a_run_from_being_resumed(tmp_path):
    folder = tmp_path / "quickstart" / "checkpoints"
    folder.mkdir(parents=True)
    ours = load("quickstart", f"run.resume={folder.parent}")
    other = dump(load("quickstart")).replace("alpha: 0.5", "alpha: 0.3")
    assert other != dump(load("quickstart"))
    Checkpoints(folder, 1, other).write(a_checkpoint())
    assert to_resume(ours, tmp_path) is not None
    Checkpoints(folder, 1, other + "no_such_setting: 1\n").write(a_checkpoint())
    said = r"step-00000004\S*: the configuration was written by another version of .*new run$"
    with pytest.raises(ConfigError, match=said):
        to_resume(ours, tmp_path)
