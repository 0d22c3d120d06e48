"""The partition of labelled images among clients, and `desloc partition`."""

import re
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from digits import DIGITS, digits
from typer.testing import CliRunner

from flower_desloc.app.cli import app
from flower_desloc.app.runs.figures.partition import total_variation
from flower_desloc.app.tasks import Site, partition
from flower_desloc.app.tasks.image_classification.batches import client_rows
from flower_desloc.app.tasks.image_classification.sources import read
from flower_desloc.app.tasks.partition import ClientRows, PartitionRule, partition_rows

RULES = ("iid", "dirichlet", "pathological", "quantity")
PATHOLOGICAL = "data.partition=pathological"


def rule(name: str, *, alpha: float = 0.5, seed: int = 0, classes: int = 2) -> PartitionRule:
    return PartitionRule(name, alpha, seed, classes)


def counts(name: str, num_clients: int, **how: Any) -> np.ndarray:
    """Return the number of training images of each label for every client."""
    numbers = read(DIGITS).train.labels
    dealt = client_rows(DIGITS, rule(name, **how), num_clients)
    return np.array([np.bincount(numbers[share.train], minlength=10) for share in dealt])


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
    assert distance_of(counts("iid", 10)) < 0.15


def test_a_large_alpha_is_iid_and_a_small_one_is_not():
    at = {alpha: distance_of(counts("dirichlet", 10, alpha=alpha)) for alpha in (0.05, 0.5, 1000)}
    assert at[1000] < 0.05 < 0.3 < at[0.5] < 0.6 < at[0.05]
    assert (counts("dirichlet", 10, alpha=0.05) == 0).mean() > 0.5


@pytest.mark.parametrize("classes", [1, 2, 5, 10])
def test_a_pathological_client_holds_so_many_labels(classes):
    assert {*(counts("pathological", 20, classes=classes) > 0).sum(axis=1)} == {classes}


def test_quantity_makes_sizes_unlike_and_leaves_mixtures_alike():
    even, uneven = (counts("quantity", 10, alpha=alpha) for alpha in (1000, 0.3))
    assert even.sum(axis=1).std() < 0.1 * even.sum(axis=1).mean() < 30 < uneven.sum(axis=1).std()
    large = uneven[uneven.sum(axis=1) > 100]
    assert distance_of(large) < 0.2


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


def distance_of(sizes: np.ndarray) -> float:
    return total_variation(
        {
            str(i): {str(k): size for k, size in enumerate(row)}
            for i, row in enumerate(sizes.tolist())
        }
    )


def test_unlikeness_is_the_share_of_data_to_be_exchanged():
    assert total_variation({"a": {"x": 3, "y": 1}, "b": {"x": 6, "y": 2}}) == 0
    assert total_variation({"a": {"x": 4}, "b": {"y": 4}}) == 0.5
    # a: 3/4 x compared with 1/2 overall; b: 1/4 x
    assert total_variation({"a": {"x": 3, "y": 1}, "b": {"x": 1, "y": 3}}) == 0.25


def test_the_datas_seed_decides_partition_and_order_and_the_runs_seed_the_weights():
    def found(words: str) -> tuple[Any, ...]:
        task = digits(*words.split())
        data = task.client_data(Site(1, 10))
        weight = next(task.build_model().parameters()).sum().item()
        return dict(data.description), data.train_batch(3).labels.tolist(), weight

    held, order, weight = found("run.seed=3")
    assert found("run.seed=3 data.seed=3") == (held, order, weight)
    assert found("run.seed=4 data.seed=3")[:2] == (held, order)
    assert found("run.seed=4 data.seed=3")[2] != weight
    other = found("run.seed=3 data.seed=4")
    assert other[0] != held
    assert other[2] == weight


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
