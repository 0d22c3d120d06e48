"""Adam whose second moment is freed of the noise of private gradients."""

from functools import partial

import pytest
import torch
from federation import assert_same, generator

from flower_desloc.optim.adam_bc import AdamBC

SHAPES = [(3, 5), (7,), (0,), ()]
BETAS = 0.9, 0.95


def driven(make, steps=12):
    params = [
        torch.randn(shape, dtype=torch.float64, generator=generator(0, i)).requires_grad_()
        for i, shape in enumerate(SHAPES)
    ]
    optimizer = make(params)
    for t in range(steps):
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, dtype=p.dtype, generator=generator(1, i, t))
        optimizer.step()
    return [p.detach() for p in params]


def test_without_noise_it_is_adam():
    ours = driven(lambda params: AdamBC(params, 0.05, BETAS, 1e-12))
    theirs = driven(lambda params: torch.optim.Adam(params, 0.05, BETAS, 1e-300))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_the_variance_of_the_noise_is_taken_off_the_second_moment():
    """One value with the formula of Tang et al. by hand; a denominator below eps becomes eps."""
    lr, noise_std, eps = 0.1, 0.5, 0.3
    x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = AdamBC([x], lr, BETAS, eps, noise_std=noise_std)
    want = u = v = 0.0
    below = []
    for t, g in enumerate((2.0, -0.1, 0.2, -0.3, 0.1, 0.4, *[0.05] * 40), start=1):
        u, v = 0.9 * u + 0.1 * g, 0.95 * v + 0.05 * g * g
        freed = v / (1 - 0.95**t) - noise_std**2
        below.append(freed < eps**2)
        want -= lr * u / (1 - 0.9**t) / max(freed, eps**2) ** 0.5
        x.grad = torch.tensor([g], dtype=torch.float64)
        optimizer.step()
    assert {False, True} == set(below)
    assert x.item() == pytest.approx(want, rel=1e-12)


def test_its_state_dict_resumes_it():
    def resumed(params):
        first = AdamBC(params, 0.05, BETAS, noise_std=0.2)
        for p in params:
            p.grad = torch.ones_like(p)
        first.step()
        second = AdamBC(params, 1.0)
        second.load_state_dict(first.state_dict())
        return second

    def whole(params):
        optimizer = AdamBC(params, 0.05, BETAS, noise_std=0.2)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        return optimizer

    assert_same(driven(resumed), driven(whole))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, from the compiler
def test_a_compiled_step_is_compiled_once():
    from torch._dynamo.utils import counters

    graphs = []

    def make(params):
        optimizer = AdamBC(params, 0.05, BETAS, noise_std=0.2)
        optimizer.compile(partial(torch.compile, backend="eager"))
        optimizer.register_step_post_hook(
            lambda *_: graphs.append(counters["stats"]["unique_graphs"])
        )
        return optimizer

    compiled = driven(make, steps=4)
    assert graphs[0] == graphs[-1]
    plain = driven(lambda params: AdamBC(params, 0.05, BETAS, noise_std=0.2), steps=4)
    torch.testing.assert_close(compiled, plain, rtol=1e-12, atol=1e-12)


def test_an_eps_of_zero_is_refused():
    with pytest.raises(ValueError, match="eps must be positive"):
        AdamBC([torch.zeros(1, requires_grad=True)], eps=0)
