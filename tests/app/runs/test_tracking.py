"""What trackers are sent of a run; that nothing they do reaches it."""

import io
import json
import math
import os
import shlex
import sqlite3
import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from signal import SIGKILL
from threading import Event
from typing import Any

import pytest
from command import accepted
from PIL import Image
from processes import output_of, wait_until
from recorded import a_config, a_run_info, record, windows_of
from scripts import ROOT
from tiny import TINY, summary, train

from flower_desloc.app.config import ConfigError
from flower_desloc.app.runs import RunFolder, RunRecorder
from flower_desloc.app.runs.folder import read_lines
from flower_desloc.app.runs.recorder import to_line
from flower_desloc.app.runs.scalars import Scalars
from flower_desloc.app.runs.tracker_process import send
from flower_desloc.app.runs.tracking import TrackerView, require_installed
from flower_desloc.trackers import TRACKERS, tracker
from flower_desloc.trackers.mlflow import metric_name

RECORDING = """
import json, pathlib
class Run:
    def __init__(self, **options):
        self.told = [("init", options)]
        self.summary = {}
    def log(self, values, step):
        self.told.append(("log", step, values))
    def log_artifact(self, artifact):
        self.told.append(("artifact", artifact.name, artifact.folder))
    def finish(self, exit_code):
        self.told += [("summary", self.summary), ("finish", exit_code)]
        runs.append(self)
class Artifact:
    def __init__(self, name, type):
        self.name = name
    def add_dir(self, folder):
        self.folder = folder
runs = []
def init(settings, **options):
    return Run(**options)
def Settings(console):
    pass
Image = str
"""
"""What the adapter uses of Weights & Biases."""


@pytest.fixture
def pretend(tmp_path, monkeypatch):
    """Return a function that makes a package wandb with a content, also for other processes."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def make(content):
        for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
            monkeypatch.delitem(sys.modules, name)
        (folder / "wandb.py").write_text(content)

    yield make
    sys.modules.pop("wandb", None)


def points(told):
    """Return the values of each name by step; each must have been sent once, by ascending step."""
    found: dict[str, dict[int, float]] = {}
    for _, step, values in (each for each in told if each[0] == "log"):
        for name, value in values.items():
            assert [*found.get(name, {-1: 0})][-1] < step, name
            found.setdefault(name, {})[step] = value
    return found


def expected(run: RunFolder):
    found: dict[str, dict[int, float]] = {}
    scalars = Scalars()
    for line in read_lines(run.metrics):
        for name, step, value in scalars.window(line):
            if math.isfinite(value):
                found.setdefault(name, {})[step] = value
    return found


def end(run, **options):
    ended = Event()
    ended.set()
    send("wandb", run, ended, **options)


def test_a_tracker_gets_the_settings_every_curve_the_figure_and_if_asked_the_model(
    tmp_path, pretend
):
    pretend(RECORDING)
    run = record(tmp_path)
    run.picture.touch()
    run.final.mkdir()
    end(run, with_model=True)
    import wandb

    ((_, options), *told) = wandb.runs[0].told
    assert options["config"]["sync.params"] == 16
    assert (options["name"], options["resume"], options["project"]) == (
        *("a-run", "allow"),
        "flower-desloc",
    )
    got = points(told)
    assert got.pop("overview") == {192: str(run.picture)}
    assert got == expected(run)
    assert got["heldout_loss/central/library"].keys() == {0, 48, 96, 144, 192}
    assert [*got["loss/client-3"]] == [*range(1, 193)]
    assert told[-3:] == [
        ("artifact", f"model-{options['id']}", str(run.final)),
        ("summary", json.loads(run.summary.read_text())),
        ("finish", 0),
    ]


def test_a_resumed_run_continues_the_same_and_sends_no_window_again(tmp_path, pretend):
    pretend(RECORDING)
    whole = record(tmp_path / "whole")
    run = RunFolder.create(tmp_path / "resumed", "a-run")
    run.write_config(whole.config.read_text())
    lines = whole.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(b"".join(lines[:8]) + b'{"round": 8, "half')  # killed: no summary
    end(run)
    run.metrics.write_bytes(b"".join(lines))
    run.write_summary({"status": "completed"})
    end(run, with_model=True)
    import wandb

    first, second = (each.told for each in wandb.runs)
    assert first[0][1]["id"] == second[0][1]["id"]
    assert (first[-1], second[-1]) == (("finish", 1), ("finish", 0))
    assert points([*first, *second]) == expected(whole)


def test_what_was_not_finite_is_a_gap():
    *_, window = windows_of()
    line = json.loads(json.dumps(to_line(window)))
    first, *others = line["clients"].values()
    first["losses"][0] = None
    line["evaluation"]["central"]["overall"]["loss"] = None
    found = {(name, step): value for name, step, value in Scalars().window(line)}
    begin = line["start"] + 1
    assert math.isnan(found["loss/client-0", begin])
    mean = sum(client["losses"][0] for client in others) / len(others)
    assert found["loss/mean", begin] == pytest.approx(mean)
    assert math.isnan(found["heldout_loss/central", 192])


def test_the_transcript_of_the_quickstart_page(tmp_path, monkeypatch, request):
    page = (ROOT / "docs" / "tutorials" / "quickstart.md").read_text()
    block = page.partition("<!-- tracker -->")[2].partition("<!-- /tracker -->")[0]
    (line,) = [line for line in block.splitlines() if "desloc run" in line]
    mode, _, *words = shlex.split(line)
    monkeypatch.setenv(*mode.split("="))
    if not (is_real := find_spec("wandb") is not None):
        request.getfixturevalue("pretend")(RECORDING)
    how = [*TINY, "run.steps=16", "simulation.num_clients=2", "--engine", "inprocess"]
    accepted(*words, *how, "--output-dir", tmp_path)
    run = RunFolder(tmp_path / "quickstart")
    assert json.loads((run.trackers / "wandb.json").read_text())["round"] == 1
    assert [*tmp_path.glob("wandb/offline-run-*")] or not is_real


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("loss/client-0", "loss/client-0"),
        ("loss/client é#", "loss/client é_"),
        ("loss//a/../b/", "loss/a/b"),
        ("loss/" + "x" * 300, "loss/" + "x" * 245),
    ],
)
def test_mlflow_gets_names_that_it_takes(name, taken):
    assert metric_name(name) == taken


# Faults


def test_a_run_whose_tracker_fails_has_one_warning_and_the_same_weights(tmp_path, pretend, caplog):
    pretend("raise RuntimeError('quota exceeded at https://me:secret@tracker/x')")
    settings = [*TINY, "run.steps=16"]
    plain = train(tmp_path / "plain", *settings)
    caplog.clear()
    tracked = train(tmp_path / "tracked", *settings, "run.trackers=[wandb]")
    assert summary(tracked)["weights_sha256"] == summary(plain)["weights_sha256"]
    (said,) = [each.getMessage() for each in caplog.records if "wandb" in each.getMessage()]
    assert said.startswith("TrackerView failed and is left out; the run is not affected")
    assert "quota exceeded at https://***@tracker/x; all it said:" in said


def test_a_tracker_that_hangs_holds_no_window_up_and_is_ended(
    tmp_path, pretend, monkeypatch, caplog
):
    began = tmp_path / "began"
    pretend(f"import pathlib, time; pathlib.Path({str(began)!r}).touch(); time.sleep(1000)")
    monkeypatch.setattr(tracker, "_PATIENCE", 0.1)
    run = RunFolder.create(tmp_path, "a-run")
    recorder = RunRecorder(a_config(), run, stream=io.StringIO())
    view = TrackerView("wandb", run, with_model=False)
    recorder._views.append(view)
    recorder.started(a_run_info())
    wait_until(began.exists)
    for window in windows_of():
        recorder.window(window)
    assert not caplog.records
    recorder.finish("completed")
    (said,) = [each.getMessage() for each in caplog.records]
    assert "wandb: it did not take everything in time; all it said:" in said
    assert view._process is not None
    assert view._process.returncode == -SIGKILL


def test_a_tracker_that_is_not_installed_is_an_error_that_names_its_extra(tmp_path, monkeypatch):
    config = a_config()
    config.run.trackers.append("mlflow")
    (tmp_path / "mlflow").mkdir()  # as a tracker makes it in the current folder
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises(ConfigError, match=r"run\.trackers=mlflow: .*'flower-desloc\[mlflow\]'"):
        require_installed(config)
    config.run.trackers.clear()
    require_installed(config)


# The real ones, in their local modes; `pip install '.[wandb,mlflow,trackio]'`


def wandb_records(path):
    """Return the records of a .wandb file: LevelDB's log format, with W&B's head of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, found, parts = path.read_bytes(), [], b""
    at = 7
    while at < len(data):
        if (left := 32768 - at % 32768) < 7:  # a head is not split between blocks
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # all of a record, or its last part
            found.append(Record.FromString(parts))
            parts = b""
    return found


def from_wandb(folder):
    """Return settings, points and the exit codes that are in the files of Weights & Biases."""
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1  # one id
    told: list[Any] = []
    codes: list[int] = []
    config: dict[str, Any] = {}
    for entry in (entry for file in files for entry in wandb_records(file)):
        kind = entry.WhichOneof("record_type")
        if kind == "run":
            config |= {item.key: json.loads(item.value_json) for item in entry.run.config.update}
        elif kind == "history":
            items = {i.key or i.nested_key[0]: json.loads(i.value_json) for i in entry.history.item}
            own = {key: value for key, value in items.items() if not key.startswith("_")}
            told.append(("log", entry.history.step.num, own))
        elif kind == "exit":
            codes.append(entry.exit.exit_code)
    found = points(told)
    assert [*found.pop("overview")] == [192]
    return config, found, codes


def rows(path, query):
    with closing(sqlite3.connect(path)) as database:
        return database.execute(query).fetchall()


def from_mlflow(folder):
    database = folder / "mlflow.db"
    ((status, artifacts),) = rows(database, "select status, artifact_uri from runs")
    assert {path.name for path in Path(artifacts).iterdir()} == {
        *("overview.png", "summary.json", "model")
    }
    config = dict(rows(database, "select key, value from params"))
    values = rows(database, "select step, key, value from metrics order by step")
    found = points([("log", step, {key: value}) for step, key, value in values])
    return config, found, [1, 0] if status == "FINISHED" else None


def from_trackio(folder):
    database = folder / "trackio" / "flower-desloc.db"
    ((config,),) = rows(database, "select config from configs")
    values = rows(database, "select step, metrics from metrics order by step, id")
    found = points([("log", step, json.loads(text)) for step, text in values])
    assert [*found.pop("overview")] == [192]
    assert len({name for (name,) in rows(database, "select run_name from metrics")}) == 1
    assert rows(database, "select count(*) from artifact_versions") == [(1,)]
    return json.loads(config), found, [1, 0]  # it keeps no status


READ = {"wandb": from_wandb, "mlflow": from_mlflow, "trackio": from_trackio}


@pytest.mark.timeout(900)  # MLflow takes a quarter of a minute, alone, to make its database
@pytest.mark.parametrize("name", TRACKERS)
def test_the_files_of_a_tracker_hold_a_run_that_was_resumed(tmp_path, name):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    run = record(tmp_path)
    Image.new("RGB", (2, 2)).save(run.picture)
    run.final.mkdir()
    (run.final / "model.safetensors").write_bytes(b"weights")
    whole, ended = run.metrics.read_bytes(), run.summary.read_text()
    command = [sys.executable, "-m", "flower_desloc.app.runs.tracker_process", name, run.path]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }
    how = {"cwd": tmp_path, "env": environment, "stdin": subprocess.DEVNULL}
    run.summary.unlink()
    run.metrics.write_bytes(b"".join(whole.splitlines(keepends=True)[:8]))
    output_of([*command, "--model"], **how)
    run.metrics.write_bytes(whole)
    run.summary.write_text(ended)
    output_of([*command, "--model"], **how)
    config, found, codes = READ[name](tmp_path)
    assert config["optimizer.name"] == "adopt"
    assert str(config["sync.exp_avg"]) == "48"
    assert found.keys() == expected(run).keys()
    for key, values in expected(run).items():
        assert found[key] == pytest.approx(values), key
    assert codes == [1, 0]
