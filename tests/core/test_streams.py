"""Laws of streams: what leaves a module and its optimizer, and what comes back."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from federation import OPTIMIZERS, TiedMLP, assert_same, generator
from torch import nn

from flower_desloc import prime, put, set_step, stream_names, take
from flower_desloc.core.schedule import BUFFERS
from flower_desloc.core.streams import digest, starts_at_zero
from flower_desloc.optim import MultiOptimizer


class Lion(torch.optim.Optimizer):
    """An optimizer of somebody else's: no ``step``, a state with a name of its own."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["trend"] = torch.zeros_like(p)
                p.add_(state["trend"].lerp(p.grad, 0.1).sign(), alpha=-group["lr"])
                state["trend"].lerp_(p.grad, 0.01)


class CountsInPython(Lion):
    """An optimizer whose ``step`` is a number, not a tensor."""

    def step(self, closure=None):
        super().step()
        for state in self.state.values():
            state["step"] = state.get("step", 0) + 1


MOMENTS = ("exp_avg", "exp_avg_sq")
MAKERS = {
    **{name: (case.make, case.oracle.states) for name, case in OPTIMIZERS.items()},
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), ()),
    "sgd_momentum": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        ("momentum_buffer",),
    ),
    "rmsprop": (
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
        ("square_avg", "momentum_buffer", "grad_avg"),
    ),
    "adam_l2": (lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1), MOMENTS),
    "radam": (lambda p: torch.optim.RAdam(p, lr=0.01), MOMENTS),
    "adamax": (lambda p: torch.optim.Adamax(p, lr=0.01), ("exp_avg", "exp_inf")),
    "adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.01), ("sum",)),
    "adadelta": (lambda p: torch.optim.Adadelta(p, lr=0.1), ("square_avg", "acc_delta")),
    "lion": (Lion, ("trend",)),
    "counts_in_python": (CountsInPython, ("trend",)),
    # A step on zero gradients is 0 / 0 when eps is 0, and 0 times that is not 0.
    "adam_without_eps": (lambda p: torch.optim.Adam(p, lr=0.01, eps=0.0), MOMENTS),
    "rmsprop_without_eps": (lambda p: torch.optim.RMSprop(p, lr=0.01, eps=0.0), ("square_avg",)),
}


@pytest.fixture(params=MAKERS)
def maker(request):
    return MAKERS[request.param]


@pytest.fixture
def make(maker):
    return maker[0]


def primed(make, module=None) -> tuple[Any, Any]:
    module = module or TiedMLP()
    optimizer = make(module.parameters())
    prime(optimizer)
    return module, optimizer


def train(module, optimizer, steps) -> tuple[Any, Any]:
    for t in steps:
        optimizer.zero_grad()
        inputs = torch.randn(8, 4, dtype=torch.float64, generator=generator(t))
        (module(inputs) - torch.sin(inputs)).square().mean().backward()
        optimizer.step()
    return module, optimizer


def everything(module, optimizer):
    streams = take(module, optimizer, stream_names(module, optimizer))
    return {name: {key: t.clone() for key, t in s.items()} for name, s in streams.items()}


# ------------------------------------------------------------------------------------------- Prime


def test_however_often_it_is_primed_params_stay_bit_for_bit_and_all_states_are_zero(maker):
    make, states = maker
    module, optimizer = primed(make)
    for _ in range(2):
        assert_same(list(module.parameters()), list(TiedMLP().parameters()))
        assert all(p.grad is None for p in module.parameters())
        assert stream_names(module, optimizer) == ("params", *states)
        for name, stream in take(module, optimizer, states).items():
            assert starts_at_zero(name)
            if not isinstance(optimizer, MultiOptimizer):  # whose states are of some parameters
                assert stream.keys() == dict(module.named_parameters()).keys()
            assert not any(tensor.any() for tensor in stream.values())
        assert all(float(state.get("step", 0)) == 0 for state in optimizer.state.values())
        prime(optimizer)


def test_priming_does_not_change_the_training_that_follows(make):
    module = TiedMLP()
    train(module, make(module.parameters()), range(9))
    other, _ = train(*primed(make), range(9))
    assert_same(list(other.parameters()), list(module.parameters()))


@pytest.mark.parametrize("name", ["adamw", "sgdm", "adopt", "rmsprop"])
def test_states_are_those_of_a_first_step_though_it_is_taken_on_few_elements(name):
    def convolution():
        layer = nn.Conv2d(8, 16, 3, dtype=torch.bfloat16)
        layer.weight.data = layer.weight.data.to(memory_format=torch.channels_last)
        return layer, MAKERS[name][0](layer.parameters())

    (layer, optimizer), (other, stepped) = convolution(), convolution()
    sizes: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: sizes.extend(p.numel() for p in layer.parameters()))
    prime(optimizer)
    assert max(sizes) < layer.weight.numel() == 1152
    for p in other.parameters():
        p.grad = torch.ones_like(p)
    stepped.step()
    for p, q in zip(layer.parameters(), other.parameters(), strict=True):
        mine, theirs = optimizer.state[p], stepped.state[q]
        assert mine.keys() == theirs.keys()
        for key in mine.keys() - {"step"}:
            is_as = [(t.shape, t.dtype, t.stride()) for t in (mine[key], theirs[key])]
            assert is_as[0] == is_as[1]


def test_an_optimizer_with_a_state_of_another_shape_is_primed_on_the_whole():
    layer = nn.Linear(3, 5)
    optimizer = torch.optim.Adafactor(layer.parameters())
    prime(optimizer)
    assert optimizer.state[layer.weight]["row_var"].shape == (5, 1)


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.NAdam,  # its mu_product starts at 1
        torch.optim.Rprop,
        torch.optim.ASGD,
        partial(torch.optim.Adagrad, initial_accumulator_value=0.1),
    ],
)
def test_an_optimizer_whose_states_do_not_start_at_zero_is_refused(make):
    """Zeroing them would train something else, without a word."""
    with pytest.raises(ValueError, match="not zero before the first step"):
        primed(make)


class AveragingSGD(torch.optim.SGD):
    """SGD beside an average of its iterates, as Polyak's; it begins with the parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p].setdefault("average", p.clone())
        loss = super().step(closure)
        for p, state in self.state.items():
            state["average"].lerp_(p, 0.1)
        return loss


class OwnAdam(torch.optim.Adam):
    """Of another package than PyTorch."""


class Norming(torch.optim.SGD):
    """SGD that keeps the norms of its parameters, anew in each step, as LAMB does."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["norm"] = p.detach().norm().expand_as(p).clone()
        return super().step(closure)


class Early(torch.optim.SGD):
    """SGD with a momentum that is there from the start."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["own"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p, state in self.state.items():
            state["own"].mul_(0.9).add_(p.grad)
        return super().step(closure)


def test_an_optimizer_whose_state_begins_with_the_parameters_is_refused():
    with pytest.raises(
        ValueError, match=r"of AveragingSGD is not one .* begin with the parameters"
    ):
        primed(partial(AveragingSGD, lr=0.1))


@pytest.mark.parametrize("make", [Norming, Early])
def test_states_that_zeros_do_not_change_are_accepted(make):
    module, optimizer = primed(make)
    assert not any(t.any() for state in optimizer.state.values() for t in state.values())
    assert all(p.any() for p in module.parameters())


def test_a_decay_that_goes_into_the_moments_is_none_of_these():
    _, optimizer = primed(partial(OwnAdam, weight_decay=0.1))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1]
    assert not any(t.any() for state in optimizer.state.values() for t in state.values())


# ------------------------------------------------------------------------------------ Take and put


def test_a_joiner_with_streams_and_step_continues_exactly_as_the_original(make):
    original = train(*primed(make), range(7))
    joiner = train(*primed(make), range(3))
    put(*joiner, everything(*original))
    set_step(joiner[1], 7)
    train(*original, range(7, 15))
    train(*joiner, range(7, 15))
    assert_same(everything(*joiner), everything(*original))
    # The step count too, which is in no stream; some optimizers count without using it.
    states = [optimizer.state_dict()["state"] for _, optimizer in (joiner, original)]
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_only_the_named_streams_are_written():
    one, other = (train(*primed(MAKERS["adam"][0]), steps) for steps in (range(5), range(9)))
    before, due = everything(*other), ("exp_avg_sq",)
    put(*other, take(*one, due))
    after = everything(*other)
    assert_same(after["exp_avg_sq"], everything(*one)["exp_avg_sq"])
    for name in ("params", "exp_avg"):
        assert_same(after[name], before[name])


def test_put_copies_and_take_does_not():
    one, other = primed(MAKERS["adam"][0]), primed(MAKERS["adam"][0])
    put(*other, take(*one, ["params", "exp_avg"]))
    pointers = [
        t.data_ptr() for o in (one, other) for s in take(*o, MOMENTS).values() for t in s.values()
    ]
    assert len(set(pointers)) == len(pointers)
    taken = take(*one, ["params"])["params"]
    for key, p in one[0].named_parameters():
        assert taken[key].data_ptr() == p.data_ptr()
        assert not taken[key].requires_grad


def test_put_keeps_the_modules_type():
    module, optimizer = primed(MAKERS["adam"][0], nn.Linear(3, 2))
    half = {key: torch.ones_like(p).bfloat16() for key, p in module.named_parameters()}
    put(module, optimizer, {"params": half})
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert all(bool((p == 1).all()) for p in module.parameters())


def test_tied_weights_travel_once_and_stay_tied():
    one, other = train(*primed(MAKERS["adam"][0]), range(3)), primed(MAKERS["adam"][0])
    for stream in everything(*one).values():
        assert stream.keys() == {"a.weight", "a.bias", "b.bias"}
    put(*other, everything(*one))
    module = other[0]
    assert module.b.weight is module.a.weight
    assert_same(module.state_dict(), one[0].state_dict())


class Odd(nn.Module):
    """A scalar, an empty and a frozen parameter."""

    def __init__(self, frozen=True):
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=not frozen)

    def forward(self, inputs):
        return inputs * self.scalar * self.frozen.sum() + self.empty.sum()


def trainable(module):
    return [p for p in module.parameters() if p.requires_grad]


def test_scalars_keep_their_shape(make):
    one, other = Odd(), Odd()
    optimizers = [make(trainable(module)) for module in (one, other)]
    for optimizer in optimizers:
        prime(optimizer)
    train(one, optimizers[0], range(3))
    streams = everything(one, optimizers[0])
    put(other, optimizers[1], streams)
    assert_same(everything(other, optimizers[1]), streams)
    for stream in streams.values():
        shapes = {key: tuple(t.shape) for key, t in stream.items()}
        assert shapes.items() <= {"scalar": (), "empty": (0, 3)}.items()


def all_but_a_weight_in_groups(module):
    return [{"params": [module.b.bias], "lr": 0.5}, {"params": [module.a.bias]}]


@pytest.mark.parametrize(
    ("make_module", "given", "keys"),
    [
        (Odd, trainable, ["scalar", "empty"]),
        (Odd, nn.Module.parameters, ["scalar", "empty"]),  # the frozen one is given all the same
        (TiedMLP, all_but_a_weight_in_groups, ["a.bias", "b.bias"]),
    ],
)
def test_streams_have_the_parameters_that_are_trained_in_the_modules_order(
    make_module, given, keys
):
    module = make_module()
    streams = everything(*primed(lambda _: torch.optim.Adam(given(module)), module))
    assert {name: list(stream) for name, stream in streams.items()} == dict.fromkeys(
        ("params", *MOMENTS), keys
    )


# ------------------------------------------------------------------------------------------ Digest


def test_equal_streams_have_one_digest_whatever_the_order_and_layout():
    stream = everything(*primed(MAKERS["adam"][0], Odd(frozen=False)))["params"]
    twin = {key: stream[key].clone() for key in reversed(stream)}
    assert digest(twin) == digest(stream)
    matrix = torch.arange(6.0).reshape(2, 3)
    assert digest({"a": matrix.T.contiguous()}) == digest({"a": matrix.T})


ONE = {"a": torch.tensor([1.0, 2.0])}


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.tensor([1.0, 3.0])},
        {"b": ONE["a"]},
        {"a": ONE["a"][None]},
        {"a": ONE["a"].double()},
        {"a": ONE["a"].bfloat16()},
        {**ONE, "b": torch.zeros(0)},
        {},
    ],
)
def test_streams_that_differ_in_anything_have_two(other):
    assert digest(other) != digest(ONE)


# ----------------------------------------------------------------------------------------- Buffers


class Normed(nn.Module):
    """BatchNorm's statistics, a cache that is not saved, and an integer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, inputs):
        return self.norm(inputs)


def test_saved_floating_buffers_are_the_last_stream():
    one, other = (primed(MAKERS["adam"][0], Normed()) for _ in range(2))
    train(*one, range(3))
    assert stream_names(*one) == ("params", *MOMENTS, BUFFERS)
    assert everything(*one)[BUFFERS].keys() == {"norm.running_mean", "norm.running_var"}
    put(*other, everything(*one))
    assert_same(everything(*other), everything(*one))
    assert other[0].norm.num_batches_tracked == 0


# ------------------------------------------------------------------------------------------ Errors


def with_tensor(key, *shape):
    return lambda streams: streams["exp_avg"].update({key: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["exp_avg"].pop("a.bias"), "stream 'exp_avg' lacks 'a.bias'"),
        (with_tensor("c.bias", 4), "stream 'exp_avg' has 'c.bias', which the model"),
        (
            with_tensor("b.bias", 5),
            "'b.bias' of stream 'exp_avg' has shape (5,), the model's is (4,)",
        ),
        (with_tensor("b.bias"), "has shape (), the model's is (4,)"),
        (with_tensor("a.weight", 16), "has shape (16,), the model's is (4, 4)"),
        (
            lambda s: s.update(exp_avg_qs={}),
            "Adam has no stream 'exp_avg_qs'; its streams are params, exp_avg, exp_avg_sq",
        ),
        (lambda s: s.update(step={}), "Adam has no stream 'step'"),
    ],
)
def test_a_stream_that_is_not_the_modules_is_refused_and_nothing_is_written(change, message):
    """Not even the streams before it: half a state is worse than none."""
    make, _ = MAKERS["adam"]
    wrong = everything(*train(*primed(make), range(5)))
    change(wrong)
    module, optimizer = train(*primed(make), range(2))
    before = everything(module, optimizer)
    with pytest.raises(ValueError, match=re.escape(message)):
        put(module, optimizer, wrong)
    assert_same(everything(module, optimizer), before)


def test_many_missing_tensors_are_named_in_part():
    module = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(9)))
    optimizer = torch.optim.SGD(module.parameters())
    with pytest.raises(ValueError, match=r"lacks '0.weight', '1.weight', '2.weight' and 6 more$"):
        put(module, optimizer, {"params": {}})


@pytest.mark.parametrize("name", ["params", "buffers"])
def test_a_state_with_the_name_of_another_stream_is_refused(name):
    module, optimizer = primed(torch.optim.Adam, TiedMLP())
    for state in optimizer.state.values():
        state[name] = state.pop("exp_avg")
    with pytest.raises(ValueError, match=f"Adam has a state named '{name}'"):
        take(module, optimizer, ["params"])


def test_before_it_is_primed_an_optimizer_has_params_only_and_asking_does_not_touch_it():
    """Its ``state`` is a defaultdict, and "not yet primed" is "no state at all"."""
    module = TiedMLP()
    optimizer = torch.optim.Adam(module.parameters())
    assert stream_names(module, optimizer) == ("params",)
    take(module, optimizer, ["params"])
    with pytest.raises(ValueError, match=r"Adam has no stream 'exp_avg'; its streams are params$"):
        take(module, optimizer, ["exp_avg"])
    assert not optimizer.state


def test_an_optimizer_of_another_module_is_refused():
    optimizer = torch.optim.Adam(TiedMLP().parameters())
    with pytest.raises(ValueError, match="trains 3 tensors, of which the module owns 0"):
        stream_names(TiedMLP(), optimizer)
