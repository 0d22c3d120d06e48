"""The model of a run, of a checkpoint, and its card."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
from command import accepted, refused
from configurations import with_values
from huggingface_hub import ModelCard
from tiny import summary
from transformers import AutoModelForCausalLM

from flower_desloc.app.config import parse
from flower_desloc.app.runs.card import card
from flower_desloc.app.runs.export import export
from flower_desloc.app.tasks import build_task
from flower_desloc.core.streams import digest
from flower_desloc.flower.checkpoint import Checkpoint, Checkpoints

SMALL = [
    *(*tiny.TINY, "data.domains=[docs,code]", "data.seq_len=64", "simulation.num_clients=2"),
    *("run.steps=6", "run.eval_every=6", "sync.params=2", "sync.exp_avg=4", "sync.exp_avg_sq=6"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tiny.train(tmp_path_factory.mktemp("run"), *SMALL)


@pytest.fixture
def copy(run, tmp_path):
    """A copy of the run that a test may harm."""
    return Path(shutil.copytree(run, tmp_path / "copy"))


def hashed(folder):
    return digest(dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters()))


def test_the_final_model_has_the_weights_and_the_loss_of_its_run(run):
    loaded = AutoModelForCausalLM.from_pretrained(run / "final")
    assert hashed(run / "final") == summary(run)["weights_sha256"]
    task = build_task(parse((run / "config.yaml").read_text()))
    parts = [task.evaluate(loaded, batches) for batches in task.heldout().values()]
    totals = {name: sum(part[name] for part in parts) for name in parts[0]}
    said = summary(run)["evaluation"]["central"]["loss"]["final"]
    assert task.metrics(totals)["loss"] == said


def test_an_export_of_a_complete_run_is_its_final_folder(run, tmp_path):
    assert f"model: {tmp_path / 'model'}" in accepted("export", run, tmp_path / "model")
    names = {path.name for path in (run / "final").iterdir()}
    assert names == {path.name for path in (tmp_path / "model").iterdir()}
    for name in names:
        assert (tmp_path / "model" / name).read_bytes() == (run / "final" / name).read_bytes()


def test_a_run_that_was_cut_off_is_exported_from_its_last_checkpoint(copy, run, tmp_path):
    shutil.rmtree(copy / "final")
    (copy / "summary.json").unlink()
    assert export(copy) == copy / "export"
    assert hashed(copy / "export") == summary(run)["weights_sha256"]  # the last is the end's
    names = {path.name for path in (copy / "export").iterdir()}
    assert names == {path.name for path in (run / "final").iterdir()}
    first, last = sorted(copy.glob("checkpoints/*"))
    export(first, tmp_path / "first")
    assert hashed(tmp_path / "first") != summary(run)["weights_sha256"]
    said = (tmp_path / "first" / "README.md").read_text()
    assert "| local steps | 4 of 6 |" in said
    assert hashed(tmp_path / "first") in said
    [loss] = [line for line in said.splitlines() if line.startswith("| on the server | loss |")]
    assert loss.count(", at step 0 |") == 1  # what was exported was never evaluated
    assert "| `exp_avg_sq` | every 6 | 0 | 0 B |" in said
    assert first.name != last.name


def test_of_a_run_without_a_window_there_is_nothing_to_export(copy, tmp_path):
    shutil.rmtree(copy / "final")
    (copy / "summary.json").unlink()
    about: dict[str, Any] = {
        "run_key": "k",
        "round": 0,
        "step": 0,
        "evaluated": 0,
        "versions": {},
        "outer": {},
    }
    first, *_ = sorted(copy.glob("checkpoints/*"))
    averages = Checkpoint.read(first).averages
    begun = Checkpoints(tmp_path, 1, (copy / "config.yaml").read_text())
    begun.write(Checkpoint(**about, averages=averages))
    [file] = begun.all()
    shutil.copy(file, copy / "checkpoints" / file.name)
    with pytest.raises(ValueError, match="not completed a window"):
        export(copy / "checkpoints" / file.name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_replaces_nothing(run, tmp_path):
    (tmp_path / "mine").write_text("my thesis")
    for folder in (tmp_path, tmp_path / "mine"):
        assert "is not an empty folder; give another one" in refused("export", run, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_export_that_fails_leaves_nothing_behind(copy, tmp_path):
    assert "no such file or folder" in refused("export", tmp_path / "nowhere", tmp_path / "model")
    first, *_ = sorted(copy.glob("checkpoints/*"))
    first.write_bytes(first.read_bytes()[:100])
    refused("export", first, tmp_path / "model")
    assert {path.name for path in tmp_path.iterdir()} == {"copy"}


def test_the_card_tells_the_runs_facts_and_names_no_site(run):
    page = ModelCard.load(run / "final" / "README.md")
    assert page.data.library_name == "transformers"
    assert page.data.pipeline_tag == "text-generation"
    facts = summary(run)
    for stream, period in facts["config"]["periods"].items():
        assert f"| `{stream}` | every {period} | {facts['syncs'][stream]} |" in page.text
    assert facts["weights_sha256"] in page.text
    loss = facts["evaluation"]["central"]["loss"]
    row = f"| on the server | loss | {loss['first']:.3f} | {loss['final']:.3f} |"
    assert row in page.text
    for client, held in facts["client_data"].items():
        assert client not in page.text
        assert not [domain for domain in held if f"{domain} " in page.text]
    assert str(run.parent) not in page.text


def test_the_card_of_a_model_and_data_from_the_hub_links_to_them(run):
    config = parse((run / "config.yaml").read_text())
    changes = {"model.config": {"vocab_size": 256}, "data.source": "org/text:a"}
    config = with_values(config, {"run.init_from": "org/base"} | changes)
    data: Any = ModelCard(card(config, summary(run))).data
    assert (data.base_model, data.datasets) == ("org/base", ["org/text"])


def test_a_checkpoint_of_another_version_is_named_as_that(copy):
    (copy / "summary.json").unlink()
    checkpoints = Checkpoints(copy / "checkpoints", settings="no_such_setting: 1")
    last = checkpoints.all()[-1]
    checkpoints.write(Checkpoint.read(last))
    said = refused("export", copy)
    assert f"{last.name}: the configuration was written by another version" in said
    assert "start a new run" in said


def test_the_card_of_a_custom_task_does_not_tell_settings_that_the_task_may_not_read(run):
    config = parse((run / "config.yaml").read_text())
    config = with_values(config, {"task": "cnn:CNN", "data.source": "org/text"})
    page: Any = ModelCard(card(config, summary(run)))
    assert page.data.datasets is None
    assert "| model and data | those of a custom task |" in page.text
    for setting in ("org/text", "partition", "a step", "precision"):
        assert setting not in page.text


def test_the_card_tells_averages_besides_the_periods(run):
    config = parse((run / "config.yaml").read_text())
    told = summary(run)
    told["config"]["once_at"] = [3]
    assert "| `params` | every 2 and after 3 |" in card(config, told)
