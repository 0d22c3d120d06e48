"""The example with private data: sites train on files that only they have."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict
from own_code import EXAMPLES
from safetensors.torch import load_file
from scripts import ROOT
from tiny import failing_at, summary

from client_app import app as client_app
from flower_desloc.app.config import load
from flower_desloc.app.tasks import Site, build_task
from flower_desloc.flower.inprocess import InProcessGrid
from server_app import app as server_app

pytestmark = pytest.mark.usefixtures("in_the_examples")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two CSV files, of one kind of text in the main each."""
    folder = tmp_path_factory.mktemp("private")
    lines = {"code": (EXAMPLES / "cnn.py").read_text(), "prose": (ROOT / "LICENSE").read_text()}
    texts = {label: [t for t in text.splitlines() if t][:100] for label, text in lines.items()}
    for main, other in (("code", "prose"), ("prose", "code")):
        with (folder / f"{main}.csv").open("w", encoding="utf-8-sig", newline="") as file:
            rows = [*((t, main) for t in texts[main]), *((t, other) for t in texts[other][::3])]
            rows[1] = ("two\nlines\u2028of text", main)
            csv.writer(file).writerows([("text", "label"), *rows])
    return sorted(folder.iterdir())


BY_HOSPITAL, BY_WARD = (f"data.partition=column:{name}" for name in ("hospital", "ward"))
Sites = Callable[..., Path]


@pytest.fixture(scope="module")
def at_sites(files: list[Path]) -> Sites:
    """A function that runs the example at sites that have a file each and no partition."""

    def at_sites(output_dir: Path, *overrides: str) -> Path:
        text = " ".join(["run.steps=48", *overrides])
        config = {"config": "csv_classifier.yaml", "overrides": text}
        state = str(output_dir / ".clients")
        nodes = [{"name": f.stem, "data-path": str(f), "state-dir": state} for f in files]
        context = Context(1, 0, {}, RecordDict(), {**config, "output-dir": str(output_dir)})
        server_app(InProcessGrid(client_app, nodes), context)
        return output_dir / "csv_classifier"

    return at_sites


@pytest.fixture(scope="module")
def private(at_sites: Sites, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run at two sites."""
    return at_sites(tmp_path_factory.mktemp("sites"))


def test_sites_train_on_files_that_only_they_have(private):
    found = summary(private)
    held = found["client_data"]
    assert held["code"]["code"] > held["prose"]["code"]
    assert held["prose"]["prose"] > held["code"]["prose"]
    loss = found["evaluation"]["federated"]["loss"]
    assert loss["final"] < 0.8 * loss["first"]
    assert "central" not in found["evaluation"]


def test_simulated_clients_share_one_table_by_the_values_of_a_column(tmp_path):
    path = tmp_path / "all.csv"
    rows = [(f"word{n} text", "code" if n % 2 else "prose", "ab"[n >= 30]) for n in range(40)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label", "hospital"), *rows])
    task = build_task(load("csv_classifier.yaml", f"data.source={path} {BY_HOSPITAL}"))
    assert [task.client_data(Site(m, 2)).num_examples for m in range(2)] == [27, 9]
    task = build_task(load("csv_classifier.yaml", f"data.source={path} {BY_WARD}"))
    with pytest.raises(ValueError, match=r"column:ward: there is only text, label, hospital"):
        task.client_data(Site(0, 2))


def test_buffers_are_averaged_if_they_have_a_period_and_integers_are_not_sent(
    private, at_sites, tmp_path
):
    def buffers(folder: Path) -> dict[str, torch.Tensor]:
        saved = load_file(folder / "final" / "model.safetensors")
        return {key: saved[f"1.{key}"] for key in ("running_mean", "num_batches_tracked")}

    assert buffers(private)["running_mean"].any()
    assert buffers(private)["num_batches_tracked"] == 0
    assert not buffers(at_sites(tmp_path, "sync.buffers=never"))["running_mean"].any()


def test_dropout_is_the_same_in_a_run_that_resumes(private, at_sites, tmp_path):
    with failing_at(3):
        at_sites(tmp_path)
    torch.rand(7)
    resumed = summary(at_sites(tmp_path, "run.resume=auto"))
    assert resumed["resumed"]
    assert resumed["weights_sha256"] == summary(private)["weights_sha256"]
