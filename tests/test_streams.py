"""Laws of streams: what leaves a module and its optimizer, and what comes back."""

import pytest
import torch
from federation import OPTIMIZERS, TiedMLP, generator
from torch import nn

from flower_desloc import prime, put, set_step, stream_names, take
from flower_desloc.core.streams import BUFFERS, digest, starts_at_zero


class Lion(torch.optim.Optimizer):
    """An optimizer of somebody else's: no ``step``, a state with a name of its own."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
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

    def step(self):
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
}


@pytest.fixture(params=MAKERS)
def maker(request):
    return MAKERS[request.param]


@pytest.fixture
def make(maker):
    return maker[0]


def primed(make, module=None):
    module = module or TiedMLP()
    optimizer = make(module.parameters())
    prime(optimizer)
    return module, optimizer


def train(module, optimizer, steps):
    for t in steps:
        optimizer.zero_grad()
        inputs = torch.randn(8, 4, dtype=torch.float64, generator=generator(t))
        (module(inputs) - torch.sin(inputs)).square().mean().backward()
        optimizer.step()
    return module, optimizer


def copy_of(streams):
    return {name: {key: t.clone() for key, t in s.items()} for name, s in streams.items()}


def everything(module, optimizer):
    return copy_of(take(module, optimizer, stream_names(module, optimizer)))


def assert_same(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


# ------------------------------------------------------------------------------------------- Prime


def test_priming_leaves_params_bit_for_bit_and_all_states_zero(maker):
    make, states = maker
    module, optimizer = primed(make)
    assert_same(list(module.parameters()), list(TiedMLP().parameters()))
    assert all(p.grad is None for p in module.parameters())
    assert stream_names(module, optimizer) == ("params", *states)
    for name, stream in take(module, optimizer, states).items():
        assert starts_at_zero(name)
        assert stream.keys() == dict(module.named_parameters()).keys()
        assert not any(tensor.any() for tensor in stream.values())
    assert all(float(state.get("step", 0)) == 0 for state in optimizer.state.values())


def test_priming_does_not_change_the_training_that_follows(make):
    module = TiedMLP()
    train(module, make(module.parameters()), range(9))
    other, optimizer = primed(make)
    train(other, optimizer, range(9))
    assert_same(list(other.parameters()), list(module.parameters()))


def test_priming_twice_is_priming_once(make):
    module, optimizer = primed(make)
    before, rates = everything(module, optimizer), [g["lr"] for g in optimizer.param_groups]
    prime(optimizer)
    assert_same(everything(module, optimizer), before)
    assert [g["lr"] for g in optimizer.param_groups] == rates


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.RMSprop], ids=["adam", "rmsprop"])
def test_priming_leaves_params_also_without_a_stability_term(cls):
    """A step on zero gradients is 0 / 0 when eps is 0, and 0 times that is not 0."""
    module, _ = primed(lambda p: cls(p, lr=0.01, eps=0.0))
    assert_same(list(module.parameters()), list(TiedMLP().parameters()))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.Rprop(p),
        lambda p: torch.optim.ASGD(p),
        lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
    ],
    ids=["nadam", "rprop", "asgd", "adagrad"],
)
def test_an_optimizer_whose_states_do_not_start_at_zero_is_refused(make):
    """Zeroing them would train something else, without a word: NAdam's mu_product starts at 1."""
    module = TiedMLP()
    with pytest.raises(ValueError, match="not zero before the first step"):
        prime(make(module.parameters()))


# -------------------------------------------------------------------------------------------- Step


@pytest.mark.parametrize("name", [*OPTIMIZERS, "radam", "counts_in_python"])
def test_the_step_is_that_of_the_federation(name):
    module, optimizer = train(*primed(MAKERS[name][0]), range(3))
    set_step(optimizer, 17)
    train(module, optimizer, [0])
    assert {float(optimizer.state[p]["step"]) for p in module.parameters()} == {18.0}
    assert "step" not in stream_names(module, optimizer)


def test_an_optimizer_that_counts_no_steps_needs_none():
    module, optimizer = primed(Lion)
    set_step(optimizer, 17)
    assert stream_names(module, optimizer) == ("params", "trend")


def test_a_joiner_with_streams_and_step_continues_exactly_as_the_original(make):
    original = train(*primed(make), range(7))
    joiner = primed(make)
    put(*joiner, everything(*original))
    set_step(joiner[1], 7)
    train(*original, range(7, 15))
    train(*joiner, range(7, 15))
    assert_same(everything(*joiner), everything(*original))


# ------------------------------------------------------------------------------------ Take and put


def test_what_is_taken_from_one_and_put_into_another_is_copied_exactly(make):
    one, other = train(*primed(make), range(5)), primed(make)
    put(*other, take(*one, stream_names(*one)))
    assert_same(everything(*other), everything(*one))


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
    half = {
        "params": {
            k: torch.ones_like(p, dtype=torch.bfloat16) for k, p in module.named_parameters()
        }
    }
    put(module, optimizer, half)
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
        assert {key: tuple(t.shape) for key, t in stream.items()} == {"scalar": (), "empty": (0, 3)}


@pytest.mark.parametrize("given", [trainable, nn.Module.parameters], ids=["without", "with"])
def test_a_frozen_parameter_is_in_no_stream(given):
    """Whether the optimizer was given it or not: ``Adam(model.parameters())`` is common."""
    module = Odd()
    optimizer = torch.optim.Adam(given(module))
    prime(optimizer)
    for name, stream in take(module, optimizer, stream_names(module, optimizer)).items():
        assert stream.keys() == {"scalar", "empty"}, name


def test_an_optimizer_of_some_params_has_streams_of_those():
    module = TiedMLP()
    optimizer = torch.optim.Adam([module.a.bias, module.b.bias])
    prime(optimizer)
    for stream in everything(module, optimizer).values():
        assert stream.keys() == {"a.bias", "b.bias"}


def test_groups_make_no_difference_to_streams():
    module = TiedMLP()
    groups = [{"params": [module.b.bias], "lr": 0.5}, {"params": [module.a.bias, module.a.weight]}]
    optimizer = torch.optim.Adam(groups)
    prime(optimizer)
    assert everything(module, optimizer).keys() == {"params", *MOMENTS}
    for stream in everything(module, optimizer).values():
        assert list(stream) == [key for key, _ in module.named_parameters()]


def test_asking_an_optimizer_for_its_streams_does_not_touch_it():
    """Its ``state`` is a defaultdict, and "not yet primed" is "no state at all"."""
    module = TiedMLP()
    optimizer = torch.optim.Adam(module.parameters())
    stream_names(module, optimizer)
    take(module, optimizer, ["params"])
    assert not optimizer.state


# ------------------------------------------------------------------------------------------ Digest


def test_equal_streams_have_one_digest_whatever_the_order_and_layout():
    stream = everything(*primed(MAKERS["adam"][0], Odd(frozen=False)))["params"]
    twin = {key: stream[key].clone() for key in reversed(stream)}
    assert digest(twin) == digest(stream)
    matrix = torch.arange(6.0).reshape(2, 3)
    assert digest({"a": matrix.T.contiguous()}) == digest({"a": matrix.T})


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.tensor([1.0, 3.0])},
        {"b": torch.tensor([1.0, 2.0])},
        {"a": torch.tensor([[1.0, 2.0]])},
        {"a": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {"a": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)},
        {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(0)},
        {},
    ],
)
def test_streams_that_differ_in_anything_have_two(other):
    assert digest(other) != digest({"a": torch.tensor([1.0, 2.0])})


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


def test_a_module_without_buffers_has_no_such_stream():
    assert BUFFERS not in stream_names(*primed(MAKERS["adam"][0]))


# ------------------------------------------------------------------------------------------ Errors


def without(key):
    return lambda streams: streams["exp_avg"].pop(key)


def with_tensor(key, tensor):
    return lambda streams: streams["exp_avg"].update({key: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("a.bias"), "stream 'exp_avg' lacks 'a.bias'"),
        (with_tensor("c.bias", torch.zeros(4)), "stream 'exp_avg' has 'c.bias', which the model"),
        (
            with_tensor("b.bias", torch.zeros(5)),
            r"'b.bias' of stream 'exp_avg' has shape \(5,\), the model's is \(4,\)",
        ),
        (with_tensor("b.bias", torch.zeros(())), r"has shape \(\), the model's is \(4,\)"),
        (with_tensor("a.weight", torch.zeros(16)), r"has shape \(16,\), the model's is \(4, 4\)"),
        (
            lambda streams: streams.update(exp_avg_qs={}),
            "Adam has no stream 'exp_avg_qs'; its streams are params, exp_avg, exp_avg_sq",
        ),
        (lambda streams: streams.update(step={}), "Adam has no stream 'step'"),
    ],
)
def test_a_stream_that_is_not_the_modules_is_refused_and_nothing_is_written(change, message):
    """Not even the streams before it: half a state is worse than none."""
    make, _ = MAKERS["adam"]
    wrong = everything(*train(*primed(make), range(5)))
    change(wrong)
    module, optimizer = train(*primed(make), range(2))
    before = everything(module, optimizer)
    with pytest.raises(ValueError, match=message):
        put(module, optimizer, wrong)
    assert_same(everything(module, optimizer), before)


def test_many_missing_tensors_are_named_in_part():
    module = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(9)))
    optimizer = torch.optim.SGD(module.parameters())
    with pytest.raises(ValueError, match=r"lacks '0.weight', '1.weight', '2.weight' and 6 more$"):
        put(module, optimizer, {"params": {}})


def test_taking_an_unknown_stream_names_the_known_ones():
    module, optimizer = primed(MAKERS["sgdm"][0])
    with pytest.raises(ValueError, match=r"SGDM has no stream 'exp_avg'.* params, momentum_buffer"):
        take(module, optimizer, ["exp_avg"])


def test_before_it_is_primed_an_optimizer_has_params_only():
    module = TiedMLP()
    optimizer = torch.optim.Adam(module.parameters())
    assert stream_names(module, optimizer) == ("params",)
    with pytest.raises(ValueError, match="no stream 'exp_avg'; its streams are params"):
        take(module, optimizer, ["exp_avg"])


def test_an_optimizer_of_another_module_is_refused():
    optimizer = torch.optim.Adam(TiedMLP().parameters())
    with pytest.raises(ValueError, match="trains 3 tensors, of which the module owns 0"):
        stream_names(TiedMLP(), optimizer)
