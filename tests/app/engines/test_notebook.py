"""Runs from Python: the tables, the figure and the model are those of the run's files."""

import json
import shutil
import sys
from contextlib import nullcontext

import pytest
from light_task import Light
from tiny import TINY, failing_at, summary, train

from flower_desloc.app import compare, load_run, run
from flower_desloc.app.config import ConfigError
from flower_desloc.app.config.units import TEXT
from flower_desloc.app.engines import notebook
from flower_desloc.app.engines.in_process import run_in_process
from flower_desloc.app.runs.folder import read_lines
from flower_desloc.core.streams import digest, parameters
from flower_desloc.flower.checkpoint import CheckpointError

SHORT = [*TINY, "run.steps=4", "run.eval_every=2", "sync.params=2", "simulation.num_clients=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def result(folder):
    return run("quickstart", *SHORT, engine="inprocess", output_dir=folder)


def test_the_tables_are_those_of_the_files(result, folder):
    assert result.folder == folder / "quickstart"
    assert "completed" in repr(result)
    *_, last = read_lines(result.folder / "metrics.jsonl")
    assert [*result.windows.index] == [2, 4]
    assert result.windows.loc[4, "train_loss"] == last["train_loss"]
    assert (
        result.windows.bytes_up.sum() == summary(result.folder)["bytes"]["measured"]["up"]["total"]
    )
    client = last["clients"]["client-1"]
    assert result.clients.loc[(4, "client-1"), "update_norm"] == client["update_norm"]
    central = last["evaluation"]["central"]
    assert result.evaluations.loc[(4, "central", "all"), "loss"] == central["overall"]["loss"]
    assert {*result.evaluations.loc[(4, "federated")].index} == {"all", "client-0", "client-1"}


def test_the_model_is_that_of_the_run(result):
    assert digest(parameters(result.model())) == summary(result.folder)["weights_sha256"]


@pytest.mark.parametrize("task", [TEXT, f"{Light.__module__}:Light"])
def test_the_model_of_a_run_without_checkpoints_is_that_in_final(task, tmp_path):
    (tmp_path / "any.yaml").write_text(f"extends: quickstart\ntask: {task}\n")
    words = [*SHORT, "run.checkpoint_every=0"]
    whole = load_run(train(tmp_path, *words, config=str(tmp_path / "any.yaml")))
    assert digest(parameters(whole.model())) == summary(whole.folder)["weights_sha256"]
    shutil.move(whole.folder / "final", tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="has no checkpoint and no final/"):
        whole.model()


def test_runs_are_compared_and_shown(result, folder):
    again = run("quickstart", *SHORT, "run.seed=1", engine="inprocess", output_dir=folder)
    assert again.folder != result.folder
    table = compare([result, again.folder, load_run(result.folder)])
    assert [*table.seed] == [result.record.seed, 1, result.record.seed]
    assert [*table.columns][-1] == "seconds"  # they differ in nothing else
    assert table.loss.iloc[0] == result.evaluations.loc[(4, "central", "all"), "loss"]
    shown = result._repr_html_()
    assert "<table" in shown
    assert "data:image/png;base64," in shown


def test_a_comparison_shows_the_settings_in_which_runs_differ(result, folder):
    words = (*SHORT, "optimizer.lr=0.5", "sync.params=4", "run.name=other")
    table = compare([result, run("quickstart", *words, engine="inprocess", output_dir=folder)])
    assert [*table.columns][-2:] == ["optimizer.lr", "sync.params"]
    assert table["optimizer.lr"].iloc[1] == 0.5
    with pytest.raises(ValueError, match="give at least one run"):
        compare([])
    with pytest.raises(TypeError, match=r'such as "run\.steps=8"; got'):
        run("quickstart", {"run.steps": 3})


def test_a_run_that_is_resumed_elsewhere_is_returned_from_its_own_folder(tmp_path):
    words = (*SHORT, "run.checkpoint_every=1")
    with failing_at(2):
        train(tmp_path / "a", *words, "run.name=foo")
    there = tmp_path / "a" / "foo"
    words = (*words, f"run.resume={there}")
    again = run("quickstart", *words, engine="inprocess", output_dir=tmp_path / "b")
    assert again.folder == there
    assert summary(there)["status"] == "completed"


def test_the_result_is_that_of_the_run_and_not_of_the_newest(result, tmp_path, monkeypatch):
    """Another run of that name is written while it is going on."""

    def after(*given):
        folder = run_in_process(*given)
        shutil.copytree(folder, tmp_path / "quickstart-2")
        (tmp_path / "quickstart-2" / "summary.json").touch()
        return folder

    monkeypatch.setattr(notebook, "run_in_process", after)
    own = run("quickstart", *SHORT, engine="inprocess", output_dir=tmp_path)
    assert own.folder == tmp_path / "quickstart"
    says = tmp_path / "desloc"
    (tmp_path / "quickstart-2" / "summary.json").touch()
    says.write_text(
        f"#!/bin/sh\ntouch {tmp_path}/quickstart-2/summary.json\n"
        f"echo 'folder: {tmp_path}/quickstart'\n"
    )
    says.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert run("quickstart", *SHORT, output_dir=tmp_path).folder == tmp_path / "quickstart"


def test_a_path_may_have_blanks(tmp_path):
    source = tmp_path / "my data"
    source.mkdir()
    tales = [json.dumps({"text": f"Tale {n}: {'once upon a time. ' * 20}"}) for n in range(40)]
    (source / "tales.jsonl").write_text("\n".join(tales))
    words = (*SHORT, f"data.source={source}", "data.domains=[]", "data.partition=iid")
    result = run("quickstart", *words, engine="inprocess", output_dir=tmp_path)
    assert result.record.config["data"]["source"] == str(source)


def test_mistakes_are_errors_of_python(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.stepz"):
        run("quickstart", "run.stepz=3", output_dir=tmp_path)
    with pytest.raises(ValueError, match="engine=ray"):
        run("quickstart", engine="ray", output_dir=tmp_path)
    with pytest.raises(ValueError, match=r"config\.yaml"):
        load_run(tmp_path / "nowhere")


def test_a_simulation_that_fails_is_an_error_with_its_reason(tmp_path, monkeypatch, capsys):
    """The command is another here, which fails as it does."""
    says = tmp_path / "desloc"
    says.write_text("#!/bin/sh\necho step 1\necho 'error: the site has no data' >&2\nexit 1\n")
    says.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(RuntimeError, match="the site has no data"):
        run("quickstart", *SHORT, output_dir=tmp_path)
    assert "step 1" in capsys.readouterr().out


def test_a_simulation_returns_the_folder_of_a_run_or_fails(result, tmp_path, monkeypatch):
    """The command is another here; this is in the folder of another run."""
    other = tmp_path / "other"
    shutil.copytree(result.folder, other)
    monkeypatch.chdir(other)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    says = tmp_path / "desloc"
    for named, returned in [("", None), ("/data", None), (str(result.folder), result.folder)]:
        says.write_text(f"#!/bin/sh\necho 'folder: {named}'\necho 'folder: '\necho 'folder: /x'\n")
        says.chmod(0o755)
        with nullcontext() if returned else pytest.raises(RuntimeError, match="the run's folder"):
            assert run("quickstart", *SHORT, output_dir=tmp_path).folder == returned
    says.write_text("#!/bin/sh\n")
    with pytest.raises(RuntimeError, match="the run's folder"):
        run("quickstart", *SHORT, output_dir=tmp_path)


@pytest.mark.soak
def test_a_simulation_gives_the_weights_of_a_run_in_one_process(result, tmp_path):
    simulated = run("quickstart", *SHORT, output_dir=tmp_path)
    assert simulated.summary["weights_sha256"] == result.summary["weights_sha256"]
