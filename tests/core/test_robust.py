"""Robust averages compared with NumPy and SciPy, their properties, and hostile clients."""

import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation import Quadratic, assert_close, assert_same, draw
from flower_path import Run, oracle
from flwr.app import Message
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy.stats import trim_mean
from scripts import ROOT

from flower_desloc import Mean
from flower_desloc.app.config import ConfigError, load
from flower_desloc.core.averaging import update_lengths
from flower_desloc.core.robust import (
    AVERAGES,
    Gathered,
    NormBound,
    averager,
    coordinate_median,
    trimmed_mean,
)
from flower_desloc.flower.arrays import from_record, to_record
from flower_desloc.flower.failures import FederationError
from flower_desloc.flower.policy import Policy

# Integers, because their sums are exact in any order.
STACKS = arrays.arrays(
    np.float64,
    st.tuples(st.integers(1, 9), st.integers(0, 5), st.integers(1, 3)),
    elements=st.integers(-(2**40), 2**40).map(float),
)


def split(stack: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(row.copy()) for row in stack]


# ------------------------------------------------------------------------- Median and trimmed mean


@given(STACKS)
def test_the_median_is_numpys(stack):
    assert np.array_equal(coordinate_median(split(stack)).numpy(), np.median(stack, axis=0))


@given(STACKS, st.integers(0, 4))
def test_the_trimmed_mean_is_scipys(stack, trim):
    count = len(stack)
    if 2 * trim >= count:
        with pytest.raises(ValueError, match="cannot be cut"):
            trimmed_mean(split(stack), trim)
        return
    share = (trim + 0.5) / count  # SciPy cuts floor(count * share) values
    expected = trim_mean(stack, share, axis=0) if stack.size else np.zeros(stack.shape[1:])
    assert np.array_equal(trimmed_mean(split(stack), trim).numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_type_stays_and_half_precision_is_added_in_fp32(dtype):
    rows = [torch.full((3,), value, dtype=dtype) for value in (60000.0, 60000.0, 60000.0, 1.0)]
    assert trimmed_mean(rows, 1).dtype == dtype
    assert torch.equal(trimmed_mean(rows, 1), rows[0])  # the sum of two overflows fp16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_large_tensors_are_averaged_as_their_pieces_contiguous_or_not(dtype):
    noise = torch.Generator().manual_seed(0)
    rows = [torch.randn(1031, 600, generator=noise).to(dtype) for _ in range(5)]
    rows[3] = rows[3].T.contiguous().T  # the same values, in another order in memory
    pieces = list(zip(*(row.split(400) for row in rows), strict=True))
    assert torch.equal(coordinate_median(rows), torch.cat([*map(coordinate_median, pieces)]))
    trimmed = torch.cat([trimmed_mean(piece, 1) for piece in pieces])
    assert torch.equal(trimmed_mean(rows, 1), trimmed)


# ----------------------------------------------------------------------- As a replacement for Mean


def client(m: int) -> dict[str, dict[str, torch.Tensor]]:
    return {name: draw(m, seed) for seed, name in enumerate(("params", "exp_avg"))}


def test_the_mean_of_what_is_gathered_is_the_mean_bit_for_bit():
    mean, gathered = Mean(client(9)), Gathered(client(9))
    for m in range(5):
        mean.add(client(m), m + 1.0)
        gathered.add(client(m), m + 1.0)
    assert_same([gathered.result()], [mean.result()])
    drifts = gathered.drift(gathered.result())
    for name, drift in mean.drift(mean.result()).items():
        assert asdict(drifts[name]) == pytest.approx(asdict(drift), rel=1e-6)


def test_other_tensors_than_the_first_clients_are_refused():
    gathered = Gathered()
    gathered.add(client(0))
    with pytest.raises(ValueError, match="expected"):
        gathered.add({"params": client(1)["params"]})
    with pytest.raises(ValueError, match="no client"):
        averager("median", {}).result()


# --------------------------------------------------------------------------------- A bound of norms


def judged(
    norms: list[float],
    *,
    bound: float = 2.0,
    before: dict[str, float] | None = None,
    stream: str = "exp_avg",
) -> tuple[list[tuple[int, bool]], int]:
    """Return which replies are accepted, in order, and how many were held at once."""
    last = {"params": {"x": torch.zeros(1)}}
    of = NormBound[Any](bound, lambda reply: update_lengths(reply[1], last, {}), before or {})
    decided: list[tuple[int, str]] = []
    held = 0
    for index, norm in enumerate(norms):
        update = {stream: {"x": torch.tensor([norm])}}
        decided += [(reply[0], why) for reply, why in of.judge((index, update))]
        held = max(held, index + 1 - len(decided))
    decided += [(reply[0], why) for reply, why in of.rest()]
    return [(index, not why) for index, why in decided], held


def accepted(norms: list[float], **options: Any) -> list[bool]:
    decided, _ = judged(norms, **options)
    assert [index for index, _ in decided] == [*range(len(norms))]  # in order, each once
    return [is_in for _, is_in in decided]


@pytest.mark.parametrize("place", range(4))
def test_a_long_update_is_left_out_wherever_it_is_in_the_order(place):
    norms = [1.0, 1.1, 0.9]
    norms.insert(place, 30.0)
    assert accepted(norms) == [index != place for index in range(4)]
    assert accepted(norms, before={"exp_avg": 1.0}) == [index != place for index in range(4)]


def test_at_most_two_replies_are_held_and_none_where_the_last_window_vouches_for_them():
    norms = [1.0, 1.2, 0.9, 1.0, 1.1]
    assert judged(norms) == ([(i, True) for i in range(5)], 2)
    assert judged(norms, before={"exp_avg": 1.0}) == ([(i, True) for i in range(5)], 0)
    # A new scale that all share is no outlier: it is judged by the window itself.
    assert judged(norms, before={"exp_avg": 0.01}) == ([(i, True) for i in range(5)], 2)
    assert judged(norms, before={"params": 1.0}) == ([(i, True) for i in range(5)], 2)


def test_two_clients_are_judged_with_the_window_before():
    assert accepted([1.0, 50.0]) == [True, True]
    assert accepted([1.0, 50.0], before={"exp_avg": 1.0}) == [True, False]
    assert accepted([50.0, 1.0], before={"exp_avg": 1.0}) == [False, True]
    assert accepted([50.0], before={"exp_avg": 1.0}) == [True]


def test_a_median_of_zero_is_no_scale():
    assert accepted([0.0, 0.0, 1.0]) == [True, True, True]


def test_second_moments_are_measured_by_their_root_and_params_from_their_average():
    assert accepted([1.0, 1.0, 3.9], stream="exp_avg_sq") == [True, True, True]
    assert accepted([1.0, 1.0, 4.1], stream="exp_avg_sq") == [True, True, False]
    last = {"params": {"x": torch.full((1,), 100.0)}}
    of = NormBound[Any](2.0, lambda streams: update_lengths(streams, last, {}), {})
    for value in (101.0, 99.0, 103.0):
        decided = of.judge({"params": {"x": torch.tensor([value])}})
    assert [bool(why) for _, why in decided] == [False, False, True]
    assert of.medians() == {"params": 1.0}


# ---------------------------------------------------------------------------------- In a federation


LIAR = 2
"""Multiplies its update of params by -1000."""


def federation(folder: Path, *, malicious: bool = False, **policy: Any) -> Run:
    run = Run(
        "adam",
        (2, 4, 8),
        folder,
        problem=Quadratic(heterogeneous=False),
        num_clients=5,
        num_steps=8,
        policy=Policy(**{"on_failure": "continue", **policy}),
    )
    start = from_record(run.initial)

    def lie(reply: Message) -> None:
        x = from_record(reply.content.array_records["params"])
        told = {key: start[key] - 1000 * (x[key] - start[key]) for key in x}
        reply.content["params"] = to_record(told)

    if malicious:
        run.grid.on_training(lie, node=LIAR + 1)
    return run


def final(folder: Path, **options: Any) -> torch.Tensor:
    run = federation(folder, **options)
    run.start()
    return from_record(run.result.arrays)["matrix"]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    return final(tmp_path_factory.mktemp("honest"))


def test_a_malicious_client_moves_the_mean(honest, tmp_path):
    assert (final(tmp_path, malicious=True, norm_bound=None) - honest).abs().max() > 100


@pytest.mark.parametrize(
    "policy",
    [
        {},
        *(
            # Without the bound, which would leave the client out before any average.
            {"average": name, "min_clients": 3, "norm_bound": None}
            for name in AVERAGES
            if name != "mean"
        ),
        {"norm_bound": 4.0},
        {"norm_bound": 4.0, "average": "median"},
    ],
    ids=str,
)
def test_a_malicious_client_moves_no_robust_average(policy, honest, tmp_path):
    assert (final(tmp_path, malicious=True, **policy) - honest).abs().max() < 0.05


def test_a_client_whose_update_is_too_long_is_left_out_by_name(tmp_path):
    run = federation(tmp_path, malicious=True, norm_bound=4.0)
    states = run.start()
    assert_close(states[:2], oracle(run, present=lambda m, t: m != LIAR)[:2])
    for record in run.watch.records[1:]:
        assert "client-2" not in record.clients
        (event,) = record.events
        assert (event.kind, event.client) == ("outlier", "client-2")
        assert "its update of params has the norm" in event.what
        assert record.left_out == {"client-2": event.what}


def test_an_outlier_stops_the_run_if_the_policy_is_to_stop(tmp_path):
    run = federation(tmp_path, malicious=True, norm_bound=4.0, on_failure="stop")
    with pytest.raises(FederationError, match=r"client-2 is left out .*norm_bound=4"):
        run.start()


# ---------------------------------------------------------------------------------------- Settings


def test_every_average_of_the_policy_is_made_by_its_name():
    assert {field.name: field for field in fields(Policy)}["average"].default == "mean"
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    [row] = [line for line in page.splitlines() if line.startswith("`federation.average` |")]
    for name in AVERAGES:
        assert f"`{name}`" in row
        assert Policy(average=name, min_clients=3).average == name
        made = averager(name, client(9), trim=1)
        for m in range(3):
            made.add(client(m))
        assert made.count == 3
        assert made.drift(made.result()).keys() == client(9).keys()
    with pytest.raises(ValueError, match=re.escape(", ".join(AVERAGES))):
        Policy(average="mode")


@pytest.mark.parametrize(
    ("preset", "settings", "words"),
    [
        ("quickstart", "average=median federation.weighting=examples", "weighting=uniform"),
        ("quickstart", "average=trimmed_mean", "min_clients=1 must be at least 3"),
        (
            "quickstart",
            "average=trimmed_mean federation.trim=2 federation.min_clients=4",
            "least 5",
        ),
        ("quickstart", "average=median federation.min_steps=0.5", r"set federation\.min_steps=1"),
        ("quickstart", "trim=2", r"federation\.average=trimmed_mean"),
        ("fedavg", "average=median", r"federation\.average=median: only strategy=desloc has it"),
    ],
)
def test_an_invalid_guard_is_refused(preset, settings, words):
    with pytest.raises(ConfigError, match=words):
        load(preset, f"federation.{settings}")
