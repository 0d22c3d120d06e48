"""Whole runs on the digits: they learn, and say who holds what and how each fares."""

import json
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from digits import digits, run
from transformers import AutoModelForImageClassification

from flower_desloc.app.runs.folder import read_lines
from flower_desloc.app.tasks import Site

LEARNS = ["model.hidden_size=64", "model.intermediate_size=128", "optimizer.lr=0.005"]


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
