"""What the clients of a run keep is there as long as the run can be resumed, and no longer."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import tiny
import typer

from flower_desloc.app.cli import run as run_command
from flower_desloc.app.config import load
from flower_desloc.app.runs import RunFolder
from flower_desloc.app.runs import client_files as client_files_module
from flower_desloc.app.runs.client_files import client_files, client_keys, client_memory
from flower_desloc.flower.checkpoint import Checkpoint, Checkpoints
from flower_desloc.flower.client_state import STATE_MEMORY, StateMemory
from flower_desloc.secure import identity

RUN = ["run.steps=4", "sync.params=2", "sync.exp_avg=2", "sync.exp_avg_sq=2", *tiny.TINY]


def kept(output_dir: Path) -> list[str]:
    """Return the runs whose clients' state is there."""
    return sorted(path.name.rpartition("-")[0] for path in output_dir.glob(".clients/*"))


def state(output_dir: Path, key: str) -> None:
    """Write what a client of a killed run leaves."""
    folder = output_dir / ".clients" / key / "client-0"
    folder.mkdir(parents=True)
    (folder / "step-00000002.safetensors").write_bytes(b"state")


def checkpoint(run: RunFolder, key: str) -> None:
    about: dict[str, Any] = {"run_key": key, "round": 1, "step": 2, "evaluated": 0}
    run.checkpoints.mkdir(exist_ok=True)
    Checkpoints(run.checkpoints).write(Checkpoint(**about, versions={}, averages={}))


def looked_at(output_dir: Path) -> list[str]:
    with client_files(output_dir):
        return kept(output_dir)


def test_the_state_of_a_run_that_can_be_resumed_stays(tmp_path):
    run = RunFolder.create(tmp_path, "a-run")
    state(tmp_path, "a-run-01234567")
    checkpoint(run, "a-run-01234567")
    assert looked_at(tmp_path) == ["a-run"]


def test_the_state_of_a_run_that_is_going_on_stays(tmp_path):
    run = RunFolder.create(tmp_path, "a-run")
    state(tmp_path, "a-run-01234567")
    with run.claimed():
        assert looked_at(tmp_path) == ["a-run"]


@pytest.mark.parametrize("what", ["deleted", "complete", "no checkpoint", "another run"])
def test_the_state_of_any_other_run_is_deleted(tmp_path, what):
    run = RunFolder.create(tmp_path, "a-run")
    state(tmp_path, "a-run-01234567")
    if what != "no checkpoint":
        checkpoint(run, "a-run-" + ("89abcdef" if what == "another run" else "01234567"))
    if what == "complete":
        run.write_summary({"status": "completed"})
    if what == "deleted":
        shutil.rmtree(run.path)
    assert looked_at(tmp_path) == []
    assert not (tmp_path / ".clients").exists()


SECURE = load("quickstart", "privacy.secure_aggregation=true")


def test_the_keys_of_a_killed_run_are_deleted_and_those_in_use_are_not(tmp_path):
    killed = tmp_path / ".client-keys" / "keys-of-killed"
    killed.mkdir(parents=True)
    with client_files(tmp_path) as folder, client_keys(SECURE, 3, folder) as keys:
        assert keys is not None
        assert not killed.exists()
        with client_files(tmp_path):
            assert (keys / "client-2.key").exists()
    assert not keys.exists()
    killed.mkdir()
    with client_files(tmp_path):
        assert not killed.exists()


def test_a_run_may_be_named_as_a_folder_of_keys(tmp_path):
    for name in ("keys-a", "keys"):
        run = RunFolder.create(tmp_path, name)
        state(tmp_path, f"{name}-01234567")
        checkpoint(run, f"{name}-01234567")
    with client_files(tmp_path) as folder, client_keys(SECURE, 3, folder):
        assert looked_at(tmp_path) == ["keys", "keys-a"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm")
@pytest.mark.parametrize("kind", ["keys-", "states-"])
def test_a_folder_is_not_deleted_before_it_is_locked(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(client_files_module, "_IN_MEMORY", tmp_path)
    mkdir, found = os.mkdir, []
    others: list[threading.Thread] = []

    def of_another() -> None:
        with client_files(tmp_path), client_memory(tmp_path / "others"):
            pass

    def clean_after(path: Path, *mode: int, **more: Any) -> None:
        mkdir(path, *mode, **more)
        if Path(path).name.startswith(kind) and not others:
            others.append(threading.Thread(target=of_another))
            others[0].start()
            others[0].join(0.5)
            found.append(Path(path).exists())

    monkeypatch.setattr(os, "mkdir", clean_after)
    clients = tmp_path / ".clients"
    with client_memory(clients), client_keys(SECURE, 1, clients) as keys:
        others[0].join()
        assert found == [True]
        assert keys is not None
        assert (keys / "client-0.key").exists()


def test_keys_that_cannot_be_written_are_one_line(tmp_path, monkeypatch, capsys):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(identity, "introduce", full)
    with pytest.raises(typer.Exit):
        run_command._run_simulation((), SECURE, tmp_path, "", for_states=None, verbose=False)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path}")
    assert line.endswith("cannot be written to (No space left on device)")
    assert not [*tmp_path.glob(".client-keys/keys-*")]


def test_what_no_run_has_written_is_left_alone(tmp_path):
    state(tmp_path, "mine")
    assert (tmp_path / ".clients" / "mine").exists()
    with client_files(tmp_path):
        pass
    assert (tmp_path / ".clients" / "mine").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm")
def test_what_is_in_memory_goes_with_the_command_or_with_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(client_files_module, "_IN_MEMORY", tmp_path)
    kill = "import os; os.kill(os.getpid(), 9)"
    program = f"with client_memory(Path({str(tmp_path)!r})): {kill}"
    begin = "from pathlib import Path; import flower_desloc.app.runs.client_files as files"
    place = f"files._IN_MEMORY = Path({str(tmp_path)!r}); client_memory = files.client_memory"
    subprocess.run([sys.executable, "-c", f"{begin}; {place}\n{program}"], check=False)
    (folder,) = tmp_path.glob("*/states-*")  # it was killed
    with client_memory(tmp_path / "clients") as environment:
        assert not folder.exists()
        memory = StateMemory.of_environment()
        assert memory is not None
        assert environment == {STATE_MEMORY: memory.to_text()}
        assert memory.disk == tmp_path / "clients"
        assert memory.has_room(1)
        with client_memory(tmp_path / "others"):
            assert memory.folder.exists()  # another command's
    assert STATE_MEMORY not in os.environ
    assert not list(tmp_path.glob("*/states-*"))
    with client_memory(tmp_path / "clients", limit=10):
        limited = StateMemory.of_environment()
    assert limited is not None
    assert limited.limit == 10
    with client_memory(tmp_path / "clients", limit=1 << 60):
        bounded = StateMemory.of_environment()
    assert bounded is not None
    assert bounded.limit <= shutil.disk_usage(tmp_path).total // 2


@pytest.mark.soak
def test_the_state_of_killed_runs_goes_with_them(tmp_path):
    with tiny.failing_at(2):
        tiny.train(tmp_path, *RUN, "run.name=without", "run.checkpoint_every=0")
    assert kept(tmp_path) == []
    with tiny.failing_at(2):
        tiny.train(tmp_path, *RUN, "run.name=with", "run.checkpoint_every=1")
    assert kept(tmp_path) == ["with"]
    tiny.train(tmp_path, *RUN, "run.name=other")
    assert kept(tmp_path) == ["with"]
    shutil.rmtree(tmp_path / "with")
    tiny.train(tmp_path, *RUN, "run.name=other")
    assert kept(tmp_path) == []
