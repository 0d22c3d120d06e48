"""Images from files: Parquet, arrays, folders, and what a site alone has."""

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pytest
import torch
from digits import SMALL, digits, run

from flower_desloc.app.runs.folder import read_lines
from flower_desloc.app.tasks import Site
from flower_desloc.app.tasks.image_classification import ImageClassification, batches
from flower_desloc.app.tasks.image_classification.sources import read
from flower_desloc.app.tasks.source import Source


def picture(shade: int, mode: str = "L", size: tuple[int, int] = (8, 8)) -> PIL.Image.Image:
    return PIL.Image.new("L", size, shade).convert(mode)


def parquet(path: Path, features: dict[str, Any], **columns: list[Any]) -> Path:
    datasets.Dataset.from_dict(columns, datasets.Features(features)).to_parquet(path)
    return path


SPECIES = ["cat", "dog/wolf", "emu"]
"""A label may contain the slash that separates a label from its metric."""


def of_animals(path: Path, labels: list[int]) -> Path:
    """Write images whose shade tells one from the other."""
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=SPECIES)}
    images = [picture(20 * i) for i in range(len(labels))]
    return parquet(path, features, image=images, label=labels)


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    """Parquet files as on the hub: a train and a test part."""
    folder = tmp_path / "animals"
    folder.mkdir()
    of_animals(folder / "train.parquet", [0, 0, 0, 1, 1, 2, 2, 2])
    of_animals(folder / "test.parquet", [2, 1])
    return folder


def on(source: Path, *overrides: str) -> ImageClassification:
    return digits(f"data.source={source}", "data.partition=iid", *SMALL, *overrides)


def test_a_folder_of_parquet_files_has_the_parts_it_says(animals):
    corpus = read(Source(str(animals)))
    assert corpus.names == ("cat", "dog/wolf", "emu")
    assert corpus.train.labels.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert corpus.heldout.labels.tolist() == [2, 1]
    task = on(animals)
    assert [*task.heldout()] == ["dog/wolf", "emu"]
    data = task.client_data(Site(0, 1))
    assert data.description == {"cat": 3, "dog/wolf": 2, "emu": 3}
    batch = data.train_batch(0)
    which = batch.images[:, 0, 0, 0] // 20
    assert batch.labels.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2][i] for i in which.tolist()]


def test_a_run_on_parquet_files_whose_models_buffers_stay_local(
    animals, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    source = [f"data.source={animals}", "data.partition=iid"]
    summary = run(tmp_path, *source, "model.type=resnet", "run.steps=2", clients=2)
    assert "set sync.buffers to average them" in caplog.text
    assert sum(summary["client_data"]["client-0"].values()) == 4
    *_, last = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert {*last["evaluation"]["central"]["parts"]} == {"dog/wolf", "emu"}


@pytest.mark.parametrize(
    ("feature", "channels"),
    [
        (datasets.Array2D((8, 8), "uint8"), 1),
        (datasets.Array3D((3, 8, 8), "uint8"), 3),
        (datasets.Array3D((8, 8, 3), "uint8"), 3),
        (datasets.List(datasets.List(datasets.Value("int64"))), 1),
    ],
)
def test_images_may_be_arrays(tmp_path, feature, channels):
    shape = getattr(feature, "shape", (8, 8))
    arrays = [np.full(shape, 10 * i, np.uint8).tolist() for i in range(8)]
    features = {"pixels": feature, "kind": datasets.Value("string")}
    path = parquet(tmp_path / "arrays.parquet", features, pixels=arrays, kind=["10", "9"] * 4)
    task = on(path, "data.validation_fraction=0.25", "data.batch_size=6")
    batch = task.client_data(Site(0, 1)).train_batch(0)
    config: Any = task.build_model().config
    assert config.id2label == {0: "9", 1: "10"}
    assert batch.images.shape == (6, channels, 8, 8)
    for image, label in zip(batch.images, batch.labels, strict=True):
        assert image.unique().numel() == 1
        assert label == 1 - image[0, 0, 0] // 10 % 2


def test_a_folder_of_image_files_has_a_label_a_subfolder(tmp_path):
    for split, count in (("train", 4), ("test", 2)):
        for shade, name in ((0, "night"), (250, "day")):
            folder = tmp_path / "sky" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                picture(shade, "RGB", (10 + i, 12)).save(folder / f"{i}.png")
    with pytest.raises(ValueError, match=r"data.image_size=null: .* pixels and one of"):
        on(tmp_path / "sky").client_data(Site(0, 1)).train_batch(0)
    batch = on(tmp_path / "sky", "data.image_size=8").client_data(Site(0, 1)).train_batch(0)
    assert read(Source(str(tmp_path / "sky"))).names == ("day", "night")
    assert batch.images.shape[1:] == (3, 8, 8)
    assert torch.equal(batch.images[:, 0, 0, 0] == 0, batch.labels == 1)


HOSPITALS = ["north"] * 12 + ["east"] * 20 + ["10"] * 6 + ["9"] * 6


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    """Images from four hospitals, the number of the image as its shade."""
    features = {
        "image": datasets.Image(),
        "kind": datasets.ClassLabel(names=["well", "ill"]),
        "hospital": datasets.Value("string"),
    }
    images = [picture(i) for i in range(len(HOSPITALS))]
    kinds = [i % 2 for i in range(len(HOSPITALS))]
    path = tmp_path / "all.parquet"
    return parquet(path, features, image=images, kind=kinds, hospital=HOSPITALS)


@pytest.mark.parametrize("several", [1, 2])
def test_a_column_gives_each_of_its_values_a_client_or_several_of_equal_size(hospitals, several):
    words = "data.partition=column:hospital data.validation_fraction=0.25 data.batch_size=64"
    task = digits(f"data.source={hospitals}", *words.split(), *SMALL)
    held = {}
    for client in range(4 * several):
        data = task.client_data(Site(client, 4 * several))
        (heldout,) = data.heldout()
        shades = {*data.train_batch(0).images[:, 0, 0, 0].tolist()}
        assert len(shades) == data.num_examples
        assert not shades & {*heldout.images[:, 0, 0, 0].tolist()}
        of = {HOSPITALS[shade] for shade in shades | {*heldout.images[:, 0, 0, 0].tolist()}}
        assert of == {["9", "10", "east", "north"][client % 4]}
        held[client] = shades
    sizes = [len(shades) * several for shades in held.values()]
    assert sizes[:4] == pytest.approx([4.5, 4.5, 15, 9], abs=1.5)  # what is not held out
    assert len(set().union(*held.values())) == sum(map(len, held.values()))


@pytest.mark.parametrize(
    ("column", "clients", "message"),
    [
        ("hospital", 5, r"has 4 values \(9, 10, east, ...\) for 5 clients; .*num_clients=4 "),
        ("ward", 4, r"data.partition=column:ward: .* it has image, kind, hospital$"),
    ],
)
def test_a_column_that_cannot_be_the_partition_is_refused(hospitals, column, clients, message):
    task = digits(f"data.source={hospitals}", f"data.partition=column:{column}", *SMALL)
    with pytest.raises(ValueError, match=message):
        task.client_data(Site(0, clients))


def test_data_without_columns_have_none_to_be_the_partition():
    with pytest.raises(ValueError, match=r"data.partition=column:writer: .* has no other columns"):
        digits("data.partition=column:writer", *SMALL).client_data(Site(0, 2))


def test_private_images_take_the_labels_and_the_shape_of_the_run(animals, tmp_path):
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["emu", "cat"])}
    images = [picture(60, "RGB") for _ in range(10)]
    path = parquet(tmp_path / "mine.parquet", features, image=images, label=[0, 1] * 5)
    data = on(animals, "data.validation_fraction=0.2").client_data(Site(0, 1, path))
    assert data.description == {"cat": 4, "emu": 4}
    batch = data.train_batch(0)
    assert batch.images.shape[1:] == (1, 8, 8)
    assert {*batch.labels.tolist()} == {0, 2}


def test_an_example_that_cannot_be_decoded_is_the_fault_of_no_other(animals, tmp_path):
    """Else that of one record would be seen in all, and differential privacy bounds one alone."""
    features = {"image": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}}
    features["label"] = datasets.ClassLabel(names=SPECIES)
    stored = [datasets.Image().encode_example(picture(20 * i)) for i in range(8)]
    stored[3]["bytes"] = stored[3]["bytes"][:40]
    stored[5] = datasets.Image().encode_example(picture(100, size=(9, 8)))
    folder = tmp_path / "mine"
    folder.mkdir()
    for part in ("train", "test"):
        parquet(folder / f"{part}.parquet", features, image=stored, label=[0, 1, 2, 0] * 2)
    data = on(animals, "data.image_field=image").client_data(Site(0, 1, folder))
    shades = []
    for number in range(8):
        with suppress(OSError, ValueError):
            shades.append(data.examples([number]).images[0, 0, 0, 0].item())
    assert shades == [0, 20, 40, 80, 120, 140]
    assert data.examples([1, 2, 1]).images[:, 0, 0, 0].tolist() == [20, 40, 20]


def test_an_example_is_decoded_once_and_given_as_a_copy(animals, monkeypatch):
    data = on(animals).client_data(Site(0, 1))
    decoded: list[int] = []
    decode = batches.decode_rows

    def counted(config, part, rows):
        decoded.extend(rows)
        return decode(config, part, rows)

    monkeypatch.setattr(batches, "decode_rows", counted)
    first = data.examples([3])
    once = first.images.clone(), first.labels.clone()
    first.images.add_(1)
    first.labels.add_(1)
    again = data.examples([3])
    assert torch.equal(again.images, once[0])
    assert torch.equal(again.labels, once[1])
    assert len(decoded) == 1
    monkeypatch.setattr(batches, "_KEPT", 2 * again.images.nbytes)
    for number in (4, 5, 5, 4):
        data.examples([number])
    assert len(decoded) == 4  # there is room for two


def test_private_images_that_the_run_cannot_take_are_refused(animals, tmp_path):
    features = {"image": datasets.Image(), "label": datasets.Value("string")}
    path = parquet(tmp_path / "mine.parquet", features, image=[picture(0)] * 10, label=["gnu"] * 10)
    with pytest.raises(ValueError, match=r"data-path=.*label 'gnu' is not among .* cat, dog/wolf"):
        on(animals).client_data(Site(0, 1, path))
    with pytest.raises(ValueError, match=r"data-path=.*nowhere: there is no such file or folder"):
        on(animals).client_data(Site(0, 1, tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["data.image_field=photo"], "data.image_field=photo: .* it has image, fine, coarse"),
        ([], "data.label_field: .* 2 columns that could be it; name one of fine, coarse"),
    ],
)
def test_columns_are_found_or_asked_for(tmp_path, overrides, told):
    kind = datasets.ClassLabel(names=["a", "b"])
    path = parquet(
        tmp_path / "two.parquet",
        {"image": datasets.Image(), "fine": kind, "coarse": kind},
        image=[picture(9)] * 20,
        fine=[0, 1] * 10,
        coarse=[0] * 20,
    )
    config: Any = on(path, "data.label_field=fine").build_model().config
    assert config.num_labels == 2
    with pytest.raises(ValueError, match=told):
        on(path, *overrides).build_model()
