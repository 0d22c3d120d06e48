"""A task's own metrics are shown wherever its loss is, under their names."""

import json
from contextlib import redirect_stdout
from io import StringIO

import numpy as np
import pytest
import torch
from flwr.app import MetricRecord
from hypothesis import assume, given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_study import leave, results, study
from tiny import summary, train

from flower_desloc.app.config import ConfigError
from flower_desloc.app.plan.wall_clock import REPORTED
from flower_desloc.app.runs.figures.heldout import draw_heldout
from flower_desloc.app.runs.groups import grouped
from flower_desloc.app.runs.record import load
from flower_desloc.app.runs.report.tables import comparison, tiles
from flower_desloc.app.study.figures import _Grid
from flower_desloc.app.study.results import table, write
from flower_desloc.app.study.study_file import with_view
from flower_desloc.app.study.workers import run_to_end
from flower_desloc.flower.arrays import plain_numbers
from flower_desloc.flower.failures import FederationError
from flower_desloc.flower.metrics import evaluation_record

TASK = """
import numpy as np
from flower_desloc.app.tasks.image_classification import ImageClassification

class Mine(ImageClassification):
    def metrics(self, sums):
        metrics = super().metrics(sums)
        right = np.float32(metrics["accuracy"])
        return {**metrics, "top/1": right, "error_rate": np.float64(1) - right}

class Ambiguous(ImageClassification):
    def metrics(self, sums):
        return {**super().metrics(sums), "top/loss": 1.0}

class Listed(ImageClassification):
    def metrics(self, sums):
        return {**super().metrics(sums), "by_class": {"a": 1.0}}
"""
SETTINGS = [
    *("run.steps=8", "run.eval_every=4", "model.hidden_size=16", "model.intermediate_size=16"),
    *("model.num_hidden_layers=1", "model.num_attention_heads=2", "data.batch_size=8"),
    *("data.partition=iid", "sync.params=4", "sync.exp_avg=4", "sync.exp_avg_sq=8"),
]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "own_metrics_task.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)


def run(tmp_path, task="Mine"):
    settings = (f"task=own_metrics_task:{task}", *SETTINGS)
    return train(tmp_path / "runs", *settings, config="digits", clients=2)


def test_a_metric_is_in_every_view_under_its_name(tmp_path, mine):
    printed = StringIO()
    with redirect_stdout(printed):
        folder = run(tmp_path)
    found, record = summary(folder), load(folder)
    for where in ("central", "federated"):
        assert {"loss", "accuracy", "top/1", "error_rate"} <= found["evaluation"][where].keys()
        course = found["evaluation"][where]["error_rate"]
        # Its direction is not known, so no value of it is the best.
        assert course["best"] is None
        assert course["final"] == pytest.approx(
            1 - found["evaluation"][where]["accuracy"]["final"], abs=1e-6
        )
    [*lines] = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    clients = lines[-1]["evaluation"]["federated"]["parts"]
    assert clients.keys() == {"client-0", "client-1"}
    assert all({"top/1", "error_rate"} <= client.keys() for client in clients.values())
    assert {"top/1", "error_rate"} <= found["fairness"]["std"].keys()
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    tags = {f"heldout_error_rate/{where}" for where in ("central", "federated/client-1")}
    assert tags <= {*events.Tags()["scalars"]}
    assert "error_rate" in {tile.name for tile in tiles(record)}
    assert {"top/1", "error_rate"} <= {*comparison(grouped([record]), REPORTED).head}
    figure = draw_heldout([record])
    assert figure is not None
    titles = [text.get_text() for panel in figure.axes for text in panel.texts]
    titles += [panel.get_title("left") for panel in figure.axes]
    assert any("error_rate" in title for title in titles)
    assert f"error_rate {found['evaluation']['central']['error_rate']['first']:.4g} to" in (
        printed.getvalue()
    )


@pytest.mark.parametrize(
    ("task", "error", "said"),
    [
        ("Ambiguous", ConfigError, r"its metric 'top/loss' reads as 'loss' of a part"),
        ("Listed", FederationError, r"the metric 'by_class' is \{'a': 1.0\} \(dict\)"),
    ],
)
def test_a_metric_that_cannot_be_filed_is_refused_by_its_name(tmp_path, mine, task, error, said):
    with pytest.raises(error, match=said):
        run(tmp_path, task)


METRICS = st.sets(st.text("ab/", min_size=1, max_size=5), min_size=1, max_size=4)
PARTS = st.sets(st.from_regex(r"[xy/]{0,3}[xy]", fullmatch=True), max_size=3)


@given(metrics=METRICS, parts=PARTS)
def test_metrics_of_parts_are_told_from_metrics_with_a_slash(metrics, parts):
    assume(not any(a.endswith(f"/{b}") for a in metrics for b in metrics))
    every = {f"{part}/{name}": 1.0 for part in parts for name in metrics}
    record = evaluation_record(MetricRecord({**dict.fromkeys(metrics, 0.0), **every}))
    assert record is not None
    assert record.overall == dict.fromkeys(metrics, 0.0)
    assert record.parts == {part: dict.fromkeys(metrics, 1.0) for part in parts}


@pytest.mark.parametrize("value", [np.float32(0.5), np.int64(3), torch.tensor(0.5), True, 0.5, 3])
def test_numbers_of_numpy_and_pytorch_are_taken(value):
    [plain] = plain_numbers({"f1": value}).values()
    assert type(plain) in (int, float, bool)
    assert plain == value


@pytest.mark.parametrize("value", ["0.5", None, np.zeros(2), torch.zeros(2), {}])
def test_another_value_is_refused_with_its_name(value):
    with pytest.raises(TypeError, match="the metric 'f1' is"):
        plain_numbers({"f1": value})


def test_a_study_scores_by_any_metric(tmp_path, mine):
    text = json.dumps(
        {
            "base": ["task=own_metrics_task:Mine", *SETTINGS, "simulation.num_clients=2"],
            "axes": {
                "method": {
                    "slow": {"config": "digits", "overrides": ["optimizer.lr=0.0001"]},
                    "fast": {"config": "digits", "overrides": ["optimizer.lr=0.01"]},
                },
                "alpha": {"1": ["data.alpha=1"]},
            },
            "score": {"metric": "top/1", "direction": "max", "reduce": "best"},
        }
    )
    made, store = study(tmp_path, text)
    for cell in made.cells:
        outcome = run_to_end(cell.run(0), store.path)
        assert outcome["status"] == "completed", outcome
    rows = results(made, store)
    for row in rows:
        lines = map(json.loads, (row.runs[0].folder.metrics).read_text().splitlines())
        seen = [line["evaluation"]["central"]["overall"]["top/1"] for line in lines]
        assert row.scores == [max(seen)]
    headings, cells = table(rows)
    assert headings[2] == "largest held-out top/1"
    assert {"loss", "accuracy", "error_rate", "worst client"} <= {*headings}
    worst = [
        min(client["top/1"] for client in evaluation["federated"]["parts"].values())
        for row in rows
        for evaluation in [
            json.loads(row.runs[0].folder.metrics.read_text().splitlines()[-1])["evaluation"]
        ]
    ]
    assert [line[headings.index("worst client")] for line in cells] == [f"{w:.4f}" for w in worst]
    write(rows, store.path)
    written = json.loads((store.path / "results.json").read_text())["cells"]
    assert [cell["worst_client"] for cell in written] == worst
    assert {*_Grid(rows).panels} == {"alpha 1"}

    # Another metric, of the clients: the same runs.
    seen = results(with_view(made, "min:federated/error_rate", "accuracy=0"), store)
    headings, cells = table(seen)
    assert headings[2] == "smallest held-out error_rate on the clients"
    for row, line in zip(seen, cells, strict=True):
        lines = map(json.loads, row.runs[0].folder.metrics.read_text().splitlines())
        [*every] = (line["evaluation"]["federated"] for line in lines)
        assert row.scores == [min(each["overall"]["error_rate"] for each in every)]
        clients = [client["error_rate"] for client in every[-1]["parts"].values()]
        assert line[headings.index("spread of clients")] == f"{np.std(clients):.4f}"
        assert line[headings.index("bytes to accuracy 0")] == "0 B"


def test_a_metric_whose_direction_is_not_known_needs_one(tmp_path, mine):
    with pytest.raises(ConfigError, match=r"score\.metric=macro_f1: .* state score\.direction"):
        study(tmp_path, "score: {metric: macro_f1}")


def test_a_score_that_the_task_does_not_report_is_refused(tmp_path, mine):
    made, store = study(tmp_path, "base: [run.steps=4]\nscore: {metric: accuracy}")
    leave(store, made.cells[0].run(0), 1.0)
    with pytest.raises(ConfigError, match=r"score\.metric=accuracy: .* it has loss"):
        results(made, store)[0].scores  # noqa: B018
