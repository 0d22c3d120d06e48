"""A task or optimizer by its import path: what is wrong with it is said, its options keep types."""

import shutil

import pytest
import torch
from command import accepted, refused
from own_code import EXAMPLES

from client_app.worker import RunParts
from flower_desloc.app.config import ConfigError, dump, load, parse
from flower_desloc.app.config.imports import IMPORT_FROM
from flower_desloc.app.setup.streams import RunStreams
from flower_desloc.app.tasks import build_task

pytestmark = pytest.mark.usefixtures("in_the_examples")
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task=nowhere:Task"], r"task=nowhere:Task: .*\(ModuleNotFound.*\); call desloc in"),
        (["task=cnn:CMM"], r"task=cnn:CMM: it cannot be imported here \(AttributeError.*\)$"),
        (["task=cnn.CNN"], r"task=cnn\.CNN: must be one of causal_lm, .*module:name"),
        (
            ["optimizer.name=nowhere:Lion", "optimizer.lr=1"],
            r"optimizer\.name=nowhere:Lion: it cannot be imported",
        ),
        (
            ["optimizer.name=cnn:CNN", "optimizer.lr=1"],
            r"optimizer\.name=cnn:CNN: it cannot be constructed",
        ),
        (["optimizer.name=lion"], r"optimizer\.name=lion: must be one of adopt, .*module:name"),
        (["optimizer.options.betas=[0.9,0.9]"], r"set optimizer\.KEY=VALUE"),
        (
            ["optimizer.name=torch.optim:Adagrad", "optimizer.lr=1", "optimizer.weight_decay=0.1"],
            r"optimizer\.name=torch\.optim:Adagrad takes optimizer\.options\.weight_decay",
        ),
        (
            ["optimizer.name=torch.optim:Adagrad", "optimizer.lr=1", "optimizer.options.beta=1"],
            r"cannot be constructed with .*options=\{'beta': 1\} \(TypeError.*'beta'",
        ),
        (
            ["task=causal_lm", "task_options.width=8"],
            r"task_options=\{'width': 8\}: they are for a task of your own",
        ),
        (["data.partition=by_hand"], r"data\.partition=by_hand: must be one of by_domain, dir"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence_that_names_the_setting(overrides, message):
    with pytest.raises(ConfigError, match=message):
        RunStreams(load("cnn.yaml", overrides)).check()


def test_a_class_that_is_no_task_is_refused_before_anything_is_trained():
    config = load("cnn.yaml", ["task=flower_desloc.app.config:dump"])
    with pytest.raises(ConfigError, match=r"is not a task, it lacks build_model, client_data, "):
        build_task(config)


def test_a_task_that_does_not_read_a_sites_private_data_is_refused_there(tmp_path):
    """Otherwise the client would train on other data without an error."""
    parts = RunParts(dump(load("cnn.yaml")), {}, CPU)
    with pytest.raises(
        ValueError, match=r"^data-path in .*: task=cnn:CNN does not state that it reads site.data_"
    ):
        parts.single_worker({"data-path": str(tmp_path)})
    assert parts.single_worker({"partition-id": 0, "num-partitions": 2})


def test_options_keep_their_types_on_the_way_to_the_clients():
    words = ["task_options.deep.list=[1,2.5,a]", "task_options.flag=true", "task_options.n=null"]
    config = load("lion.yaml", words)
    options = {"width": 8, "deep": {"list": [1, 2.5, "a"]}, "flag": True, "n": None}
    assert config.task_options == options
    assert parse(dump(config)) == config


@pytest.mark.parametrize(
    ("module", "code", "told"),
    [
        (
            "leaves",
            "import sys\nsys.exit(3)\n",
            "it cannot be imported here (RuntimeError: it called sys.exit(3))",
        ),
        ("needs", "import nolibrary\n", "the folder that holds nolibrary, or install it, at every"),
    ],
)
def test_the_command_says_why_a_module_cannot_be_imported(
    tmp_path, monkeypatch, module, code, told
):
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    error = refused("run", "quickstart", f"task={module}:Task", "--dry-run")
    assert f"task={module}:Task: " in error
    assert told in error


def test_the_command_imports_from_the_folder_where_it_is_called(tmp_path, monkeypatch):
    shutil.copy(EXAMPLES / "cnn.py", tmp_path / "cnn_beside_me.py")
    command = ["run", str(EXAMPLES / "cnn.yaml"), "task=cnn_beside_me:CNN", "--dry-run"]
    monkeypatch.setenv(IMPORT_FROM, "")  # which the command changes
    error = refused(*command)
    assert "task=cnn_beside_me:CNN: it cannot be imported here (ModuleNotFound" in error
    monkeypatch.chdir(tmp_path)
    assert "each client will send, in 96 steps" in accepted(*command)
