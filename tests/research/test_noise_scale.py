"""research/noise_scale.py, where the noise scale is known."""

import math

import torch
from scripts import load_script

script = load_script("noise_scale")

WIDTH, NOISE, BATCH = 20, 0.5, 4


def regression(away: float, batches: int, seed: int) -> torch.Tensor:
    """Gradients of linear regression, x ~ N(0, 1), at a distance ``away`` from the solution."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(batches, BATCH, WIDTH, generator=draw)
    error = NOISE * torch.randn(batches, BATCH, generator=draw)
    weights = torch.zeros(WIDTH)
    weights[0] = away
    return (((x @ weights) - error)[..., None] * x).mean(1)


def known(away: float) -> float:
    """The noise scale in examples: E|g|^2 = (D + 2) |d|^2 + D sigma^2, and G = d."""
    return WIDTH + 1 + WIDTH * NOISE**2 / away**2


def test_it_is_that_of_linear_regression():
    for away in (1.0, 0.2):
        found = [script.noise_scale(regression(away, 200, seed), BATCH) for seed in range(50)]
        trace = sum(each.trace for each in found)
        signal = sum(each.squared_gradient for each in found)
        assert math.isclose(trace / signal, known(away), rel_tol=0.1)
        assert math.isclose(signal / 50, away**2, rel_tol=0.1)


def test_the_interval_holds_the_value_as_often_as_it_says():
    inside = 0
    for seed in range(100):
        found = script.noise_scale(regression(0.5, 64, seed), BATCH)
        inside += found.low <= known(0.5) <= found.high
    assert 88 <= inside <= 99


def test_without_a_gradient_the_upper_end_is_infinite():
    assert script.noise_scale(regression(0.0, 64, seed=3), BATCH).high == math.inf
