"""Averages that arrive late: the federated path beside an oracle that is given them in time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Faults
from federation import OPTIMIZERS, Quadratic, assert_same
from flower_path import Run
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from flower_desloc import DesLoc, Policy, SyncSchedule, Worker
from flower_desloc.app.config import ConfigError, load
from flower_desloc.app.setup.streams import RunStreams
from flower_desloc.core.kinds import Kind
from flower_desloc.core.late import merged
from flower_desloc.core.schedule import PARAMS, RESET, Period
from flower_desloc.core.states import state_decays
from flower_desloc.flower.ahead import FirstSteps, StepsAhead
from flower_desloc.flower.observer import WindowRecord


def late(
    folder: Path, name: str = "adam", delay: int = 2, schedule: Any = (4, 6, 9), **options: Any
) -> Run:
    """Return a run whose periods make windows of one to four steps."""
    return Run(name, schedule, folder, sync_delay=delay, **{"num_steps": 26, **options})


@pytest.mark.parametrize("name", ["adam", "adopt"])
def test_steps_taken_while_the_streams_travel_change_no_bit(name, tmp_path):
    """Each client with a worker of its own, which outlives its messages."""

    class Counting(Quadratic):
        def loss(self, module: torch.nn.Module, m: int, t: int) -> Tensor:
            steps.append(t)
            return super().loss(module, m, t)

    steps: list[int] = []
    options = {"num_clients": 1, "evaluate_clients": True, "eval_every": 4}
    expected = late(tmp_path / "a", name, **options)
    ahead = late(tmp_path / "b", name, problem=Counting(), **options)
    taken = []

    def take_steps(_: Any, reply: Any) -> Any:
        before = len(steps)
        ahead.app.take_steps_ahead()
        taken.append(len(steps) > before)
        return reply

    ahead.grid.meddle = take_steps
    ahead.keep_workers = True
    assert_same(ahead.start(), expected.start())
    assert sum(taken) > len(ahead.watch.records) / 2


PACES = {"client-0": 1.0, "client-1": 1.5, "client-2": 4.0}


@pytest.mark.parametrize(
    ("phase", "paces", "delay"),
    [
        ("starting", PACES, 2),
        ("saving", {}, 2),
        ("uploading", {}, 2),
        ("uploading", PACES, 2),
        ("uploading", {}, 0),
    ],
)
def test_a_client_killed_in_a_window_of_coded_streams_repeats_it_to_the_same_bits(
    phase, paces, delay, tmp_path, monkeypatch
):
    """The server leaves it out, has too few replies, and asks for the window again."""
    unequal = {"min_steps": 0.3, "step_seconds": paces} if paces else {}
    options: dict[str, Any] = {
        "delay": delay,
        "policy": Policy(on_failure="continue", min_clients=3, **unequal),
        "schedule": SyncSchedule(OPTIMIZERS["adam"].periods(3, 4, 6), phases={"exp_avg": 1}),
        "compression": {PARAMS: "int4", "exp_avg": "int8", "exp_avg_sq": "int8"},
        "num_steps": 12,
        "sync_bound": True,
    }
    expected = late(tmp_path / "a", **options).start()
    run = late(tmp_path / "b", **options)
    Faults(run).fail_at(node=2, window=3, phase=phase)
    assert_same(run.start(), expected)
    assert "repeated" in [event.kind for w in run.watch.records for event in w.events]


def test_without_a_delay_no_average_is_kept(tmp_path):
    kept = set()

    def keep(record: WindowRecord) -> None:
        for file in tmp_path.rglob("*.safetensors"):
            with safe_open(file, framework="pt") as tensors:
                kept.update(tensors.keys())

    run = late(tmp_path, delay=0)
    run.watch.after.append(keep)
    run.start()
    assert kept
    assert not [name for name in kept if name.startswith("average.")]


def test_an_evaluation_that_fails_leaves_the_steps_taken_ahead_as_they_were(tmp_path):
    """They are in the module, and an evaluation puts the average there."""
    problem, case = Quadratic(), OPTIMIZERS["adam"]
    module = problem.module()
    worker = Worker(
        module=module,
        optimizer=case.make(module.parameters()),
        loss_at=lambda t: problem.loss(module, 0, t),
        num_examples=1,
    )
    ahead, first = StepsAhead(), FirstSteps(tmp_path, 0, 2)
    ahead.allow(first, worker)
    ahead.take()
    taken = {key: tensor.clone() for key, tensor in worker.take([PARAMS])[PARAMS].items()}

    def evaluate() -> None:
        worker.put({PARAMS: {key: tensor + 1 for key, tensor in taken.items()}})
        raise OSError("no data")

    with pytest.raises(OSError, match="no data"), ahead.kept(worker):
        evaluate()
    assert_same([worker.take([PARAMS])], [{PARAMS: taken}])
    assert ahead.claim(first, worker) is not None


values = st.floats(0, 1e3, width=32, allow_subnormal=False)


@given(st.tuples(values, values, values), st.integers(1, 500), st.floats(0.5, 0.9999))
def test_a_second_moment_stays_at_least_zero(drawn, steps, beta2):
    """Rounding alone could make it negative."""
    sent, average, entered = (torch.tensor([value]) for value in drawn)
    now = sent * beta2**steps + entered
    got = merged(
        Kind.SECOND_MOMENT,
        {"w": now},
        {"w": sent},
        {"w": average},
        decays={"w": beta2},
        steps=steps,
    )
    assert (got["w"] >= 0).all()


def test_buffers_are_replaced_by_their_average():
    now, sent, average = ({"n": torch.tensor([value])} for value in (1.0, 2.0, 3.0))
    assert merged(Kind.BUFFERS, now, sent, average, decays={"n": 0.0}, steps=3)["n"].item() == 3.0


class Own(torch.optim.SGD):
    """An optimizer of somebody's own."""


def test_an_optimizer_of_unknown_decays_is_refused():
    with pytest.raises(ValueError, match="no constant decay factor"):
        state_decays(Own([torch.nn.Parameter(torch.zeros(2))]), ["exp_avg"])


def test_a_delay_with_an_optimizer_of_unknown_decays_is_refused_with_the_setting():
    words = ["optimizer.name=amsgrad", "sync.max_exp_avg_sq=96", "sync_delay=1"]
    with pytest.raises(ConfigError, match=r"sync_delay=1: Adam's max_exp_avg_sq .* sync_delay=0"):
        RunStreams(load("quickstart", words)).check()


@pytest.mark.parametrize(("state_period", "delay"), [(RESET, 1), (3, -1)])
def test_a_delay_that_cannot_be_is_refused(state_period: Period, delay: int):
    schedule = SyncSchedule({PARAMS: 3, "exp_avg": state_period, "exp_avg_sq": state_period})
    with pytest.raises(ValueError, match=f"sync_delay={delay}"):
        DesLoc(schedule, 6, sync_delay=delay)
