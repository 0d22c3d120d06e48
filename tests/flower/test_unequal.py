"""Sites of unequal speed: fewer local steps for a slow one, and weights by steps."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import assert_same
from flower_path import Run
from flwr.app import Message
from hypothesis import given
from hypothesis import strategies as st

from flower_desloc import Policy
from flower_desloc.app.config import ConfigError, load
from flower_desloc.app.setup.streams import RunStreams
from flower_desloc.core.unequal import fewest, steps_in_time, weight
from flower_desloc.flower.baselines.data_parallel import DataParallel
from flower_desloc.flower.checkpoint import Checkpoint, Checkpoints
from flower_desloc.flower.messages import METRICS
from flower_desloc.flower.replies import shares

HALF = "federation.min_steps=0.5"
PACES = {"client-0": 0.1, "client-1": 0.15, "client-2": 0.4}


def unequal(
    folder: Path,
    name: str = "adam",
    least: float = 0.25,
    schedule: Any = (7, 10, 15),
    num_steps: int = 40,
    **options: Any,
) -> Run:
    """Return a run of three clients whose windows are of one to seven steps."""
    policy = Policy(min_steps=least, **{"step_seconds": PACES, **options.pop("policy", {})})
    return Run(name, schedule, folder, num_steps=num_steps, policy=policy, **options)


def steps_of(run: Run) -> list[list[int]]:
    return [[client.steps for client in w.clients.values()] for w in run.watch.records if w.clients]


def test_sites_of_equal_speed_train_as_in_lock_step(tmp_path):
    """To the bit, weights included."""
    paces = {"step_seconds": dict.fromkeys(PACES, 0.2)}
    got = unequal(tmp_path / "a", "adopt", policy=paces, num_steps=20).start()
    alike = unequal(tmp_path / "b", "adopt", 1.0, policy={"step_seconds": {}}, num_steps=20)
    assert_same(got, alike.start())


def test_a_stated_pace_of_an_unknown_client_is_a_warning(tmp_path, caplog):
    policy = {"step_seconds": {**PACES, "client-99": 0.2}}
    with caplog.at_level(logging.WARNING):
        unequal(tmp_path, policy=policy, num_steps=7).start()
    [said] = [r.getMessage() for r in caplog.records if "step_seconds" in r.getMessage()]
    assert said.startswith("federation.step_seconds names client-99, but no client")


def test_speeds_are_measured_and_kept_in_checkpoints(tmp_path):
    """All take the first window whole; the slow ones then follow what they reported."""
    policy: dict[str, Any] = {"step_seconds": {}}
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
    options: dict[str, Any] = {"schedule": (8,), "policy": policy, "checkpoints": checkpoints}
    run = unequal(tmp_path / "clients", **options)

    def at_their_paces(reply: Message) -> None:
        pace = PACES[f"client-{reply.metadata.src_node_id - 1}"]
        metrics: Any = reply.content[METRICS]
        metrics["seconds"] = pace * metrics["steps"]

    run.grid.on_training(at_their_paces)
    run.start()
    assert steps_of(run) == [[8, 8, 8], *[[8, 5, 2]] * 4]
    assert Checkpoint.read(checkpoints.all()[-1]).paces == pytest.approx(PACES)
    resumed = Checkpoint.read(checkpoints.all()[-2])
    again = unequal(tmp_path / "clients", **options, resume=resumed)
    again.start()
    assert steps_of(again) == [[8, 5, 2]]


@given(
    st.integers(1, 500),
    st.floats(1e-3, 10),
    st.floats(1, 100),
    st.floats(0.01, 1, exclude_max=True),
)
def test_steps_are_bounded_and_those_of_the_fastest_are_all(steps, fastest, times, least):
    taken = steps_in_time(steps, fastest * times, fastest, least)
    assert 1 <= fewest(steps, least) <= taken <= steps
    assert steps_in_time(steps, fastest, fastest, least) == steps
    assert least * steps <= fewest(steps, least) + 1e-6 < least * steps + 1 + 1e-5
    assert taken >= steps_in_time(steps, 2 * fastest * times, fastest, least)


@given(st.integers(1, 100), st.integers(0, 100), st.floats(0, 0.999))
def test_a_weight_is_what_the_workers_own_gradients_make_of_a_moment(taken, more, beta):
    """Of u = (1 - beta) sum beta^i g, the factors of the worker's gradients, against all steps'."""
    of = taken + more
    share = sum((1 - beta) * beta**i for i in range(taken))
    assert weight(beta, taken, of) == pytest.approx(
        share / sum((1 - beta) * beta**i for i in range(of))
    )
    assert weight(1.0, taken, of) == pytest.approx(weight(1 - 1e-9, taken, of), rel=1e-5)
    assert weight(beta, of, of) == 1


@pytest.mark.parametrize(
    "weights", [None, [], [0.5], [0.5, 2.0, 1.0], [0.0, 1.0, 1.0], [math.nan] * 3]
)
def test_a_reply_without_its_weights_is_refused(weights):
    metrics = {} if weights is None else {"weights": weights}
    with pytest.raises(ValueError, match="its weights are"):
        shares(
            metrics, {name: {"w": torch.ones(1)} for name in ("params", "exp_avg", "exp_avg_sq")}
        )


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("quickstart federation.min_steps=0", "federation.min_steps=0.0: must be above 0"),
        ("quickstart federation.min_steps=1.5", "federation.min_steps=1.5: .*at most 1"),
        (
            "quickstart federation.step_seconds.client-1=0.5",
            "federation.step_seconds.*min_steps below 1",
        ),
        (f"quickstart {HALF} federation.step_seconds.client-1=0", "federation.step_seconds"),
        (f"quickstart {HALF} federation.average=median", "median.*min_steps=1"),
        (
            f"quickstart {HALF} optimizer.name=amsgrad sync.max_exp_avg_sq=96",
            r"federation.min_steps=0.5: Adam's max_exp_avg_sq .* federation.min_steps=1",
        ),
        (f"fedavg {HALF}", r"federation\.min_steps=0\.5"),
        (f"ddp {HALF}", r"federation\.min_steps=0\.5"),
    ],
)
def test_what_cannot_be_is_refused_with_the_setting(words, what):
    preset, _, settings = words.partition(" ")
    with pytest.raises(ConfigError, match=what):
        RunStreams(load(preset, settings)).check()


def test_data_parallelism_refuses_unequal_sites():
    outer: Any = None
    with pytest.raises(ValueError, match=r"min_steps=0.5"):
        DataParallel(6, outer, policy=Policy(min_steps=0.5))
