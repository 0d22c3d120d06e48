"""The toy problem: its mathematics, the agreement of its two implementations, `desloc toy`."""

import csv
import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from command import accepted, desloc, refused
from hypothesis import given
from hypothesis import strategies as st

from examples.toy import __main__ as command_line
from examples.toy import search
from examples.toy.federation import federate
from examples.toy.problem import (
    BLOCK,
    OPTIMUM,
    SIGMA,
    SPLITS,
    START,
    Noise,
    distance,
    gradient,
    value,
)
from examples.toy.search import SearchGrid
from examples.toy.setting import K_V, K_X, METHODS, ToySetting
from examples.toy.transcription import noise, transcribe

COORDINATE = st.floats(-2, 2)


@given(COORDINATE, COORDINATE)
def test_the_gradient_is_that_of_the_value(x1, x2):
    x = torch.tensor([x1, x2], dtype=torch.float64, requires_grad=True)
    value(*x).backward()
    assert x.grad is not None
    np.testing.assert_allclose(gradient(x1, x2), x.grad, rtol=1e-12, atol=1e-9)


def test_the_optimum_is_where_the_function_and_its_gradient_are_zero():
    assert value(*OPTIMUM) == 0
    assert gradient(*OPTIMUM) == (0, 0)
    assert distance(np.transpose([OPTIMUM, START])).tolist() == [0, 2.2]


def test_noise_is_a_function_of_seed_worker_and_step_alone():
    there_and_back = Noise(3, seeds=range(4))
    forth = [there_and_back.at(step).copy() for step in range(2 * BLOCK + 1)]
    back = [there_and_back.at(step).copy() for step in reversed(range(2 * BLOCK + 1))]
    np.testing.assert_array_equal(forth, back[::-1])
    np.testing.assert_array_equal(Noise(3, seeds=[2]).at(7)[..., 0], forth[7][..., 2])
    assert not np.allclose(Noise(4, seeds=range(4)).at(7), forth[7])
    assert not np.allclose(forth[BLOCK], forth[0])


def test_noise_has_the_papers_standard_deviations():
    workers = [Noise(worker, seeds=[0]) for worker in range(400)]
    draws = np.stack([worker.block(0)[..., 0] for worker in workers])  # (workers, steps, 2, splits)
    iid, niid = np.moveaxis(draws, -1, 0)
    assert iid.std() == pytest.approx(SIGMA, rel=0.01)
    assert abs(iid.mean()) < 0.02
    assert np.corrcoef(iid[..., 0].ravel(), iid[..., 1].ravel())[0, 1] == pytest.approx(0, abs=0.01)
    # sigma^m ~ |N(0, 3)|: its root mean square is 3, its mean 3 sqrt(2 / pi).
    own = niid.std(axis=(1, 2))
    assert np.sqrt((own**2).mean()) == pytest.approx(3, rel=0.1)
    assert own.mean() == pytest.approx(3 * math.sqrt(2 / math.pi), rel=0.1)


def test_the_methods_are_the_papers():
    schedules = {name: [*method.schedule().periods.values()] for name, method in METHODS.items()}
    assert schedules == {
        "desloc": [192, 192, 692],
        "local_adam": [192, 192, 192],
        "favg_keep_opt": [192, "never", "never"],
        "favg_reset_opt": [192, "reset", "reset"],
    }


ADAM = ToySetting(lr=0.02, betas=(0.9, 0.99))


@pytest.mark.parametrize(
    ("setting", "method"),
    [
        (ADAM, "desloc"),
        (ADAM, "favg_reset_opt"),
        (ToySetting("adopt", 0.02, (0.95, 0.99), clip=None), "desloc"),
    ],
    ids=lambda it: it if isinstance(it, str) else it.rule,
)
def test_the_federation_and_the_transcription_agree(setting, method, tmp_path):
    """Past K_v, and past a reset; at a higher rate every rounding grows until runs part."""
    rounds = K_V // K_X + 1
    size: dict[str, Any] = {"num_workers": 2, "num_steps": rounds * K_X, "seeds": [0, 5]}
    through = federate(setting, METHODS[method], **size, state_dir=tmp_path)
    written = transcribe([setting], METHODS[method], noise(2, rounds * K_X, [0, 5])).averages
    assert through.shape == (1 + rounds, 2, len(SPLITS), 2)
    np.testing.assert_allclose(through, written[:, :, 0], rtol=0, atol=1e-7)
    assert np.ptp(through[-1], axis=(1, 2)).min() > 1e-4  # replicas are runs of their own


def test_settings_that_are_transcribed_together_do_not_mix():
    settings = [ToySetting(lr=lr, betas=(b, 0.99), clip=clip) for lr, b, clip in LINE]
    together = transcribe(settings, METHODS["desloc"], noise(2, 400, [0]), every=100)
    for i, setting in enumerate(settings):
        alone = transcribe([setting], METHODS["desloc"], noise(2, 400, [0]), every=100)
        np.testing.assert_array_equal(together.averages[:, :, i], alone.averages[:, :, 0])
        np.testing.assert_array_equal(together.means[:, :, i], alone.means[:, :, 0])
    assert together.means.shape == (5, 2, 3, 2, 1)


LINE = [(0.01, 0.9, 5.0), (0.03, 0.99, None), (0.02, 0.95, 1.0)]


def rows_of(split, ends_by_rate):
    return [
        {"rule": "adam", "clip": 0.0, "beta1": 0.9, "beta2": 0.999, "lr": lr, "split": split}
        | {"method": method, "distance": end, "spread": 0.0}
        for lr, ends in ends_by_rate.items()
        for method, end in zip(METHODS, ends, strict=True)
    ]


def test_a_verdict_counts_the_settings_at_which_desloc_converges():
    iid = rows_of(
        "iid",
        {
            0.1: (0.10, 0.11, 0.20, 0.30),  # as the paper claims
            0.2: (0.10, 0.10, 0.10, math.inf),  # kept states are as good
            0.3: (0.10, 0.15, 0.05, 0.05),  # neither claim holds
            0.4: (0.50, 0.50, 0.90, 0.90),  # not converged
        },
    )
    rows = pd.DataFrame(iid)
    assert search.verdict(rows, "iid") == {
        "converged": 3, "as_local_adam": 2, "kept_farther": 1, "kept_closer": 1,
        "reset_farther": 2, "reset_closer": 1,
    }  # fmt: skip
    assert set(search.verdict(rows, "niid").values()) == {0}
    closest = search.best(rows[:8]).set_index("method")["lr"].to_dict()
    assert closest == dict(zip(METHODS, (0.1, 0.2, 0.2, 0.1), strict=True))
    named = {name: len(some) for name, some in search.groups(rows)}
    assert named == {"all": 16, "adam": 16, "β₁ 0.9": 16} | {
        f"lr {lr}": 4 for lr in (0.1, 0.2, 0.3, 0.4)
    }


def test_all_claims_hold_only_where_they_hold_on_both_splits():
    good, bad = (0.10, 0.11, 0.20, 0.30), (1, 1, 2, 2)
    iid = rows_of("iid", {0.1: good, 0.2: good})
    niid = rows_of("niid", {0.1: good, 0.2: bad})
    found = search.where_all_hold(pd.DataFrame(iid + niid))
    assert found == [ToySetting("adam", 0.1, (0.9, 0.999), None)]
    assert search.where_all_hold(pd.DataFrame(iid)) == []


def test_a_run_that_diverges_ends_infinitely_far_off():
    wild = SearchGrid(
        rules=[("adam", None)], beta1=[0.0], beta2=[0.0], rates=[1e30], workers=2, rounds=2, seeds=1
    )
    (batch,) = wild.batches()
    rows = search.search_part((batch, "desloc", wild))
    assert [row["distance"] for row in rows] == [math.inf, math.inf]


# ------------------------------------------------------------------------------------ desloc toy


def test_desloc_toy_in_miniature(tmp_path):
    small = ("--workers", 2, "--rounds", 1, "--transcribed", 2, "--seeds", 2)
    output = accepted("toy", "--output-dir", tmp_path, "--jobs", 1, *small)
    for figure in ("toy_iid.png", "toy_niid.png"):
        assert (tmp_path / figure).exists()
        assert figure in output
    told = json.loads((tmp_path / "toy.json").read_text())
    assert told["size"] == {"workers": 2, "rounds": 1, "transcribed": 2, "seeds": 2}
    assert [(end["split"], end["method"]) for end in told["ends"]] == [
        (split, method) for split in SPLITS for method in METHODS
    ]
    assert all(0 < end["federated"][0] < 100 for end in told["ends"])


@pytest.mark.soak
def test_desloc_toy_search_in_miniature(tmp_path, monkeypatch):
    small: dict[str, Any] = {"rules": [("adam", 5.0)], "beta1": [0.9, 0.995]}
    small |= {"beta2": [0.999], "rates": [0.1, 0.3]}
    monkeypatch.setattr(
        command_line,
        "SearchGrid",
        lambda workers: SearchGrid(**small, workers=3, rounds=2, seeds=2),
    )
    accepted("toy", "--search", "--output-dir", tmp_path, "--jobs", 1)
    assert (tmp_path / "map.png").exists()
    with (tmp_path / "search.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * len(SPLITS) * len(METHODS)
    assert {float(r["beta1"]) for r in rows} == {0.9, 0.995}
    assert all(float(r["distance"]) > 0 for r in rows)


@pytest.mark.parametrize("wrong", [("--beta1", 1), ("--beta2", 1.5)])
def test_desloc_toy_refuses_betas_of_1_and_more(wrong, tmp_path):
    assert "--beta" in refused("toy", "--output-dir", tmp_path / "toy", *wrong)
    assert not (tmp_path / "toy").exists()


def test_desloc_toy_reports_divergence(tmp_path, capfd):
    small = ("--workers", 2, "--rounds", 1, "--transcribed", 1, "--seeds", 1, "--jobs", 1)
    result = desloc("toy", "--output-dir", tmp_path, "--lr", 1e200, "--clip", 0, *small)
    assert result.exit_code == 1, result.output
    assert "training diverged" in result.output
    assert "--lr" in result.output
    assert "Traceback" not in result.output
    assert "Warning" not in capfd.readouterr().err
