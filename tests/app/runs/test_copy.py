"""A run's folder elsewhere: whole, kept up to date, and resumed from."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

import fsspec
import pytest
from tiny import TINY, failing_at, summary, train

from flower_desloc.app.config import ConfigError
from flower_desloc.app.engines import in_process
from flower_desloc.app.runs import RunFolder, copy
from flower_desloc.app.runs.roster import Roster

URL = "memory://bucket/models"
SHORT = (*TINY, "run.steps=6", "run.eval_every=6", "sync.params=2", "run.name=a")
COPIED = (f"run.copy_to={URL}",)
AT_THE_START = ("config.yaml", "copy.json")
"""What is copied before a run begins, or it does not."""


@pytest.fixture
def store(monkeypatch):
    """Return an empty object store, whose ``ls`` has no more options than sftp's."""
    fs = fsspec.filesystem("memory")
    listed = type(fs).ls
    monkeypatch.setattr(type(fs), "ls", lambda self, path, detail=True: listed(self, path, detail))
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


def test_the_copy_of_a_run_is_its_folder(store, tmp_path, caplog):
    folder = train(tmp_path, *SHORT, *COPIED, "run.eval_every=2", "run.keep_best=loss")
    assert "run.copy_to" not in caplog.text
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

    def fails_thrice(self: copy.Remote, source: BinaryIO, name: str) -> None:
        if name not in AT_THE_START and next(failures, None) is not None:
            raise OSError("no route to host")
        put(self, source, name)

    monkeypatch.setattr(copy.Remote, "put", fails_thrice)
    folder = train(tmp_path, *SHORT, *COPIED)
    assert "tried again after the next window" in caplog.text
    assert copied(store) == files(folder)


def test_a_run_ends_as_ever_where_nothing_can_be_copied(store, tmp_path, monkeypatch, caplog):
    put = copy.Remote.put

    def fails(self: copy.Remote, source: BinaryIO, name: str) -> None:
        if name not in AT_THE_START:
            raise OSError("no route to host")
        put(self, source, name)

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


def test_a_copy_without_a_checkpoint_is_no_run_to_resume(store, tmp_path):
    with failing_at(0):
        train(tmp_path / "one", *SHORT, *COPIED)
    store.pipe_file("/bucket/models/a/best/model.safetensors", b"its own")
    with pytest.raises(ConfigError, match=r"its model would be lost: give this one another"):
        train(tmp_path / "two", *SHORT, *COPIED, "run.resume=auto")
    store.rm("/bucket/models/a/best", recursive=True)
    store.pipe_file("/bucket/models/a/left.json", b"its own")
    with pytest.raises(ConfigError, match=r"has no checkpoint: replace it with run.resume=auto"):
        train(tmp_path / "two", *SHORT, *COPIED)
    with pytest.raises(ConfigError, match=r"has no checkpoint; run.resume=auto begins it anew"):
        train(tmp_path / "two", *SHORT, *COPIED, f"run.resume={URL}/a")
    folder = train(tmp_path / "two", *SHORT, *COPIED, "run.resume=auto", "run.checkpoint_every=0")
    assert folder == tmp_path / "two" / "a"
    assert copied(store) == files(folder)
    with pytest.raises(ConfigError, match=r"its model would be lost: give this one another"):
        train(tmp_path / "three", *SHORT, *COPIED, "run.resume=auto")
    with pytest.raises(ConfigError, match=r"the run there has no checkpoint$"):
        train(tmp_path / "three", *SHORT, *COPIED, f"run.resume={URL}/a")
    assert copied(store) == files(folder)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (("run.copy_to=ftp://me:secret@host/runs",), "run.copy_to: no password in the URL"),
        (("run.copy_to=nowhere://models",), "run.copy_to=nowhere://models/a: Protocol not known"),
        ((f"run.resume={URL}/b",), f"run.resume={URL}/b: no run is there"),
    ],
)
def test_a_url_that_does_not_serve_is_refused_before_anything_is_trained(
    store, tmp_path, setting, says
):
    with pytest.raises(ConfigError, match=says):
        train(tmp_path, *SHORT, *setting)
    assert not any(tmp_path.rglob("config.yaml"))


def test_a_run_that_is_refused_leaves_its_name_and_its_members(store, tmp_path):
    members = RunFolder(tmp_path / "a").members
    members.parent.mkdir()
    Roster(members).set("client-0", "invited")
    for _ in range(2):
        with pytest.raises(ConfigError, match="Protocol not known"):
            train(tmp_path, *SHORT, "run.copy_to=nowhere://models")
        assert [*tmp_path.rglob("*")] == [members.parent, members]


def test_a_run_that_is_resumed_does_not_write_over_another(store, tmp_path):
    train(tmp_path / "one", *SHORT, *COPIED)
    before = copied(store)
    with failing_at(3):
        train(tmp_path / "two", *SHORT)
    with pytest.raises(ConfigError, match="another run is there"):
        train(tmp_path / "two", *SHORT, *COPIED, "run.resume=auto")
    assert copied(store) == before


def test_a_folder_that_is_older_than_the_copy_is_not_resumed(store, tmp_path):
    with failing_at(2):
        train(tmp_path / "one", *SHORT, *COPIED)
    shutil.copytree(tmp_path / "one", tmp_path / "two")  # another machine, which fetched it
    with failing_at(3):
        train(tmp_path / "one", *SHORT, *COPIED, "run.resume=auto")
    before = copied(store)
    with pytest.raises(ConfigError, match=r"has got further than .*two/a; delete that folder"):
        train(tmp_path / "two", *SHORT, *COPIED, f"run.resume={URL}/a")
    with pytest.raises(ConfigError, match="the copy has got further than"):
        train(tmp_path / "two", *SHORT, *COPIED, "run.resume=auto")
    assert copied(store) == before


def test_a_server_whose_run_another_has_resumed_copies_no_more(store, tmp_path, caplog):
    window = copy.CopyView.window

    def resumed_elsewhere(self: copy.CopyView, line: dict[str, object]) -> None:
        if line["step"] == 2:
            store.pipe_file("/bucket/models/a/copy.json", b'{"run": "r", "attempt": "other"}')
        window(self, line)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy.CopyView, "window", resumed_elsewhere)
        train(tmp_path, *SHORT, *COPIED)
    assert "another server writes it now" in caplog.text
    assert "summary.json" not in copied(store)


def test_checkpoints_that_go_while_others_are_copied_cost_no_checkpoint(store, tmp_path):
    folder = train(tmp_path, *SHORT)
    view = copy.CopyView(RunFolder(folder), URL)
    checkpoints = sorted((folder / "checkpoints").iterdir())
    view._copy()
    there = [name for name in copied(store) if name.startswith("checkpoints/")]
    assert len(there) == 2
    put = view._remote.put

    def late(source: BinaryIO, name: str) -> None:
        if name == "metrics.jsonl":  # two windows end meanwhile
            for number, path in enumerate(checkpoints):
                path.rename(path.with_name(f"step-0000000{8 + number}.safetensors"))
        put(source, name)

    view._remote.put = late  # type: ignore[method-assign]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("")
    (folder / "metrics.jsonl").touch()
    view._copy()
    assert [name for name in copied(store) if name.startswith("checkpoints/")]
    view._copy()
    there = sorted(name for name in copied(store) if name.startswith("checkpoints/"))
    assert [name[-13] for name in there] == ["8", "9"]
    view.finish(None)  # type: ignore[arg-type]


def test_what_is_fetched_stays_in_its_folder(store, tmp_path, monkeypatch):
    train(tmp_path / "one", *SHORT, *COPIED)
    find = type(store).find

    def with_a_stray(self: object, path: str, **how: object) -> list[str]:
        return [*find(self, path, **how), f"{path}/../../../stray"]

    monkeypatch.setattr(type(store), "find", with_a_stray)
    with pytest.raises(ConfigError, match="has a file outside of it"):
        train(tmp_path / "two", *SHORT, f"run.resume={URL}/a")
    assert not (tmp_path / "two" / "a").exists()


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
        short = (*SHORT, "run.eval_every=2", "run.keep_best=loss")
        whole = summary(train(tmp_path / "whole", *short))["weights_sha256"]
        short += ("run.copy_to=s3://models/runs",)
        with failing_at(0):
            train(tmp_path / "lost", *short)
        with failing_at(3):
            train(tmp_path / "cut", *short, "run.resume=auto")
        folder = train(tmp_path / "new", *short, "run.resume=s3://models/runs/a")
        fs.invalidate_cache()
        there = {path.removeprefix("models/runs/a/") for path in fs.find("models/runs/a")}
        assert there == files(folder).keys()
    finally:
        server.stop()
    assert summary(folder)["weights_sha256"] == whole
