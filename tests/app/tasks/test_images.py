"""Image classification: partitions, batches, models, metrics, whole runs and image files."""

import json
import logging
import re
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import datasets
import numpy as np
import PIL.Image
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score, log_loss
from transformers import AutoModelForImageClassification
from typer.testing import CliRunner

from flower_desloc.app.cli import app
from flower_desloc.app.config import load
from flower_desloc.app.runs.figures.partition import unlikeness
from flower_desloc.app.runs.folder import read_lines
from flower_desloc.app.runs.summary import fairness
from flower_desloc.app.tasks import Site, build_task, partition
from flower_desloc.app.tasks.image_classification import ImageClassification
from flower_desloc.app.tasks.image_classification.batches import (
    ImageBatch,
    client_rows,
    heldout_batches,
    shuffled_batch,
)
from flower_desloc.app.tasks.image_classification.sources import read
from flower_desloc.app.tasks.partition import ClientRows, PartitionRule, partition_rows
from flower_desloc.app.tasks.source import Source

DIGITS = Source("builtin", validation_fraction=0.2)
RULES = ("iid", "dirichlet", "pathological", "quantity")
LEARNS = ["model.hidden_size=64", "model.intermediate_size=128", "optimizer.lr=0.005"]
PATHOLOGICAL = "data.partition=pathological"
SMALL = ["model.hidden_size=16", "model.intermediate_size=32", "model.num_hidden_layers=1"]


def digits(*overrides: str) -> ImageClassification:
    task = build_task(load("digits", list(overrides)))
    assert isinstance(task, ImageClassification)
    return task


def rule(name: str, *, alpha: float = 0.5, seed: int = 0, classes: int = 2) -> PartitionRule:
    return PartitionRule(name, alpha, seed, classes)


def counts(name: str, num_clients: int, **how: Any) -> np.ndarray:
    """Return the number of training images of each label for every client."""
    numbers = read(DIGITS).train.labels
    dealt = client_rows(DIGITS, rule(name, **how), num_clients)
    return np.array([np.bincount(numbers[share.train], minlength=10) for share in dealt])


# --------------------------------------------------------------------------------------- partitions


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("num_clients", [1, 37, 400])
def test_every_training_image_goes_to_one_client_that_is_tested_on_its_labels(name, num_clients):
    corpus = read(DIGITS)
    dealt = client_rows(DIGITS, rule(name, classes=10 if num_clients == 1 else 2), num_clients)
    rows = [row for share in dealt for row in share.train]
    assert sorted(rows) == list(range(len(corpus.train)))
    for share in dealt:
        assert share.train
        assert share.heldout  # with 400 clients, lent to most of them
        assert {*corpus.heldout.labels[share.heldout]} <= {*corpus.train.labels[share.train]}


@pytest.mark.parametrize("name", RULES)
def test_the_held_out_images_are_dealt_in_the_proportions_of_the_training_images(name):
    corpus = read(DIGITS)
    dealt = client_rows(DIGITS, rule(name, alpha=5), 10)
    heldout = [row for share in dealt for row in share.heldout]
    assert sorted(heldout) == list(range(len(corpus.heldout)))
    for share in dealt:
        trained = np.bincount(corpus.train.labels[share.train], minlength=10)
        kept = np.bincount(corpus.heldout.labels[share.heldout], minlength=10)
        assert np.all(np.abs(kept - trained / 4) <= 1.5)  # a fifth is held out


def test_iid_shares_are_of_one_size_and_alike():
    sizes = counts("iid", 10).sum(axis=1)
    assert sizes.max() - sizes.min() <= 1
    assert unlikeness_of(counts("iid", 10)) < 0.15


def test_a_large_alpha_is_iid_and_a_small_one_is_not():
    at = {alpha: unlikeness_of(counts("dirichlet", 10, alpha=alpha)) for alpha in (0.05, 0.5, 1000)}
    assert at[1000] < 0.05 < 0.3 < at[0.5] < 0.6 < at[0.05]
    assert (counts("dirichlet", 10, alpha=0.05) == 0).mean() > 0.5


@pytest.mark.parametrize("classes", [1, 2, 5, 10])
def test_a_pathological_client_holds_so_many_labels(classes):
    assert {*(counts("pathological", 20, classes=classes) > 0).sum(axis=1)} == {classes}


def test_quantity_makes_sizes_unlike_and_leaves_mixtures_alike():
    even, uneven = (counts("quantity", 10, alpha=alpha) for alpha in (1000, 0.3))
    assert even.sum(axis=1).std() < 0.1 * even.sum(axis=1).mean() < 30 < uneven.sum(axis=1).std()
    large = uneven[uneven.sum(axis=1) > 100]
    assert unlikeness_of(large) < 0.2


@pytest.mark.parametrize("name", RULES)
def test_the_seed_decides_who_gets_which_image(name):
    def rows(seed: int) -> list[ClientRows]:
        client_rows.cache_clear()
        return client_rows(DIGITS, rule(name, seed=seed), 12)

    assert rows(3) == rows(3) != rows(4)


def test_a_process_computes_a_partition_once_for_all_its_clients(monkeypatch):
    made = Mock(side_effect=partition._partitioner)
    monkeypatch.setattr(partition, "_partitioner", made)
    labels = [n % 3 for n in range(90)]
    for turn in range(30):
        clients = partition_rows(labels, rule("dirichlet"), 30)
        clients[0].append(turn)  # which the next caller must not see
    assert made.call_count == 1
    again = [row for rows in partition_rows(labels, rule("dirichlet"), 30) for row in rows]
    assert sorted(again) == list(range(90))
    partition_rows([*labels[:-1], 0], rule("dirichlet"), 30)
    partition_rows(labels, rule("dirichlet", seed=1), 30)
    partition_rows(labels, rule("dirichlet"), 29)
    assert made.call_count == 4


def test_a_partition_of_text_alone_is_refused_for_labels():
    with pytest.raises(ValueError, match=r"data\.partition=by_domain: is for the task causal_lm"):
        partition_rows([0, 1], rule("by_domain"), 2)


def unlikeness_of(sizes: np.ndarray) -> float:
    return unlikeness(
        {
            str(i): {str(k): size for k, size in enumerate(row)}
            for i, row in enumerate(sizes.tolist())
        }
    )


def test_unlikeness_is_the_share_of_data_to_be_exchanged():
    assert unlikeness({"a": {"x": 3, "y": 1}, "b": {"x": 6, "y": 2}}) == 0
    assert unlikeness({"a": {"x": 4}, "b": {"y": 4}}) == 0.5
    # a: 3/4 x compared with 1/2 overall; b: 1/4 x
    assert unlikeness({"a": {"x": 3, "y": 1}, "b": {"x": 1, "y": 3}}) == 0.25


IMPOSSIBLE = [
    ("digits simulation.num_clients=4000", "only 1438 images .* 4000 clients; use fewer clients"),
    (f"digits {PATHOLOGICAL} data.classes_per_client=11", "classes_per_client=11"),
    (
        f"digits {PATHOLOGICAL} simulation.num_clients=3",
        "data.classes_per_client=2: .* no client holds some labels",
    ),
    (
        f"digits {PATHOLOGICAL} simulation.num_clients=1000",
        "data.classes_per_client=2: .* need more examples",
    ),
    ("digits data.partition=by_domain", "data.partition=by_domain: .* task=image_classification"),
    (f"quickstart {PATHOLOGICAL}", "data.partition=pathological: .* task=causal_lm"),
    ("digits data.source=empty", "data.source=.*empty: neither"),
    ("digits --plot nowhere/partition.png", "--plot nowhere/partition.png"),
]


@pytest.mark.parametrize(("words", "told"), IMPOSSIBLE)
def test_a_partition_that_cannot_be_is_one_line_that_names_the_setting(
    words, told, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(app, ["partition", *words.split()])
    assert done.exit_code == 2, done.output
    assert done.stderr.count("\n") == 1
    assert re.search(told, done.stderr)


def test_desloc_partition_shows_and_draws_what_a_run_would_deal(tmp_path):
    path = tmp_path / "partition.png"
    words = ["partition", "digits", "simulation.num_clients=23", "--plot", str(path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    held = digits("simulation.num_clients=23").client_data(Site(1, 23)).description
    (row,) = (text for text in done.output.splitlines() if text.startswith("client-1 "))
    assert row.split()[1:3] == [str(sum(held.values())), str(len(held))]
    assert "and 3 more" in done.output
    assert path.is_file()


# ------------------------------------------------------------------------------------------ batches


def numbered(count: int) -> ImageBatch:
    return ImageBatch(torch.arange(count)[:, None, None, None], torch.arange(count))


@given(st.integers(1, 40), st.integers(1, 16), st.integers(0, 9))
def test_every_epoch_has_every_image_once(count, batch_size, seed):
    def batch(step: int) -> list[int]:
        images = shuffled_batch(numbered(count), batch_size=batch_size, step=step, key=[seed, 1])
        assert images.labels.tolist() == images.images.flatten().tolist()
        return images.labels.tolist()

    steps = -(-3 * count // batch_size)
    seen = [label for step in range(steps) for label in batch(step)]
    for epoch in range(3):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))


@pytest.mark.parametrize(("limit", "expected"), [(0, 10), (4, 4), (100, 10)])
def test_held_out_batches_have_each_image_at_most_once(limit, expected):
    config = load("digits", ["data.batch_size=3", f"evaluation.images={limit}"])
    batches = heldout_batches(numbered(10), config)
    seen = [label for batch in batches for label in batch.labels.tolist()]
    assert len(seen) == len({*seen}) == expected


def test_no_image_is_both_trained_on_and_held_out():
    bunch = load_digits()
    corpus = read(DIGITS)
    both = Counter(
        image.tobytes()
        for part in (corpus.train, corpus.heldout)
        for image in map(np.asarray, part.images)
    )
    assert both == Counter(
        np.rint(image * 255 / 16).astype(np.uint8).tobytes() for image in bunch.images
    )
    assert np.bincount(corpus.heldout.labels).tolist() == [
        round(0.2 * n) for n in np.bincount(bunch.target)
    ]


# ------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize(("side", "patch"), [(8, 2), (28, 7), (30, 6), (32, 8), (7, 1)])
def test_patches_are_a_quarter_of_the_side_or_less(side, patch):
    model: Any = digits(f"data.image_size={side}", *SMALL).build_model()
    assert model.config.image_size == side
    assert model.config.patch_size == patch


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.type=llama"], "model.type=llama: must be an image classifier .* such as"),
        (["model.patch_size=3"], "model.patch_size=3: must divide"),
    ],
)
def test_a_model_that_does_not_fit_is_an_error_that_names_the_setting(overrides, told):
    with pytest.raises(ValueError, match=told):
        digits(*overrides).build_model()


# ----------------------------------------------------------------------------------------- metrics


def test_loss_and_accuracy_are_scikit_learns():
    task = digits(*SMALL)
    model = task.build_model().eval()
    heldout = task.heldout()
    assert list(heldout) == list("0123456789")
    totals = [task.evaluate(model, heldout[name]) for name in heldout]
    together = {name: sum(each[name] for each in totals) for name in totals[0]}
    batches = [batch for name in heldout for batch in heldout[name]]
    truth = torch.cat([batch.labels for batch in batches])
    assert truth.tolist() == sorted(read(DIGITS).heldout.labels.tolist())
    with torch.no_grad():
        pixels = torch.cat([batch.images for batch in batches]) / 127.5 - 1
        logits = model(pixel_values=pixels).logits
    metrics = task.metrics(together)
    assert metrics["accuracy"] == accuracy_score(truth, logits.argmax(-1))
    assert metrics["loss"] == pytest.approx(log_loss(truth, logits.double().softmax(-1)), rel=1e-5)
    assert together["images"] == len(truth)
    nothing = dict.fromkeys(together, 0.0)
    assert np.isnan([*task.metrics(nothing).values()]).all()


def line(parts: dict[str, dict[str, float | None]], step: int = 8) -> dict[str, Any]:
    return {"step": step, "evaluation": {"federated": {"overall": {}, "parts": parts}}}


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 1)), min_size=1, max_size=20))
def test_fairness_is_numpys_spread_between_the_clients(values):
    parts = {f"c-{i}": {"loss": loss, "accuracy": right} for i, (loss, right) in enumerate(values)}
    fair = fairness([line({"c-0": {"loss": 99.0, "accuracy": 0.0}}, 4), line(parts)])
    assert fair is not None
    assert fair["step"] == 8
    assert fair["clients"] == len(values)
    losses, accuracies = np.array(values).T
    for name, numbers in (("loss", losses), ("accuracy", accuracies)):
        assert fair["mean"][name] == pytest.approx(np.mean(numbers))
        assert fair["std"][name] == pytest.approx(np.std(numbers), abs=1e-9)
    assert fair["worst"]["accuracy"] == accuracies.min()
    assert fair["best"]["accuracy"] == accuracies.max()
    assert fair["best"]["loss"] == losses[accuracies == accuracies.max()].min()
    assert parts[fair["worst"]["client"]]["accuracy"] == accuracies.min()


def test_fairness_of_text_is_by_loss_and_leaves_out_what_is_not_finite():
    parts: dict[str, dict[str, float | None]] = {
        "a": {"loss": 2.0, "perplexity": 7.4},
        "b": {"loss": 1.0, "perplexity": 2.7},
        "c": {"loss": None, "perplexity": None},
    }
    fair = fairness([line(parts)])
    assert fair is not None
    assert (fair["best"]["client"], fair["worst"]["client"], fair["clients"]) == ("b", "a", 2)
    assert fair["std"] == pytest.approx({"loss": 0.5, "perplexity": 2.35})
    assert fairness([]) is None
    assert fairness([line({"c": {"loss": None}})]) is None


# --------------------------------------------------------------------------------------------- runs


def run(folder: Path, *overrides: str, clients: int = 3) -> dict[str, Any]:
    steps = ("run.name=run", "run.steps=12", "run.eval_every=6")
    periods = ("sync.params=2", "sync.exp_avg=6", "sync.exp_avg_sq=12")
    words = (*steps, *periods, *SMALL, *overrides)
    return tiny.summary(tiny.train(folder, *words, config="digits", clients=clients))


class Finished(NamedTuple):
    folder: Path
    summary: dict[str, Any]
    printed: str


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run of three clients: its folder and its output."""
    folder, printed = tmp_path_factory.mktemp("runs"), StringIO()
    with redirect_stdout(printed):
        summary = run(folder, *LEARNS, "data.alpha=1")
    return Finished(folder / "run", summary, printed.getvalue())


def test_a_federation_learns_digits(finished):
    summary = finished.summary
    for where in ("central", "federated"):
        course = summary["evaluation"][where]
        assert course["loss"]["final"] < 0.8 * course["loss"]["first"]
        assert course["accuracy"]["best"] >= course["accuracy"]["final"] > 0.3
    assert summary["bytes"]["measured"]["up"] == summary["bytes"]["analytic"]["up"]


def test_the_summary_says_who_holds_what_and_who_fares_how(finished):
    summary = finished.summary
    task = digits("data.alpha=1")
    for i in range(3):
        held = task.client_data(Site(i, 3)).description
        assert summary["client_data"][f"client-{i}"] == held
    *_, last = read_lines(finished.folder / "metrics.jsonl")
    accuracies = [part["accuracy"] for part in last["evaluation"]["federated"]["parts"].values()]
    assert summary["fairness"]["std"]["accuracy"] == pytest.approx(np.std(accuracies))
    assert summary["fairness"]["worst"]["accuracy"] == min(accuracies)
    assert [*last["evaluation"]["central"]["parts"]] == list("0123456789")
    assert (finished.folder / "partition.png").is_file()


def test_a_run_leaves_a_model_that_transformers_loads(finished):
    folder, summary = finished.folder, finished.summary
    model = AutoModelForImageClassification.from_pretrained(folder / "final")
    assert [*model.config.id2label.values()] == list("0123456789")
    task = digits()
    totals = [task.evaluate(model, batches) for batches in task.heldout().values()]
    right = sum(each["correct"] for each in totals) / sum(each["images"] for each in totals)
    assert right == summary["evaluation"]["central"]["accuracy"]["final"]
    processor = json.loads((folder / "final" / "preprocessor_config.json").read_text())
    assert processor["size"] == {"height": 8, "width": 8}
    assert processor["image_mean"] == processor["image_std"] == [0.5]


def test_the_terminal_names_accuracy_and_how_unlike_it_is_for_the_clients(finished):
    right = f"{finished.summary['evaluation']['central']['accuracy']['final']:.1%}"
    assert f"({right[:-1]} % right), on clients" in finished.printed
    assert re.search(r"client client-0: device cpu, .*\bdata 0 ", finished.printed)
    worst = finished.summary["fairness"]["worst"]
    assert f"to {worst['client']} {worst['accuracy']:.1%}".replace("%", " %") in finished.printed


def test_the_buffers_of_batch_norm_are_averaged_when_asked_to(tmp_path):
    summary = run(
        tmp_path, "model.type=resnet", "model.hidden_size=8", "sync.buffers=2", "optimizer.lr=0.01"
    )
    assert summary["bytes"]["measured"]["up"]["buffers"] > 0
    course = summary["evaluation"]["central"]["loss"]
    assert course["final"] < course["first"]


# -------------------------------------------------------------------------------------------- files


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


def test_private_images_take_the_labels_and_the_shape_of_the_run(animals, tmp_path):
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["emu", "cat"])}
    images = [picture(60, "RGB") for _ in range(10)]
    path = parquet(tmp_path / "mine.parquet", features, image=images, label=[0, 1] * 5)
    data = on(animals, "data.validation_fraction=0.2").client_data(Site(0, 1, path))
    assert data.description == {"cat": 4, "emu": 4}
    batch = data.train_batch(0)
    assert batch.images.shape[1:] == (1, 8, 8)
    assert {*batch.labels.tolist()} == {0, 2}


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
