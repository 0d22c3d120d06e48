"""Models of bfloat16 parameters, all or some: they travel as they are, and means are fp32."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import OPTIMIZERS, Quadratic, Tensors, assert_same
from flower_path import Run
from flwr.serverapp.strategy import FedAvg
from reference import E
from torch import nn

from flower_desloc import (
    Checkpoint,
    Checkpoints,
    Clipping,
    OuterOptimizer,
    Policy,
    SyncSchedule,
    Worker,
    from_record,
    prime,
)
from flower_desloc.core.compression import decode_stream, encode_stream
from flower_desloc.core.kinds import Kind
from flower_desloc.core.schedule import RESET
from flower_desloc.core.streams import digest
from flower_desloc.flower.baselines.flower_strategies import FlowerStrategy
from flower_desloc.flower.observer import WindowRecord

BF16 = torch.bfloat16


class Half(Quadratic):
    """The quadratic with bfloat16 parameters; with ``mixed`` one of them is float32."""

    mixed = False

    def module(self) -> nn.Module:
        module = Tensors().bfloat16()
        if self.mixed:
            module.matrix.data = module.matrix.data.float()
        return module

    def loss(self, module: nn.Module, m: int, t: int) -> torch.Tensor:
        return super().loss(module, m, t).float()


class Mixed(Half):
    mixed = True


MAKERS = {
    "fused": lambda p: torch.optim.Adam(p, lr=0.05, fused=True),
    **{name: case.make for name, case in OPTIMIZERS.items()},
}


@pytest.mark.parametrize("problem", [Half(), Mixed()])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_local_steps_are_those_of_a_plain_loop(problem, make):
    one, two = problem.module(), problem.module()
    ours, its = make(one.parameters()), make(two.parameters())
    prime(ours)
    worker = Worker(
        module=one,
        optimizer=ours,
        loss_at=partial(problem.loss, one, 0),
        num_examples=1,
        clipping=Clipping(norm=0.5),
    )
    for t in range(9):
        worker.steps(t, t + 1)
        its.zero_grad()
        problem.loss(two, 0, t).backward()
        nn.utils.clip_grad_norm_(two.parameters(), 0.5)
        its.step()
    assert_same(one.state_dict(), two.state_dict())


@pytest.mark.parametrize("problem", [Half(), Mixed()])
@pytest.mark.parametrize("name", ["adam", "adopt", "amsgrad"])
def test_an_average_is_the_mean_in_float32_and_returns_in_two_bytes_a_value(
    name, problem, tmp_path
):
    run = Run(name, (6, 6, 6), tmp_path, problem=problem, num_steps=6)
    replies: list[dict[str, dict[str, torch.Tensor]]] = []

    def keep(reply: Any) -> None:
        streams = reply.content.array_records
        copies = {n: {k: t.clone() for k, t in from_record(r).items()} for n, r in streams.items()}
        replies.append(copies)

    run.grid.on_training(keep)
    states = run.start()
    like = dict(problem.module().named_parameters())
    for stream, got in states[0].items():
        wide = [{k: t.float() for k, t in reply[stream].items()} for reply in replies]
        for key, mean in E(wide).items():
            assert got[key].dtype == like[key].dtype
            tolerance = 1e-6 if like[key].dtype == torch.float32 else 2**-8
            torch.testing.assert_close(got[key].float(), mean, rtol=tolerance, atol=1e-30)
    size = sum(p.nbytes for p in like.values())
    assert run.watch.records[1].traffic.up == dict.fromkeys(states[0], 3 * size)


WAYS: dict[str, dict[str, Any]] = {
    "exact": {},
    "lossy": {"compression": {"params": "int8", "exp_avg": "int4", "exp_avg_sq": "int8"}},
    "bf16": {"compression": {"params": "bf16", "exp_avg": "bf16"}},
    "late": {"sync_delay": 1},
    "median": {"policy": Policy(average="median")},
}


@pytest.mark.parametrize("problem", [Half(), Mixed()])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_a_stream_ends_equal_at_all_clients_and_after_a_resume(way, problem, tmp_path):
    """A client is away for a while."""

    def run(folder: Path, **options: Any) -> Run:
        folder.mkdir(exist_ok=True)
        return Run(
            "adam",
            (3, 3, 6),
            folder,
            problem=problem,
            present=lambda m, t: not (m == 1 and 3 <= t < 6),
            **WAYS[way],
            **options,
        )

    whole = run(tmp_path / "whole", checkpoints=Checkpoints(tmp_path / "whole"))
    states = whole.start()
    for state in states[1:]:
        assert_same(state["params"], states[0]["params"])
    cut = tmp_path / "cut"
    first = run(cut, checkpoints=Checkpoints(cut))

    def end(record: WindowRecord) -> None:
        if record.step == 9:
            raise InterruptedError

    first.watch.after.append(end)
    with pytest.raises(InterruptedError):
        first.start()
    last = Checkpoint.read(Checkpoints(cut).all()[-1])
    again = run(cut, checkpoints=Checkpoints(cut), resume=last)
    assert digest(again.final()) == digest(from_record(whole.result.arrays))


def test_a_small_difference_arrives_in_a_lossy_format():
    """One in bfloat16 has 8 bits; a residual in it would lose what the format has lost."""
    reference = {"a": torch.full((256,), 1.0).bfloat16()}
    value = {"a": (1 + torch.linspace(0, 0.5, 256)).bfloat16()}
    sent = encode_stream(Kind.PARAMS, value, "int8", reference=reference)
    like = {"a": value["a"].to("meta")}
    got = decode_stream("params", sent.coded, "int8", like, kind=Kind.PARAMS, reference=reference)
    assert (got["a"].dtype, sent.residual["a"].dtype) == (BF16, torch.float32)
    assert torch.equal(got["a"], sent.received["a"])
    exact = value["a"].float() - 1 - sent.residual["a"]  # what was decoded, without its rounding
    assert torch.equal((1 + exact).bfloat16(), got["a"])


@pytest.mark.parametrize("schedule", [(4, 4, 4), SyncSchedule({"gradients": 1})])
def test_the_server_optimizer_is_of_the_models_type(schedule, tmp_path):
    outer = OuterOptimizer(lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, nesterov=True))
    got = Run("adam", schedule, tmp_path, problem=Half(), outer=outer).final()
    assert {tensor.dtype for tensor in got.values()} == {BF16}


def test_the_strategies_of_flower_refuse_it(tmp_path):
    schedule = SyncSchedule({"params": 4, "exp_avg": RESET, "exp_avg_sq": RESET})
    run = Run("adam", schedule, tmp_path, problem=Half())
    strategy = FlowerStrategy(FedAvg, schedule, 4, evaluate_clients=False)
    with pytest.raises(ValueError, match=r"'matrix' is of type torch.bfloat16.*a model in float32"):
        strategy.start(run.grid, run.initial)
