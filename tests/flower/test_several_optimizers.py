"""Several optimizers as one: a stream of some of the parameters is a stream like any other."""

import copy
from typing import Any

import pytest
import torch
from federation import Quadratic, Regression, assert_same
from flower_path import Run
from torch import nn
from torch.optim import SGD, Adam, AdamW

from flower_desloc import NEVER, SGDM, Kind, MultiOptimizer, State, SyncSchedule, kinds_of
from flower_desloc.core.schedule import PARAMS, Period
from flower_desloc.core.states import state_decays
from flower_desloc.core.streams import prime
from flower_desloc.core.traffic import compressed_bytes, stream_bytes

PERIODS: dict[str, Period] = {PARAMS: 2, "momentum_buffer": 3, "exp_avg": 4, "exp_avg_sq": 6}
LOSSY = {PARAMS: "int8", "momentum_buffer": "int4", "exp_avg": "int8", "exp_avg_sq": "int8"}


def test_one_client_equals_the_plain_loop_of_both_optimizers_to_the_bit(tmp_path):
    """As PyTorch's documentation of Muon has it: two optimizers side by side."""
    problem: Any = Regression()
    run = Run("muon", (1,), tmp_path, problem=problem, num_clients=1, num_steps=9)
    module = problem.module()
    named = dict(module.named_parameters())
    hidden = {key: p for key, p in named.items() if p.ndim == 2}
    rest = [p for p in named.values() if p.ndim != 2]
    scale: dict[str, Any] = {"momentum": 0.8, "adjust_lr_fn": "match_rms_adamw"}
    muon = torch.optim.Muon(hidden.values(), lr=0.05, weight_decay=0.1, **scale)
    adamw = AdamW(rest, lr=0.05, betas=(0.9, 0.95), weight_decay=0.1)
    for t in range(9):
        muon.zero_grad()
        adamw.zero_grad()
        problem.loss(module, 0, t).backward()
        muon.step()
        adamw.step()
    [state] = run.start()
    assert_same(state[PARAMS], {key: p.detach() for key, p in named.items()})
    buffers = {key: muon.state[p]["momentum_buffer"] for key, p in hidden.items()}
    assert_same(state["momentum_buffer"], buffers)
    assert state["exp_avg"].keys() == named.keys() - hidden.keys()


@pytest.mark.parametrize("compression", [{}, LOSSY], ids=["exact", "coded"])
def test_the_bytes_are_those_of_the_tensors_that_a_stream_has(compression, tmp_path):
    run = Run("muon", SyncSchedule(PERIODS), tmp_path, num_steps=13, compression=compression)
    params = {key: p.detach() for key, p in Quadratic().module().named_parameters()}
    streams = {PARAMS: params, **run.zeros}
    sizes, compressed = stream_bytes(streams), compressed_bytes(streams, compression, {})
    assert sizes["momentum_buffer"] + sizes["exp_avg"] == sizes[PARAMS]
    run.start()
    times = run.schedule.num_events(13)
    ups = [record.traffic.up for record in run.watch.records]
    sent = {name: sum(up.get(name, 0) for up in ups) for name in streams}
    assert sent == {name: 3 * times[name] * compressed[name] for name in streams}


@pytest.mark.parametrize("delay", [0, 1])
def test_when_another_optimizers_states_are_averaged_makes_no_difference_to_a_parameter(
    delay, tmp_path
):
    """Nor where they never are and a client joins, and have no bound. No loss joins parameters."""

    def ends(**periods: Period) -> list[Any]:
        schedule = SyncSchedule({**PERIODS, **periods})
        options: dict[str, Any] = {"present": lambda m, t: m != 1 or t >= 6, "sync_delay": delay}
        run = Run("muon", schedule, tmp_path / str(periods), sync_bound=True, **options)
        return [
            {n: state[n]["matrix"] for n in (PARAMS, "momentum_buffer")} for state in run.start()
        ]

    assert_same(ends(exp_avg=2, exp_avg_sq=NEVER), ends(exp_avg=2, exp_avg_sq=2))


def some() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 2) * n) for n in (1, 2)]


def test_its_state_dict_and_its_closure_are_those_of_one_optimizer():
    def taken(steps: int, params: list[nn.Parameter], both: MultiOptimizer) -> None:
        def closure() -> float:
            both.zero_grad()
            loss = sum((p - 3).square().sum() for p in params)
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            return loss.item()

        for _ in range(steps):
            assert both.step(closure) >= 0

    def both_of(params: list[nn.Parameter], rate: float) -> MultiOptimizer:
        first, second = params
        return MultiOptimizer([SGD([first], rate, momentum=0.9), Adam([second], rate)])

    params = some()
    both = both_of(params, 0.1)
    taken(3, params, both)
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    restored = both_of(copies, 9.0)
    restored.load_state_dict(copy.deepcopy(both.state_dict()))
    taken(3, params, both)
    taken(3, copies, restored)
    assert_same([p.detach() for p in copies], [p.detach() for p in params])
    assert [group["lr"] for group in restored.parts[1].param_groups] == [0.1]


def test_a_copy_trains_its_own_parameters_to_the_same_bits():
    params = some()
    both = MultiOptimizer([SGDM(params[:1], lr=0.1), Adam(params[1:], 0.1)])

    def step(of: MultiOptimizer) -> list[torch.Tensor]:
        theirs = [p for group in of.param_groups for p in group["params"]]
        for p in theirs:
            p.grad = torch.full_like(p, 0.5)
        of.step()
        return [p.detach().clone() for p in theirs]

    step(both)
    copied = copy.deepcopy(both)
    assert_same(step(copied), step(both))
    assert all(part.state is copied.state for part in copied.parts)


class Square(Adam):
    """An optimizer whose ``momentum_buffer`` is another kind of state than SGDM's."""

    states = (State("momentum_buffer", Kind.SECOND_MOMENT),)


def test_what_cannot_be_one_optimizer_is_refused():
    one, two = some()
    with pytest.raises(ValueError, match="more than one parameter group"):
        MultiOptimizer([SGDM([one]), Adam([one, two])])
    both = MultiOptimizer([SGDM([one]), SGD([two], 0.1, momentum=0.9)])
    with pytest.raises(ValueError, match="before they become one"):
        both.add_param_group({"params": some()})
    prime(both)
    with pytest.raises(ValueError, match=r"^SGD's momentum_buffer has no constant decay"):
        state_decays(both, ["momentum_buffer"])
    with pytest.raises(ValueError, match="'momentum_buffer' is a first moment of one"):
        kinds_of(MultiOptimizer([SGDM([one]), Square([two])]))
