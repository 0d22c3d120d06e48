"""What is compiled in C: PyTorch's operations, to rounding."""

import ctypes
import logging
import math
import os
import signal

import numpy as np
import pytest
import torch
from federation import compiled, generator

from flower_desloc.core.averaging import Mean, distance
from flower_desloc.native import adopt as native
from flower_desloc.native import passes
from flower_desloc.native.compiled import compiled as library
from flower_desloc.optim import ADOPT
from flower_desloc.optim.adopt import adopt_step

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "clip": 1.5}
LARGE = [(2**20 + 5,), (7, 9), (), (0,), (2**18 - 1,), (1,)]
SIZES = [[], [0], [1, 31, 0, 32, 33], [65536, 65537, 1, 200_000]]
SMALL = [(33, 5), (), (0,), (129,)]


@pytest.fixture
def without_a_kept_library():
    library.cache_clear()
    yield
    library.cache_clear()


def tensors(shapes, dtype):
    """Parameters, gradients, and moments as they may be, the second not negative."""

    def draw(i, shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator(7, i)).to(dtype)

    xs, gs, us, vs = ([draw(4 * i + j, s) for i, s in enumerate(shapes)] for j in range(4))
    return xs, gs, us, [v.square() for v in vs]


@compiled
@pytest.mark.parametrize(
    ("dtype", "gap"), [(torch.float32, 2e-6), (torch.float64, 1e-14)], ids=["fp32", "fp64"]
)
@pytest.mark.parametrize("clip", [1.5, None])
def test_one_pass_is_pytorchs_operations_to_rounding(dtype, gap, clip):
    ours, theirs = tensors(SMALL, dtype), tensors(SMALL, dtype)
    settings = SETTINGS | {"clip": clip}
    for _ in range(5):
        assert native.adopt_step(*ours, **settings, decay=0.999)
        torch._foreach_mul_(theirs[0], 0.999)
        adopt_step(*theirs, **settings)
    torch.testing.assert_close(ours, theirs, rtol=gap, atol=gap)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bits_do_not_depend_on_the_number_of_threads(dtype):
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            ours = tensors(LARGE, dtype)
            assert native.adopt_step(*ours, **SETTINGS)
        finally:
            torch.set_num_threads(1)
        results.append(ours)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


@compiled
def test_it_has_the_threads_of_a_pytorch_that_has_threads():
    pointer = ctypes.c_void_p.in_dll(library("a pass over a stream", passes._SOURCE), "parallel")
    assert bool(pointer.value) == torch.backends.openmp.is_available()


@compiled
def test_the_child_of_a_fork_does_not_wait_for_threads_it_does_not_have(two_threads):
    tensors = [torch.randn(200_000, generator=generator(1))]
    before = passes.squared_norms(tensors, None)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(passes.squared_norms(tensors, None) != before)
    assert os.waitpid(child, 0)[1] == 0


@compiled
def test_what_is_not_finite_goes_where_pytorchs_operations_put_it():
    """A run that diverges must be seen to."""
    worst = [float("nan"), float("inf"), -float("inf"), 0.0, 1.0]
    ours, theirs = (
        [[torch.tensor([a, b]) for a in worst for b in worst] for _ in range(4)] for _ in range(2)
    )
    for family in (*ours[2:], *theirs[2:]):
        family.reverse()
    assert native.adopt_step(*ours, **SETTINGS)
    adopt_step(*theirs, **SETTINGS)
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize(
    "change",
    [lambda t: t.to(torch.bfloat16), lambda t: t.to("meta"), lambda t: t.T],
    ids=["bf16", "meta", "transposed"],
)
@pytest.mark.parametrize("which", range(4))
def test_what_it_cannot_take_it_leaves_alone(change, which):
    ours, before = (
        tensors([(3, 5), (4, 6)], torch.float32),
        tensors([(3, 5), (4, 6)], torch.float32),
    )
    ours[which][1] = before[which][1] = change(ours[which][1])
    assert not native.adopt_step(*ours, **SETTINGS)
    if change(torch.empty(1, 1)).device.type != "meta":
        torch.testing.assert_close(ours, before, rtol=0, atol=0)


def test_a_convolution_with_channels_last_takes_the_same_steps():
    """Its tensors are not contiguous as the step in C has them, and PyTorch's operations serve."""
    finals = []
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(4, 3, 5, 5, generator=generator(0)).to(memory_format=layout)
        optimizer = ADOPT([x.requires_grad_()], lr=0.01)
        for t in range(5):
            g = torch.randn(4, 3, 5, 5, generator=generator(1, t))
            x.grad = g.to(memory_format=layout)
            optimizer.step()
        finals.append(x.detach().contiguous())
    torch.testing.assert_close(*finals, rtol=1e-6, atol=1e-6)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@compiled
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-40, 1e38])
def test_a_fold_moves_as_numpy_moves_and_its_squares_are_those_of_double(sizes, scale, two_threads):
    before, *sides = (
        [scale * torch.rand(n, generator=generator(3, i, n)).sub(0.5) for n in sizes]
        for i in range(4)
    )
    shares = [1 / 3, 0.9, 1e-3]
    expected, totals = [x.numpy().copy() for x in before], []
    for side, share in zip(sides, shares, strict=True):
        steps = [x.numpy() - mean for x, mean in zip(side, expected, strict=True)]
        expected = [m + np.float32(share) * d for m, d in zip(expected, steps, strict=True)]
        totals.append(sum(float((d.astype(np.float64) ** 2).sum()) for d in steps))
    everything = [x for side in sides for x in side if len(x)]
    into = [x.clone() for x in before]
    (low, high), squares = passes.fold(into, sides, shares, begun=True)
    for mean, wanted in zip(into, expected, strict=True):
        assert mean.numpy().tobytes() == wanted.tobytes()
    assert squares == pytest.approx(totals, rel=1e-14)
    assert low == min((float(x.min()) for x in everything), default=math.inf)
    assert high == max((float(x.max()) for x in everything), default=-math.inf)
    anew = [torch.full_like(x, math.nan) for x in before]
    ends, (zero, *again) = passes.fold(anew, [before, *sides], [1.0, *shares], begun=False)
    assert zero == 0.0
    assert again == squares
    assert all(map(torch.equal, anew, into))
    if everything:
        assert ends == (
            min(low, *(float(x.min()) for x in before if len(x))),
            max(high, *(float(x.max()) for x in before if len(x))),
        )
    zeros = [torch.zeros(n) for n in sizes]
    norm, way = passes.squared_norms(sides[0], before)
    assert [way] == passes.fold(before, [sides[0]], [0.5], begun=True)[1]
    assert passes.squared_norms(sides[0], zeros) == (norm, norm)
    assert passes.squared_norms(sides[0], None) == (norm, 0.0)


@compiled
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("begun", [False, True])
def test_a_fold_notices_what_is_not_finite_wherever_it_is(odd, which, begun, two_threads):
    for place in (0, 65535, 65536, 70_000, 99_999):
        sides = [[torch.randn(100_000, generator=generator(6, i))] for i in range(3)]
        sides[which][0][place] = odd
        into = [torch.zeros(100_000)]
        (low, high), _ = passes.fold(into, sides, [1.0, 0.5, 0.1], begun=begun)
        assert math.isnan(low)
        assert math.isnan(high)


@compiled
@pytest.mark.parametrize("size", [1, 31, 32, 33, 65536, 65537, 200_000])
@pytest.mark.parametrize("odd", [None, math.nan, math.inf, -math.inf])
def test_the_ends_of_values_are_numpys_and_one_that_is_not_finite_is_noticed_anywhere(
    size, odd, two_threads
):
    values = torch.randn(size, generator=generator(5, size))
    places = [None] if odd is None else {0, size // 2, size - 1}
    for place in places:
        x = values.clone()
        if place is not None:
            x[place] = odd
        [first, (low, high)] = passes.ends([torch.tensor([-0.5, 2.0]), x])
        assert first == (-0.5, 2.0)
        if odd is None:
            assert (low, high) == (float(x.numpy().min()), float(x.numpy().max()))
        else:
            assert math.isnan(low)
            assert math.isnan(high)


@compiled
def test_a_pass_returns_the_same_bits_whatever_the_number_of_threads(two_threads):
    xs = [torch.randn(n, generator=generator(7, n)) for n in (300_000, 7, 100_000)]
    found = []
    for number in (1, 2, 5):
        torch.set_num_threads(number)
        means = [x.flip(0) for x in xs]
        into = [mean.clone() for mean in means]
        ends, squares = passes.fold(into, [xs, means, xs], [0.3, 0.7, 0.1], begun=True)
        norms = passes.squared_norms(into, xs)
        found.append((ends, *squares, *norms, *(x.numpy().tobytes() for x in into)))
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    "other",
    [torch.ones(3, 5, dtype=torch.float64), torch.ones(5, 3).T, torch.ones(3, 6), torch.ones(3)],
    ids=["fp64", "transposed", "larger", "smaller"],
)
def test_a_mean_that_it_cannot_take_it_leaves_alone(other):
    means = [torch.zeros(3, 5), torch.zeros(3, 5)]
    others = [torch.ones(3, 5), other]
    assert passes.fold(means, [others], [0.5], begun=True) is None
    assert passes.fold(means, [means, others], [1.0, 0.5], begun=False) is None
    assert passes.squared_norms(means, others) is None
    assert not any(mean.any() for mean in means)


def test_without_a_compiler_the_mean_is_pytorchs(without_a_kept_library, monkeypatch, caplog):
    clients = [{"params": {"w": torch.randn(5000, generator=generator(9, i))}} for i in range(4)]
    found = []
    for compiler in ("", "/nowhere/cc"):
        monkeypatch.setenv("CC", compiler)
        library.cache_clear()
        mean = Mean()
        for client in clients:
            mean.add(client)
        drift = mean.drift(mean.result())["params"]
        apart = distance(clients[0]["params"], clients[1]["params"])
        found.append([mean.result()["params"]["w"], *vars(drift).values(), apart])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)
    [line] = [r.message for r in caplog.records if "/nowhere/cc" in r.message]
    assert line.startswith("a pass over a stream runs as PyTorch's operations")


@pytest.mark.parametrize(
    ("compiler", "said"),
    [("/nowhere/cc", "No such file"), ("false", "'false'")],
    ids=["there is none", "it fails"],
)
def test_without_a_compiler_the_step_is_pytorchs_and_one_line_says_so(
    compiler, said, without_a_kept_library, monkeypatch, caplog
):
    monkeypatch.setenv("CC", compiler)
    params = [torch.ones(5, requires_grad=True), torch.ones(3, requires_grad=True)]
    optimizer = ADOPT(params, lr=0.5, betas=(0.9, 0.99))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            for p in params:
                p.grad = torch.full_like(p, 2.0)
            optimizer.step()
    # The first step seeds; then n is 1, and u 0.1 and 0.19.
    torch.testing.assert_close(params[0].detach(), torch.full((5,), 1 - 0.5 * (0.1 + 0.19)))
    [line] = caplog.records
    assert "several times slower" in line.message
    assert said in line.message
    assert "\n" not in line.message
