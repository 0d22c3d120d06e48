"""Optimizers by their import path: their streams are found, and a memory beyond them is refused."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from configurations import with_values
from own_code import SMALL
from tiny import summary
from torch import nn

from flower_desloc.app.config import Config, ConfigError, load
from flower_desloc.app.engines.in_process import run_in_process
from flower_desloc.app.setup.build import build_optimizer
from flower_desloc.app.setup.param_groups import param_groups
from flower_desloc.app.setup.streams import RunStreams
from flower_desloc.core.outer import OuterOptimizer
from flower_desloc.core.streams import check_optimizer

pytestmark = pytest.mark.usefixtures("in_the_examples")
QHADAM = ["beta1_weight", "beta2_weight", "exp_avg", "exp_avg_sq"]


def an_optimizer(name: str, *overrides: str) -> Config:
    return load("cnn.yaml", [f"optimizer.name={name}", "optimizer.lr=0.003", *overrides])


@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("pytorch_optimizer:Lion", ["exp_avg"]),
        ("pytorch_optimizer:AdEMAMix", ["exp_avg", "exp_avg_sq", "exp_avg_slow"]),
        ("pytorch_optimizer:QHAdam", QHADAM),
        ("torch.optim:Adagrad", ["sum"]),
        ("torch.optim:Muon", ["momentum_buffer"]),  # for matrices only
        ("torch.optim:Adafactor", []),  # others for matrices than for vectors
        ("flower_desloc.optim:ADOPT", ["exp_avg", "exp_avg_sq"]),
        ("flower_desloc.optim:AdamW", ["exp_avg", "exp_avg_sq"]),
        ("flower_desloc.optim:PaperAdam", ["exp_avg", "exp_avg_sq"]),
        ("flower_desloc.optim:SGDM", ["momentum_buffer"]),
    ],
)
def test_streams_of_any_optimizer_are_found_by_name(name, states):
    config = an_optimizer(name)
    config = with_values(config, {"sync": {"params": 2, **dict.fromkeys(states, 4)}})
    RunStreams(config).check()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"exp_avgg": 2}, rf"sync\.exp_avgg: {name} has no stream of that name; .*params"),
        *(({state: None}, rf"sync\.{state} is not stated") for state in states),
    ]
    for wrong, message in refused:
        periods = {"params": 2, **dict.fromkeys(states, 4), **wrong}
        config = with_values(
            config, {"sync": {key: period for key, period in periods.items() if period}}
        )
        with pytest.raises(ConfigError, match=message):
            RunStreams(config).check()


def test_a_shape_s_own_streams_may_be_stated():
    config = an_optimizer("torch.optim:Adafactor")
    config = with_values(
        config, {"sync": dict.fromkeys(("params", "row_var", "col_var", "variance"), 2)}
    )
    RunStreams(config).check()


class Forgetful(torch.optim.SGD):
    """An optimizer that remembers in a list, of which no stream knows."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                seen = self.state[p].setdefault("seen", [])
                seen.append(p.detach().clone())
                p.data.add_(seen[0], alpha=0.01)


class Counting(torch.optim.SGD):
    """Keeps an array, which neither is a tensor nor has a truth."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                count = self.state[p].get("count", np.zeros(2))
                self.state[p]["count"] = count + 1
                p.data.mul_(1 - 0.01 * float(count[0]))


def test_qhadam_by_its_import_path_passes_the_trial_and_trains(tmp_path):
    """In place of an optimizer of the project's own (docs/explanation/beyond.md)."""
    words = [*SMALL, "optimizer.name=pytorch_optimizer:QHAdam", "optimizer.lr=0.003"]
    words += ["optimizer.options={nus: [0.7, 1.0], betas: [0.99, 0.95], eps: 1e-6}", "run.steps=24"]
    words += ["sync.exp_avg=6", *(f"sync.{name}=12" for name in QHADAM if name != "exp_avg")]
    config = load("cnn.yaml", words)
    names = check_optimizer(partial(build_optimizer, config), 3, 2)
    assert sorted(names) == sorted(["params", *QHADAM])
    arguments = {"config": "cnn.yaml", "overrides": " ".join(words), "output-dir": str(tmp_path)}
    run_in_process(arguments, 2)
    loss = summary(tmp_path / "cnn")["evaluation"]["central"]["loss"]
    assert loss["final"] < loss["first"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torch.optim:NAdam", "'mu_product' of NAdam is not zero before the first step"),
        ("torch.optim:LBFGS", "closure"),
        ("pytorch_optimizer:SimplifiedAdEMAMix", "remembers more than its step count"),
        ("pytorch_optimizer:ScheduleFreeAdamW", "begin with the parameters"),
        ("pytorch_optimizer:SOAP", "remembers more than its step count"),
        ("pytorch_optimizer:Prodigy", "begin with the parameters"),
        ("test_own_optimizers:Forgetful", "remembers more than its step count"),
        ("test_own_optimizers:Counting", "remembers more than its step count"),
    ],
)
def test_an_optimizer_whose_memory_would_be_lost_is_refused(name, message):
    with pytest.raises(ConfigError, match=f"optimizer.name={name}: .*{message}"):
        RunStreams(an_optimizer(name)).check()


def test_frozen_parameters_are_given_to_no_optimizer():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    for name in ("adam", "pytorch_optimizer:Lion"):
        config = an_optimizer(name)
        (group,) = build_optimizer(config, param_groups(config, module)).param_groups
        assert [id(p) for p in group["params"]] == [id(p) for p in module[1].parameters()]


def ademamix(params: Any) -> torch.optim.Optimizer:
    return build_optimizer(an_optimizer("pytorch_optimizer:AdEMAMix"), params)


def test_the_servers_optimizer_goes_on_where_it_was():
    """Data parallelism, whose one optimizer counts its steps once for all parameters."""
    grads = [{"x": torch.tensor([1.0, -2.0]) * (t + 1)} for t in range(6)]
    whole, first, then = (OuterOptimizer(ademamix) for _ in range(3))
    for outer in (whole, first):
        outer.begin({"x": torch.ones(2)})
    for step, grad in enumerate(grads):
        expected = whole.step(grad, step)
    for step, grad in enumerate(grads[:3]):
        first.step(grad, step)
    then.begin(first.params)
    then.restore({name: dict(stream) for name, stream in first.state.items()})
    for step, grad in enumerate(grads[3:], start=3):
        got = then.step(grad, step)
    assert torch.equal(got["x"], expected["x"])
