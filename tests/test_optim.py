"""Laws of the local optimizers, against naive float64 formulas and PyTorch's own."""

import pytest
import reference
import torch
from federation import OPTIMIZERS, compiled, generator

from flower_desloc.optim import ADOPT, SGDM, Adam, AdamW, PaperAdam, QHAdam

SHAPES = [(3, 5), (7,), (), (0,), (129,), (1, 1, 2)]
OURS = {
    "adopt": (ADOPT, {"lr": 0.05, "betas": (0.95, 0.99)}),
    "sgdm": (SGDM, {"lr": 0.05, "momentum": 0.8}),
    "paper_adam": (PaperAdam, {"lr": 0.05, "eps": 1e-3}),
    "qhadam": (QHAdam, {"lr": 0.05, "betas": (0.99, 0.99), "mix": 0.7}),
    "slow_adopt": (ADOPT, {"lr": 0.05, "betas": (0.99, 0.99), "mix": 0.7}),
}


@pytest.fixture(params=OURS)
def ours(request):
    cls, settings = OURS[request.param]
    return lambda params, **changed: cls(params, **(settings | changed))


def parameters(dtype=torch.float64):
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator(0, i))
        .to(dtype)
        .requires_grad_()
        for i, shape in enumerate(SHAPES)
    ]


def give_gradients(params, t):
    for i, p in enumerate(params):
        g = torch.randn(p.shape, dtype=torch.float64, generator=generator(1, i, t))
        p.grad = (g * (i + 1)).to(p.dtype)


def drive(params, optimizer, steps):
    for t in steps:
        give_gradients(params, t)
        optimizer.step()
    return params


def naive(optimizer, lr, steps=12):
    """The oracle on the same gradients, one tensor at a time."""
    finals = []
    for i, p in enumerate(parameters()):
        state = (p.detach(), *(torch.zeros_like(p) for _ in optimizer.states))
        for t in range(steps):
            g = (i + 1) * torch.randn(p.shape, dtype=torch.float64, generator=generator(1, i, t))
            state = optimizer.update(t, lr, g, *state)
        finals.append(state)
    return finals


def finals_of(params, optimizer, names):
    return [(p.detach(), *(optimizer.state[p][name] for name in names)) for p in params]


# --------------------------------------------------------------------------------------- Formulas

FORMULAS = {
    "adopt": (OPTIMIZERS["adopt"].make, OPTIMIZERS["adopt"].oracle),
    "adopt_l2": (
        lambda p: ADOPT(p, lr=0.05, weight_decay=0.1),
        reference.adopt(0.9, 0.9999, 1e-6, decay=0.1),
    ),
    "adopt_decoupled": (
        lambda p: ADOPT(p, lr=0.05, weight_decay=0.1, decouple=True),
        reference.adopt(0.9, 0.9999, 1e-6, decay=0.1, decoupled=True),
    ),
    "adopt_unclipped": (
        lambda p: ADOPT(p, lr=0.05, clip_lambda=None),
        reference.adopt(0.9, 0.9999, 1e-6, clip=None),
    ),
    "adopt_clip_of_its_own": (
        lambda p: ADOPT(p, lr=0.05, clip_lambda=lambda step: 0.1 * step),
        reference.adopt(0.9, 0.9999, 1e-6, clip=lambda t: 0.1 * t),
    ),
    "adopt_clamped_denominator": (
        lambda p: ADOPT(p, lr=0.05, eps=2.0, clip_lambda=None),
        reference.adopt(0.9, 0.9999, 2.0, clip=None),
    ),
    "adopt_slow": (
        lambda p: ADOPT(p, lr=0.05, betas=(0.999, 0.99), mix=0.7, weight_decay=0.1),
        reference.adopt(0.999, 0.99, 1e-6, mix=0.7, decay=0.1),
    ),
    "sgdm": (lambda p: SGDM(p, lr=0.05, momentum=0.8), reference.sgdm(0.8)),
    "sgdm_l2": (
        lambda p: SGDM(p, lr=0.05, momentum=0.8, weight_decay=0.1),
        reference.sgdm(0.8, decay=0.1),
    ),
    "sgd": (lambda p: SGDM(p, lr=0.05, momentum=0.0), reference.sgdm(0.0)),
    "paper_adam": (
        lambda p: PaperAdam(p, lr=0.05, eps=1e-3),
        reference.paper_adam(0.9, 0.999, 1e-3),
    ),
    # The oracle's own transcriptions of what is PyTorch's.
    "adam": (lambda p: Adam(p, lr=0.05), reference.adam(0.9, 0.999, 1e-8)),
    "adam_l2": (
        lambda p: Adam(p, lr=0.05, weight_decay=0.1),
        reference.adam(0.9, 0.999, 1e-8, decay=0.1),
    ),
    "adamw": (
        lambda p: AdamW(p, lr=0.05, weight_decay=0.1),
        reference.adam(0.9, 0.999, 1e-8, decay=0.1, decoupled=True),
    ),
    "qhadam": (
        lambda p: QHAdam(p, lr=0.05, betas=(0.99, 0.9), mix=0.7, weight_decay=0.1),
        reference.adam(0.99, 0.9, 1e-8, mix=0.7, decay=0.1),
    ),
    "qhadam_decoupled": (
        lambda p: QHAdam(p, lr=0.05, mix=0.2, weight_decay=0.1, decouple=True),
        reference.adam(0.999, 0.999, 1e-8, mix=0.2, decay=0.1, decoupled=True),
    ),
    "qhadam_mix_1": (lambda p: QHAdam(p, lr=0.05, mix=1.0), reference.adam(0.999, 0.999, 1e-8)),
    "amsgrad": (lambda p: Adam(p, lr=0.05, amsgrad=True), reference.amsgrad(0.9, 0.999, 1e-8)),
}


@pytest.mark.parametrize(("make", "oracle"), FORMULAS.values(), ids=FORMULAS)
def test_an_optimizer_is_its_formula(make, oracle):
    params = parameters()
    optimizer = make(params)
    drive(params, optimizer, range(12))
    got, expected = finals_of(params, optimizer, oracle.states), naive(oracle, 0.05)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OURS)
def test_in_fp32_an_optimizer_is_its_formula_to_fp32(name):
    cls, settings = OURS[name]
    params, exact = parameters(torch.float32), parameters()
    optimizer, theirs = cls(params, **settings), cls(exact, **settings)
    got = finals_of(drive(params, optimizer, range(12)), optimizer, cls.streams)
    expected = finals_of(drive(exact, theirs, range(12)), theirs, cls.streams)
    assert {tensor.dtype for tensors in got for tensor in tensors} == {torch.float32}
    got = [tuple(tensor.double() for tensor in tensors) for tensors in got]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_the_first_step_of_adopt_only_seeds_v_and_leaves_params_bit_for_bit():
    params = parameters()
    before = [p.detach().clone() for p in params]
    optimizer = ADOPT(params, lr=1.0, weight_decay=0.1, decouple=True)
    drive(params, optimizer, [0])
    for p, x in zip(params, before, strict=True):
        assert torch.equal(p, x)
        assert torch.equal(optimizer.state[p]["exp_avg"], torch.zeros_like(x))
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], p.grad.square())
        assert optimizer.state[p]["step"] == 1


def test_adopt_moves_no_coordinate_further_than_its_clip_allows():
    """After one step the clip is 1, so the second step is lr (1 - beta1), however large g."""
    params = parameters()
    before = [p.detach().clone() for p in params]
    optimizer = ADOPT(params, lr=0.1, betas=(0.9, 0.99))
    drive(params, optimizer, [0])
    for p in params:
        p.grad = torch.full_like(p, 1e9)
    optimizer.step()
    for p, x in zip(params, before, strict=True):
        torch.testing.assert_close(p.detach(), x - 0.1 * (1 - 0.9), rtol=1e-12, atol=1e-12)


def test_qhadam_is_that_of_another_library():
    """To single precision: it keeps its bias corrections in that."""
    theirs = pytest.importorskip("pytorch_optimizer").QHAdam
    ours = parameters(), parameters()
    shared = {"lr": 0.05, "betas": (0.995, 0.99), "eps": 1e-8}
    optimizers = (
        QHAdam(ours[0], **shared, mix=0.7),
        theirs(ours[1], **shared, nus=(0.7, 1.0), weight_decay=0.0),
    )
    got, expected = (
        [p.detach() for p in drive(params, optimizer, range(12))]
        for params, optimizer in zip(ours, optimizers, strict=True)
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_with_mix_1_adopt_is_adopt_bit_for_bit_and_with_0_u_is_not_used():
    finals = {}
    for beta1 in (0.9, 0.99):
        for mix in ({}, {"mix": 1.0}, {"mix": 0.0}):
            params = parameters()
            drive(params, ADOPT(params, lr=0.05, betas=(beta1, 0.99), **mix), range(6))
            finals[beta1, mix.get("mix")] = [p.detach() for p in params]
    exact = {"rtol": 0, "atol": 0}
    torch.testing.assert_close(finals[0.9, None], finals[0.9, 1.0], **exact)
    torch.testing.assert_close(finals[0.9, 0.0], finals[0.99, 0.0], **exact)
    assert not torch.equal(finals[0.9, 1.0][0], finals[0.99, 1.0][0])


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
    names = optimizer.streams
    assert restored.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    torch.testing.assert_close(
        finals_of(copies, restored, names), finals_of(params, optimizer, names), rtol=0, atol=0
    )


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
    torch.testing.assert_close(params, twins, rtol=0, atol=0)
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
    torch.testing.assert_close(params, twins, rtol=0, atol=0)


def test_a_parameter_without_a_gradient_is_left_alone_and_counts_its_own_steps(ours):
    params, twins = parameters(), parameters()
    optimizer, twin = ours(params), ours(twins[1:])
    before = params[0].detach().clone()
    for t in range(4):
        give_gradients(params, t)
        params[0].grad = None
        optimizer.step()
        give_gradients(twins, t)
        twin.step()
    assert torch.equal(params[0], before)
    assert params[0] not in optimizer.state
    torch.testing.assert_close(params[1:], twins[1:], rtol=0, atol=0)

    # Its first gradient is its first step, whatever the others' count.
    give_gradients(params, 4)
    optimizer.step()
    alone = parameters()
    first = ours(alone[:1])
    give_gradients(alone, 4)
    first.step()
    torch.testing.assert_close(params[0], alone[0], rtol=0, atol=0)


def test_a_step_leaves_the_gradient_as_it_was(ours):
    params = parameters()
    optimizer = ours(params)
    give_gradients(params, 0)
    before = [p.grad.clone() for p in params]
    optimizer.step()
    torch.testing.assert_close([p.grad for p in params], before, rtol=0, atol=0)


def test_no_gradient_at_all_is_no_step(ours):
    params = parameters()
    optimizer = ours(params)
    optimizer.step()
    torch.testing.assert_close(params, parameters(), rtol=0, atol=0)
    assert not optimizer.state


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


def test_values_that_are_not_finite_stay_where_they_are():
    x, alone = (torch.zeros(2, requires_grad=True) for _ in range(2))
    optimizer, other = ADOPT([x]), ADOPT([alone])
    for t in range(3):
        alone.grad = torch.tensor([1.0, 1.0 + t])
        x.grad = torch.tensor([float("nan") if t == 1 else 1.0, 1.0 + t])
        optimizer.step()
        other.step()
    assert x[0].isnan()
    assert x[1] == alone[1] != 0


def test_steps_do_not_depend_on_the_number_of_threads(ours):
    def after(number):
        torch.set_num_threads(number)
        try:
            sizes = [1 << 19, 70_001, 3]
            params = [torch.ones(n).requires_grad_() for n in sizes]
            return [p.detach() for p in drive(params, ours(params), range(3))]
        finally:
            torch.set_num_threads(1)

    torch.testing.assert_close(after(1), after(3), rtol=0, atol=0)


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
    x.grad = torch.sparse_coo_tensor([[1]], [1.0], (3,), check_invariants=True)
    with pytest.raises(ValueError, match="sparse"):
        ours([x]).step()


REFUSED = [
    *(
        (cls, "lr", {"lr": bad})
        for cls in (ADOPT, SGDM, PaperAdam)
        for bad in (-1e-9, float("nan"))
    ),
    *((ADOPT, "beta1", {"betas": (bad, 0.9)}) for bad in (1.0, -0.1, float("nan"))),
    *((PaperAdam, "beta2", {"betas": (0.9, bad)}) for bad in (1.0, -0.1, float("nan"))),
    *((SGDM, "momentum", {"momentum": bad}) for bad in (1.0, -0.1, float("nan"))),
    (ADOPT, "eps", {"eps": -1e-9}),
    *((PaperAdam, "eps", {"eps": bad}) for bad in (0.0, -1e-9, float("nan"))),
    (ADOPT, "weight_decay", {"weight_decay": -0.1}),
    (SGDM, "weight_decay", {"weight_decay": -0.1}),
]


@pytest.mark.parametrize(("cls", "name", "setting"), REFUSED)
def test_an_invalid_hyperparameter_is_refused_by_name_and_value(cls, name, setting):
    value = next(iter(setting.values()))
    value = value if isinstance(value, float) else next(v for v in value if v != 0.9)
    with pytest.raises(ValueError, match=f"{name} must be .*got {value}"):
        cls(parameters(), **setting)


def test_bounds_that_are_allowed_are_allowed():
    ADOPT(parameters(), lr=0.0, betas=(0.0, 0.0), eps=0.0)
    SGDM(parameters(), lr=0.0, momentum=0.0)
    PaperAdam(parameters(), lr=0.0, betas=(0.0, 0.0))
