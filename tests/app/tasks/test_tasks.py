"""Laws of every task: pure functions of the seed, and evaluation that changes nothing."""

import copy
import json
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import pytest
import torch
from datasets import Dataset
from torch import nn

from flower_desloc.app.config import load
from flower_desloc.app.tasks import Site, Task, build_task
from flower_desloc.app.tasks.data_version import data_version

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


# ----------------------------------------------------------------------------- Versions of the data


class Drawn:
    """A client's data without a digest of its own."""

    num_examples = 7

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.description: Mapping[str, int] = {"rows": 7}

    def train_batch(self, step: int) -> Any:
        assert step == 0
        return self.batch

    def heldout(self) -> list[Any]:
        return []


class Pair(NamedTuple):
    x: Any
    y: Any


VALUES: list[Any] = [
    torch.arange(4),
    torch.arange(4.0),
    torch.arange(4.0, dtype=torch.bfloat16).view(2, 2).T,
    torch.tensor(3),
    np.arange(4),
    np.arange(4).reshape(2, 2),
    np.arange(0.0),
    np.array(["a", "b"]),
    np.array(["a", None], dtype=object),
    {"x": torch.zeros(2)},
    {"y": torch.zeros(2)},
    (torch.zeros(2), "a"),
    (torch.zeros(2), "b"),
    Pair(1, 2.0),
    Pair(1, None),
    b"bytes",
    [True],
    object(),  # its content is unknown
]


def test_the_version_of_data_is_that_of_its_first_batch():
    versions = [data_version(Drawn(value)) for value in VALUES]
    assert versions == [data_version(Drawn(copy.deepcopy(value))) for value in VALUES]
    assert len({*versions}) == len(VALUES)
    assert versions[0].startswith("7 examples, digest ")


def test_the_version_of_every_tasks_data_is_the_same_in_a_new_process_and_of_another_client_not(
    make,
):
    def version(client: int) -> str:
        return data_version(make().client_data(Site(client, 4)))

    assert version(1) == version(1)
    assert version(1) != version(2)


DOCUMENTS = [f"{n} " + "many small words " * 20 for n in range(60)]
PIXELS = np.random.default_rng(0).integers(0, 255, (60, 4, 4)).tolist()
LABELS = [n % 3 for n in range(60)]


def text_file(folder: Path, documents: list[str]) -> Path:
    folder.mkdir()
    rows = "\n".join(json.dumps({"text": text}) for text in documents)
    (folder / "a.jsonl").write_text(rows)
    return folder / "a.jsonl"


def image_file(folder: Path, pixels: list[Any], labels: list[int]) -> Path:
    folder.mkdir()
    Dataset.from_dict({"image": pixels, "label": labels}).to_parquet(folder / "a.parquet")
    return folder / "a.parquet"


def image_folder(folder: Path, pixels: list[Any], labels: list[int]) -> Path:
    for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        picture = PIL.Image.fromarray(np.array(image, dtype=np.uint8))
        picture.save(folder / str(label) / f"{number}.bmp")
    return folder


OTHER_PIXELS = [*PIXELS[:-1], [[9] * 4] * 4]
OTHER_LABELS = [*LABELS[:-1], 0]
STORED: dict[str, tuple[Callable[..., Path], tuple[Any, ...], list[tuple[Any, ...]]]] = {
    "text": (
        text_file,
        (DOCUMENTS,),
        [([*DOCUMENTS, "one more"],), ([*DOCUMENTS[:-1], DOCUMENTS[-1].upper()],)],
    ),
    "streamed text": (text_file, (DOCUMENTS,), [([*DOCUMENTS, "one more"],)]),
    "images": (
        image_file,
        (PIXELS, LABELS),
        [(OTHER_PIXELS, LABELS), (PIXELS, OTHER_LABELS), (PIXELS[1:], LABELS[1:])],
    ),
    "images, convolutional": (  # the sizes of files stand for their content
        image_folder,
        (PIXELS, LABELS),
        [(PIXELS, OTHER_LABELS), (PIXELS[1:], LABELS[1:])],
    ),
}


@pytest.mark.parametrize("kind", STORED)
def test_a_copy_of_the_data_has_its_version_and_changed_data_another(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write, content, changes = STORED[kind]
    preset, small = TASKS[kind]
    folders = (tmp_path / str(number) for number in count())

    def versions(*values: Any) -> set[str]:
        path = write(next(folders), *values)
        own = [f"data.source={path}", "data.domains=[]", "data.seq_len=15"]
        task = build_task(load(preset, [*small, *own, "data.partition=iid"]))
        return {data_version(task.client_data(Site(client, 2))) for client in range(2)}

    before = versions(*content)
    assert versions(*content) == before
    for change in changes:
        assert versions(*change) != before
