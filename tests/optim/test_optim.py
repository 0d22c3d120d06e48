"""Laws of the local optimizers, against naive float64 formulas and PyTorch's own."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import reference
import torch
from federation import OPTIMIZERS, OptimizerCase, assert_same, compiled, generator

from flower_desloc.optim import ADOPT, SGDM, Adam, PaperAdam
from flower_desloc.optim import OPTIMIZERS as DESCRIBED
from flower_desloc.optim._foreach import ForeachOptimizer

SHAPES = [(3, 5), (7,), (), (0,), (129,), (1, 1, 2)]
OURS = {
    name: described
    for name, described in DESCRIBED.items()
    if isinstance(described.make([torch.nn.Parameter(torch.ones(1, 1))]), ForeachOptimizer)
}
"""Of classes of our own."""


def made(name, params, **changed):
    described = OURS[name]
    return described.make(params, **{"lr": 0.05, **described.settings, **changed})


@pytest.fixture(params=OURS)
def ours(request):
    return partial(made, request.param)


def parameters(dtype=torch.float64):
    draws = (
        torch.randn(shape, dtype=torch.float64, generator=generator(0, i))
        for i, shape in enumerate(SHAPES)
    )
    return [x.to(dtype).requires_grad_() for x in draws]


def gradient(i, t, shape):
    return (i + 1) * torch.randn(shape, dtype=torch.float64, generator=generator(1, i, t))


def give_gradients(params, t):
    for i, p in enumerate(params):
        p.grad = gradient(i, t, p.shape).to(p.dtype)


def drive(params, optimizer, steps):
    for t in steps:
        give_gradients(params, t)
        optimizer.step()
    return params


def naive(case, steps=12):
    """The oracle on the same gradients, one tensor at a time."""
    finals = []
    for i, p in enumerate(parameters()):
        states = [name for name in case.oracle.states if case.oracle.has(name, p)]
        state = (p.detach(), *(torch.zeros_like(p) for _ in states))
        for t in range(steps):
            state = case.oracle.update(t, case.lr, gradient(i, t, p.shape), *state)
        finals.append(state)
    return finals


def finals_of(params, optimizer, names):
    states = ((p, optimizer.state[p]) for p in params)
    return [(p.detach(), *(own[name] for name in names if name in own)) for p, own in states]


# --------------------------------------------------------------------------------------- Formulas

DECAY = {"weight_decay": 0.1}
DECOUPLED = DECAY | {"decouple": True}
adopt = partial(reference.adopt, 0.9, 0.9999)
FORMULAS: dict[str, tuple[Any, dict[str, Any], reference.Optimizer]] = {
    "adopt_l2": (ADOPT, DECAY, adopt(1e-6, decay=0.1)),
    "adopt_decoupled": (ADOPT, DECOUPLED, adopt(1e-6, decay=0.1, decoupled=True)),
    "adopt_unclipped": (ADOPT, {"clip_lambda": None}, adopt(1e-6, clip=None)),
    "adopt_own_clip": (
        ADOPT,
        {"clip_lambda": lambda t: t / 10},
        adopt(1e-6, clip=lambda t: t / 10),
    ),
    "adopt_large_eps": (ADOPT, {"eps": 2.0, "clip_lambda": None}, adopt(2.0, clip=None)),
    "sgdm_l2": (SGDM, DECAY | {"momentum": 0.8}, reference.sgdm(0.8, decay=0.1)),
    "sgd": (SGDM, {"momentum": 0.0}, reference.sgdm(0.0)),
    "adam_l2": (Adam, DECAY, reference.adam(0.9, 0.999, 1e-8, decay=0.1)),
}
CASES = OPTIMIZERS | {
    name: OptimizerCase(partial(cls, lr=0.05, **settings), oracle, lr=0.05)
    for name, (cls, settings, oracle) in FORMULAS.items()
}


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, {"rtol": 1e-12, "atol": 1e-12}),
        (torch.float32, {"rtol": 1e-4, "atol": 1e-5}),
    ],
    ids=["fp64", "fp32"],
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_optimizer_is_its_formula_and_leaves_the_gradient_as_it_was(case, dtype, tolerance):
    params = parameters(dtype)
    optimizer = case.make(params)
    drive(params, optimizer, range(12))
    got = finals_of(params, optimizer, case.oracle.states)
    assert {tensor.dtype for tensors in got for tensor in tensors} == {dtype}
    got = [tuple(tensor.double() for tensor in tensors) for tensors in got]
    torch.testing.assert_close(got, naive(case), **tolerance)
    last = [gradient(i, 11, p.shape).to(dtype) for i, p in enumerate(params)]
    assert_same([p.grad for p in params], last)


# ------------------------------------------------------------------------- As PyTorch's optimizers


def test_a_state_dict_from_a_file_without_pickle_continues_bit_for_bit(ours, tmp_path):
    params = parameters()
    optimizer = ours(params)
    drive(params, optimizer, range(5))
    copies = [p.detach().clone().requires_grad_() for p in params]
    restored = ours(copies, lr=123.0)
    torch.save(optimizer.state_dict(), tmp_path / "state")
    restored.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    drive(params, optimizer, range(5, 12))
    drive(copies, restored, range(5, 12))
    assert restored.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    names = [state.name for state in optimizer.states]
    assert_same(finals_of(copies, restored, names), finals_of(params, optimizer, names))


def test_a_closure_is_called_once_with_gradients_on_and_its_loss_returned(ours):
    params, twins = parameters(), parameters()
    optimizer, twin = ours(params), ours(twins)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        give_gradients(params, 0)
        return 3.5

    assert optimizer.step(closure) == 3.5
    assert calls == [True]
    drive(twins, twin, [0])
    assert_same(params, twins)
    assert twin.step() is None


def test_a_group_is_an_optimizer_of_its_own(ours):
    params, twins = parameters(), parameters()
    together = ours([{"params": params[:2], "lr": 0.5}, {"params": params[2:]}])
    apart = [ours(twins[:2], lr=0.5), ours(twins[2:])]
    for t in range(5):
        give_gradients(params, t)
        give_gradients(twins, t)
        together.step()
        for optimizer in apart:
            optimizer.step()
    assert_same(params, twins)


def test_a_parameter_without_a_gradient_is_left_alone_and_counts_its_own_steps(ours):
    params, twins = parameters(), parameters()
    optimizer, twin = ours(params), ours(twins[1:])
    optimizer.step()  # none has one
    assert not optimizer.state
    for t in range(4):
        give_gradients(params, t)
        params[0].grad = None
        optimizer.step()
        give_gradients(twins, t)
        twin.step()
    assert params[0] not in optimizer.state
    assert_same(params, twins)

    # Its first gradient is its first step, whatever the others' count.
    drive(params, optimizer, [4])
    drive(twins, ours(twins[:1]), [4])
    assert_same(params[0], twins[0])


def test_the_memory_layout_of_a_parameter_makes_no_difference(ours):
    finals = []
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(4, 3, 5, 5, generator=generator(0)).to(memory_format=layout)
        optimizer = ours([x.requires_grad_()])
        for t in range(5):
            g = torch.randn(4, 3, 5, 5, generator=generator(1, t))
            x.grad = g.to(memory_format=layout)
            optimizer.step()
        finals.append(x.detach().contiguous())
    torch.testing.assert_close(*finals, rtol=1e-6, atol=1e-6)


def test_a_step_depends_neither_on_the_number_of_threads_nor_on_the_other_tensors(ours):
    def after(threads, make):
        torch.set_num_threads(threads)
        try:
            params = [torch.ones(n).requires_grad_() for n in (1 << 19, 70_001, 3)]
            optimizers = make(params)
            for t in range(3):
                give_gradients(params, t)
                for optimizer in optimizers:
                    optimizer.step()
            return [p.detach() for p in params]
        finally:
            torch.set_num_threads(1)

    assert_same(after(1, lambda ps: [ours(ps)]), after(3, lambda ps: [ours([p]) for p in ps]))


@compiled
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, from the compiler
def test_a_compiled_step_is_the_step_to_rounding_and_compiles_once_for_all_learning_rates(ours):
    from torch._dynamo.utils import counters
    from torch._inductor import config

    params, twins = parameters(torch.float32), parameters(torch.float32)
    optimizer, twin = ours(params), ours(twins)
    optimizer.compile()
    # Precompiled headers take longer than the one kernel they are for, and so do its vectors.
    with config.patch({"cpp_cache_precompile_headers": False, "cpp.simdlen": 1}):
        for t in range(5):
            for one in (optimizer, twin):
                one.param_groups[0]["lr"] = 0.05 / (1 + t)
            drive(params, optimizer, [t])
            drive(twins, twin, [t])
            if t == 1:  # ADOPT's first step is another
                compiled_once = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == compiled_once > 0
    torch.testing.assert_close(params, twins, rtol=1e-4, atol=1e-5)


def test_a_sparse_gradient_is_refused(ours):
    x = torch.zeros(3, requires_grad=True)
    x.grad = torch.tensor([0.0, 1.0, 0.0]).to_sparse()
    with pytest.raises(ValueError, match="sparse"):
        ours([x]).step()


def invalid(key: str, default: Any) -> Iterator[tuple[str, float, Any]]:
    """Yield the name of a number that is invalid, the number, and the setting with it."""
    below_1 = key in ("betas", "momentum")
    for number in (-1e-9, float("nan"), *((1.0,) if below_1 else ())):
        if not isinstance(default, tuple):
            yield key, number, number
            continue
        for i in range(len(default)):
            yield f"beta{i + 1}", number, (*default[:i], number, *default[i + 1 :])


REFUSED = [
    (name, key, *case)
    for name, described in OURS.items()
    for key, default in {"lr": 0.05, **described.settings}.items()
    for case in invalid(key, default)
]


@pytest.mark.parametrize(("name", "key", "what", "number", "value"), REFUSED)
def test_an_invalid_hyperparameter_is_refused_by_name_and_value(name, key, what, number, value):
    with pytest.raises(ValueError, match=f"{what} must be .*got {number}"):
        made(name, parameters(), **{key: value})


def test_the_papers_adam_refuses_an_eps_of_zero():
    with pytest.raises(ValueError, match=r"eps must be positive, got 0.0"):
        PaperAdam(parameters(), eps=0.0)


def test_bounds_that_are_allowed_are_allowed():
    ADOPT(parameters(), lr=0.0, betas=(0.0, 0.0), eps=0.0)
    SGDM(parameters(), lr=0.0, momentum=0.0)
    PaperAdam(parameters(), lr=0.0, betas=(0.0, 0.0))
