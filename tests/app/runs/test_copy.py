"""A run's folder elsewhere: whole, kept up to date, and resumed from."""

import shutil
from contextlib import nullcontext
from pathlib import Path

import fsspec
import pytest
from tiny import TINY, failing_at, summary, train

from flower_desloc.app.config import ConfigError
from flower_desloc.app.engines import in_process
from flower_desloc.app.runs import copy

URL = "memory://bucket/models"
SHORT = (*TINY, "run.steps=6", "run.eval_every=6", "sync.params=2", "run.name=a")
COPIED = (f"run.copy_to={URL}",)


@pytest.fixture
def store():
    """Return an empty object store."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    return fs


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def copied(store) -> dict[str, bytes]:
    root = "/bucket/models/a/"
    return {path.removeprefix(root): store.cat_file(path) for path in store.find(root)}


def test_the_copy_of_a_run_is_its_folder(store, tmp_path):
    folder = train(tmp_path, *SHORT, *COPIED)
    assert copied(store) == files(folder)
    assert {"summary.json", "metrics.jsonl", "final/model.safetensors"} <= copied(store).keys()
    assert len([name for name in copied(store) if name.startswith("checkpoints/")]) == 2


def test_a_run_goes_on_from_its_copy_and_ends_with_the_same_weights(store, tmp_path, monkeypatch):
    """The clients are like sites: their states are not where the server's folder was lost."""
    monkeypatch.setattr(in_process, "client_files", lambda _: nullcontext(tmp_path / "sites"))
    whole = summary(train(tmp_path / "whole", *SHORT))["weights_sha256"]
    with failing_at(3):
        train(tmp_path / "cut", *SHORT, *COPIED)
    before = copied(store)
    assert "checkpoints/step-00000004.safetensors" in before
    shutil.rmtree(tmp_path / "cut")
    folder = train(tmp_path / "new", *SHORT, *COPIED, f"run.resume={URL}/a")
    assert summary(folder)["weights_sha256"] == whole
    assert copied(store) == files(folder)


def test_what_cannot_be_copied_now_is_copied_later(store, tmp_path, monkeypatch, caplog):
    put, failures = copy.Remote.put, iter(range(3))

    def fails_thrice(self: copy.Remote, local: Path, name: str) -> None:
        if name != "config.yaml" and next(failures, None) is not None:
            raise OSError("no route to host")
        put(self, local, name)

    monkeypatch.setattr(copy.Remote, "put", fails_thrice)
    folder = train(tmp_path, *SHORT, *COPIED)
    assert "tried again after the next window" in caplog.text
    assert copied(store) == files(folder)


def test_a_run_ends_as_ever_where_nothing_can_be_copied(store, tmp_path, monkeypatch, caplog):
    def fails(self: copy.Remote, local: Path, name: str) -> None:
        if name != "config.yaml":
            raise OSError("no route to host")

    monkeypatch.setattr(copy.Remote, "put", fails)
    assert summary(train(tmp_path, *SHORT, *COPIED))["status"] == "completed"
    assert (
        f"run.copy_to={URL}/a: OSError('no route to host'); the copy is incomplete" in caplog.text
    )


def test_another_run_is_not_written_over(store, tmp_path):
    train(tmp_path / "one", *SHORT, *COPIED)
    before = copied(store)
    with pytest.raises(ConfigError, match=r"another run is there; resume it with run.resume=mem"):
        train(tmp_path / "two", *SHORT, *COPIED)
    assert copied(store) == before


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (("run.copy_to=nowhere://models",), "run.copy_to=nowhere://models/a: Protocol not known"),
        ((f"run.resume={URL}/b",), f"run.resume={URL}/b: no run is there"),
    ],
)
def test_a_url_that_does_not_serve_is_refused_before_anything_is_trained(
    store, tmp_path, setting, says
):
    with pytest.raises(ConfigError, match=says):
        train(tmp_path, *SHORT, *setting)


def test_it_is_the_same_in_s3(tmp_path, monkeypatch):
    """With a server of S3's protocol on this machine."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    monkeypatch.setattr(in_process, "client_files", lambda _: nullcontext(tmp_path / "sites"))
    try:
        fs = fsspec.filesystem("s3", skip_instance_cache=True)
        fs.mkdir("models")
        whole = summary(train(tmp_path / "whole", *SHORT))["weights_sha256"]
        with failing_at(3):
            train(tmp_path / "cut", *SHORT, "run.copy_to=s3://models/runs")
        resumed = (*SHORT, "run.copy_to=s3://models/runs", "run.resume=s3://models/runs/a")
        folder = train(tmp_path / "new", *resumed)
        fs.invalidate_cache()
        there = {path.removeprefix("models/runs/a/") for path in fs.find("models/runs/a")}
        assert there == files(folder).keys()
    finally:
        server.stop()
    assert summary(folder)["weights_sha256"] == whole
