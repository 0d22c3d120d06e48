"""An app of one's own starts from ``ArrayRecord(model.state_dict())``, as with Flower's strategies.

What the clients train is taken, the rest is said; what does not fit is refused before training.
"""

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from flower_path import Watch
from flwr.app import ArrayRecord, ConfigRecord, Message
from torch import nn
from torch.optim import SGD, Adam, SparseAdam

from flower_desloc import (
    Checkpoint,
    Checkpoints,
    DataParallel,
    DesLoc,
    InProcessGrid,
    OuterOptimizer,
    SyncSchedule,
    Worker,
    client_app,
    from_record,
    to_record,
)
from flower_desloc.core.streams import trained_by
from flower_desloc.flower.failures import FederationError
from flower_desloc.flower.messages import CLIENT_INFO

Build = Callable[[], nn.Module]
MOMENTS = {"exp_avg": 6, "exp_avg_sq": 6}


class Net(nn.Module):
    """BatchNorm, a tied weight, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.frozen = nn.BatchNorm1d(4, momentum=0.2), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.frozen.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.two(self.norm(self.one(self.frozen(inputs))))


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4))


def compiled(build: Build) -> Build:
    """The model as ``torch.compile`` renames its tensors; the eager backend needs no compiler."""
    compiler: Any = torch.compile  # it says that it returns a function
    return lambda: compiler(build(), backend="eager")


def grid(build: Build, make: Any = None, *, num_clients: int = 2, **changed: Any) -> InProcessGrid:
    def worker(settings: Any, context: Any) -> Worker:
        module, m = build(), int(context.node_config["partition-id"])

        def loss_at(step: int) -> torch.Tensor:
            draw = torch.Generator().manual_seed(100 * m + step)
            return (module(torch.randn(8, 4, generator=draw)) - m).square().mean()

        optimizer = make(module) if make else Adam(module.parameters(), lr=0.05)
        whole: dict[str, Any] = {"loss_at": loss_at, "num_examples": 8} | changed
        return Worker(module=module, optimizer=optimizer, **whole)

    nodes = [{"partition-id": m, "num-partitions": num_clients} for m in range(num_clients)]
    return InProcessGrid(client_app(worker), nodes)


def schedule(**periods: Any) -> SyncSchedule:
    return SyncSchedule({"params": 3, **MOMENTS, **periods})


def final(
    build: Build, initial: ArrayRecord, periods: Mapping[str, Any], **options: Any
) -> dict[str, torch.Tensor]:
    result = DesLoc(schedule(**periods), 9, **options).start(grid(build), initial)
    return {key: tensor.clone() for key, tensor in from_record(result.arrays).items()}


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DESLOC_STATE_DIR", str(tmp_path / "state"))


def test_a_whole_state_dict_starts_the_same_run_as_what_is_trained(caplog):
    model = Net()
    trained = {k: p for k, p in model.named_parameters() if p.requires_grad}
    statistics = {k: b for k, b in model.named_buffers() if b.is_floating_point()}
    expected = final(Net, to_record(trained), {"buffers": 3}, templates={"buffers": statistics})
    caplog.clear()
    with caplog.at_level(logging.INFO, "flwr"):
        got = final(Net, ArrayRecord(model.state_dict()), {"buffers": 3})
    assert got.keys() == expected.keys() == {*trained, *statistics}
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    (line,) = [text for text in caplog.messages if "strict=False" in text]
    left = "'frozen.bias', 'frozen.weight', 'norm.num_batches_tracked' and 1 more"
    assert f"starts without {left} of the initial arrays" in line  # the tied name is the fourth
    assert Net().load_state_dict(got, strict=False).unexpected_keys == []


def test_the_same_arrays_resume_it(tmp_path):
    folder, initial = tmp_path / "run", ArrayRecord(Net().state_dict())
    folder.mkdir()
    expected = final(Net, initial, {"buffers": 3}, checkpoints=Checkpoints(folder))
    after_6 = next(path for path in Checkpoints(folder).all() if Checkpoint.read(path).step == 6)
    resume = Checkpoint.read(after_6)
    got = final(Net, initial, {"buffers": 3}, checkpoints=Checkpoints(folder), resume=resume)
    assert Checkpoints(folder).all() == [after_6, *Checkpoints(folder).all()[-1:]]
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    other = {k: v for k, v in Net().state_dict().items() if k != "norm.weight"}
    before = Checkpoints(folder).all()
    with pytest.raises(ValueError, match=r"'norm.weight', which the model does not have"):
        final(Net, to_record(other), {"buffers": 3}, checkpoints=Checkpoints(folder), resume=resume)
    assert Checkpoints(folder).all() == before  # nothing was deleted


def data_parallel(initial: ArrayRecord) -> None:
    outer = OuterOptimizer(lambda params: SGD(params, lr=0.1))
    DataParallel(3, outer).start(grid(Net), initial)


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (
            lambda: final(Net, ArrayRecord(Net().state_dict()), {}),
            "has buffers ('norm.running_mean', 'norm.running_var', such as BatchNorm's statistics)"
            ", and the schedule states no period for them; average them as often as params, "
            'SyncSchedule({..., "buffers": 3})',
        ),
        (
            lambda: data_parallel(ArrayRecord(Net().state_dict())),
            "BatchNorm's statistics), which are not sent with gradients",
        ),
        (
            lambda: final(Net, to_record(dict(Net().named_parameters())), {"buffers": 3}),
            "the initial arrays lack 'norm.running_mean', 'norm.running_var' of the clients' "
            "buffers; start with to_record(model.state_dict())",
        ),
        (
            lambda: final(plain, ArrayRecord({"0.weight": plain().state_dict()["0.weight"]}), {}),
            "the initial arrays lack '0.bias', '2.bias', '2.weight' of the clients' params",
        ),
        (
            lambda: final(plain, ArrayRecord(Net().state_dict()), {}),
            "and 8 more, which the clients' model does not have",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused_with_the_line_to_write(start, said, monkeypatch):
    monkeypatch.setattr(Worker, "steps", None)  # before any step
    with pytest.raises(ValueError, match=re.escape(said)):
        start()


def test_a_model_has_the_same_names_compiled_or_not():
    expected = final(plain, ArrayRecord(plain().state_dict()), {})
    for clients in (plain, compiled(plain)):
        server = compiled(plain)()
        got = final(clients, ArrayRecord(server.state_dict()), {})
        server.load_state_dict(got)  # an app gets the names that it gave
        assert {
            key.removeprefix("_orig_mod."): t for key, t in got.items()
        }.keys() == expected.keys()
        torch.testing.assert_close([*got.values()], [*expected.values()], rtol=0, atol=0)
    assert final(compiled(plain), ArrayRecord(plain().state_dict()), {}).keys() == expected.keys()


def test_what_the_optimizer_does_not_hold_is_said_and_stays(caplog):
    watch = Watch()
    strategy = DesLoc(schedule(), 6)
    clients = grid(plain, lambda module: Adam(module[2].parameters(), lr=0.05))
    result = strategy.start(clients, ArrayRecord(plain().state_dict()), observer=watch)
    assert from_record(result.arrays).keys() == {"2.weight", "2.bias"}
    (line,) = [text for text in caplog.messages if "does not hold" in text]
    assert "'0.bias', '0.weight', which require a gradient" in line


def test_one_client_with_other_names_does_not_decide():
    clients = grid(plain, num_clients=3)
    app, changed = clients.client_app, list[Message]()

    def meddling(message: Message, context: Any) -> Message:
        reply = app(message, context)
        if CLIENT_INFO in reply.content and context.node_config["partition-id"] == 0:
            cast(ConfigRecord, reply.content[CLIENT_INFO])["trained"] = ["mine"]
            changed.append(reply)
        return reply

    clients.client_app = meddling
    DesLoc(schedule(), 3).start(clients, ArrayRecord(plain().state_dict()))
    assert changed


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs * self.phase).abs()


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(3, 4, sparse=True), nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("build", "make", "said"),
    [
        (Complex, None, r"parameter 'phase' is of type torch.complex64.*view_as_real"),
        (sparse, None, r"parameter '0.weight' has sparse gradients.*leave sparse=True out"),
        (
            sparse,
            lambda module: SparseAdam(module[0].parameters()),
            r"parameter '0.weight' has sparse gradients.*Adam in place of SparseAdam",
        ),
    ],
)
def test_parameters_that_cannot_be_trained_are_refused_by_name_before_training(build, make, said):
    with pytest.raises(FederationError, match=said):
        DesLoc(schedule(), 3).start(grid(build, make, loss_at=None), ArrayRecord())


def test_an_optimizer_without_dense_steps_is_refused():
    from flower_desloc import prime

    with pytest.raises(ValueError, match="SparseAdam takes no step on gradients of zeros"):
        prime(SparseAdam(plain().parameters()))


def test_a_frozen_parameter_may_be_complex_and_a_frozen_table_sparse():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.head = nn.Embedding(3, 4, sparse=True), nn.Linear(4, 4)
            self.table.requires_grad_(False)
            self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64), requires_grad=False)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.head((inputs * self.phase).abs())

    result = DesLoc(schedule(), 3).start(grid(Mixed), ArrayRecord(Mixed().state_dict()))
    assert from_record(result.arrays).keys() == {"head.weight", "head.bias"}
    assert len(trained_by(Adam(Mixed().parameters()))) == 2
