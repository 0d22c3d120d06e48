"""The gradient noise scale, against the sample covariance of NumPy."""

import numpy as np
import pytest
import torch
from tiny import TINY, summary, train
from torch import nn

from flower_desloc.app.runs.folder import evaluations, read_lines
from flower_desloc.core.noise import noise_scale, noise_totals
from flower_desloc.core.worker import Worker
from flower_desloc.flower.client import evaluated
from flower_desloc.flower.messages import TOTALS


def linear(rows, params):
    """Yield losses whose gradients are the rows."""
    for row in rows:
        at = torch.from_numpy(row).split([p.numel() for p in params])
        yield sum((p * g.view_as(p)).sum() for p, g in zip(params, at, strict=True))


@pytest.mark.parametrize("batches", [2, 3, 7])
def test_the_noise_scale_is_the_sample_variance_over_the_squared_mean(batches):
    rows = np.random.default_rng(0).normal(1.0, 1, (batches, 30))
    params = [nn.Parameter(torch.zeros(shape).double()) for shape in [(4, 5), (10,)]]
    totals = noise_totals(linear(rows, params), params)
    variance = np.trace(np.cov(rows.T))
    squared_mean = (rows.mean(0) ** 2).sum() - variance / batches
    assert noise_scale(totals) == pytest.approx(variance / squared_mean, rel=1e-12)
    assert all(p.grad is None for p in params)


def test_totals_of_clients_add():
    """Together: the mean variance within a client over the mean square of a client's gradient."""
    rng = np.random.default_rng(1)
    params = [nn.Parameter(torch.zeros(30).double())]
    clients = [rng.normal(mean, 1, (4, 30)) for mean in (0.5, 1.0, -2.0)]
    totals = [noise_totals(linear(rows, params), params) for rows in clients]
    added = {name: sum(each[name] for each in totals) for name in totals[0]}
    variances = [np.trace(np.cov(rows.T)) for rows in clients]
    squares = [
        (rows.mean(0) ** 2).sum() - variance / 4
        for rows, variance in zip(clients, variances, strict=True)
    ]
    assert noise_scale(added) == pytest.approx(sum(variances) / sum(squares), rel=1e-12)


def test_no_noise_scale_where_the_gradient_is_not_seen():
    params = [nn.Parameter(torch.zeros(2).double())]
    opposite = np.array([[1.0, 0.0], [-1.0, 0.0]])
    assert noise_scale(noise_totals(linear(opposite, params), params)) is None
    assert noise_scale(noise_totals(linear(opposite[:1], params), params)) is None
    assert noise_scale({}) is None


@pytest.mark.parametrize("loss", [2.0, float("inf")])
def test_an_evaluation_sends_the_noise_of_a_finite_gradient_from_a_step_on(loss):
    module = nn.Linear(1, 1)
    worker = Worker(
        module=module,
        optimizer=torch.optim.SGD(module.parameters()),
        loss_at=lambda step: loss * (step + 1) * module(torch.ones(1)).sum(),
        num_examples=1,
        evaluate=lambda: {"loss": 1.0},
        noise_from=3,
    )
    early = evaluated(worker, 2).metrics
    assert [key for key in early if key.startswith(TOTALS)] == [f"{TOTALS}loss"]
    sent = evaluated(worker, 3).metrics
    totals = {k.removeprefix(TOTALS): v for k, v in sent.items() if k.startswith(TOTALS)}
    # gradients 8 and 10 of two parameters: variance 2 each, squared mean 81 - 1 each
    assert noise_scale(totals) == (pytest.approx(4 / 160) if loss == 2.0 else None)
    assert totals["loss"] == 1.0


def test_a_run_measures_the_noise_in_its_second_half_and_reports_it(tmp_path):
    periods = ("sync.params=2", "sync.exp_avg=2", "sync.exp_avg_sq=2")
    folder = train(tmp_path, *TINY, "run.steps=8", "run.eval_every=2", *periods)
    seen = evaluations(read_lines(folder / "metrics.jsonl"), "federated")
    measured = {step: each["overall"]["noise_scale"] for step, each in seen if step > 4}
    assert [step for step, each in seen if "noise_scale" in each["overall"]] == [6, 8]
    assert summary(folder)["noise_scale"] == pytest.approx(sum(measured.values()) / 2)
