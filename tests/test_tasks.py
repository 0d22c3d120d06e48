"""Laws of every task: pure functions of the seed, and evaluation that changes nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flower_desloc.config import load
from flower_desloc.tasks import Site, Task, build_task

MODEL = ["model.hidden_size=16", "model.intermediate_size=32", "model.num_hidden_layers=1"]
TEXT = [*MODEL, "data.max_bytes=60000", "data.seq_len=32", "evaluation.sequences=4"]
STREAMED = [*MODEL, "data.streaming=true", "data.max_bytes=0", "data.domains=[reference]"]
TASKS = {
    "text": ("quickstart", TEXT),
    "streamed text": ("quickstart", [*STREAMED, "data.seq_len=15", "evaluation.sequences=4"]),
    "images": ("digits", [*MODEL, "data.partition=iid"]),
    "images, convolutional": (
        "digits",
        [*MODEL, "data.partition=iid", "model.type=resnet", "model.dtype=float64"],
    ),
}
Make = Callable[..., Task]


@pytest.fixture(params=TASKS)
def make(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return what builds a task with further settings."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    preset, small = TASKS[request.param]
    return lambda *more: build_task(load(preset, [*small, *more]))


def tensors(batch: Any) -> list[torch.Tensor]:
    return [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]


def weights(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def test_a_training_batch_is_a_pure_function_of_seed_client_and_step(make):
    def batch(seed: int, client: int, step: int) -> torch.Tensor:
        task = make(f"run.seed={seed}", "data.batch_size=4")
        return tensors(task.client_data(Site(client, 4)).train_batch(step))[0]

    first = batch(0, 1, 5)
    torch.rand(7)
    assert torch.equal(batch(0, 1, 5), first)
    assert len(first) == 4
    for key in ((1, 1, 5), (0, 2, 5), (0, 1, 6)):
        assert not torch.equal(batch(*key), first)


def test_the_held_out_part_of_a_client_is_always_the_same(make):
    data = make().client_data(Site(1, 4))
    for first, second in zip(data.heldout(), data.heldout(), strict=True):
        assert all(map(torch.equal, tensors(first), tensors(second)))


def test_the_weights_are_a_function_of_the_seed_and_leave_the_global_generator_alone(make):
    before = torch.get_rng_state()
    one, same, other = (weights(make(f"run.seed={seed}").build_model()) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluating_changes_nothing_and_totals_add(make):
    task = make()
    model = task.build_model().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batches = [batch for each in task.heldout().values() for batch in each]
    whole = task.evaluate(model, batches)
    parts = [task.evaluate(model, [batch]) for batch in batches]
    assert whole == {key: pytest.approx(sum(part[key] for part in parts)) for key in whole}
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    task.evaluate(model.eval(), batches[:1])
    assert not model.training


def test_the_loss_is_the_metric_of_its_batch_and_falls(make):
    task = make()
    model, data = task.build_model().eval(), task.client_data(Site(0, 1))
    batch = data.train_batch(0)
    loss = task.metrics(task.evaluate(model, [batch]))["loss"]
    assert task.loss(model, batch).item() == pytest.approx(loss, rel=1e-5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    before = task.metrics(task.evaluate(model, data.heldout()))["loss"]
    model.train()
    for step in range(30):
        optimizer.zero_grad()
        task.loss(model, data.train_batch(step)).backward()
        optimizer.step()
    assert task.metrics(task.evaluate(model, data.heldout()))["loss"] < before - 0.2


def test_a_partition_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"partition-id=4: .* below num-partitions=4"):
        Site(4, 4)
