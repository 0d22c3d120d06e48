"""Laws of the client's state file: it survives the end of the process at any moment."""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flower_desloc.flower.client_state import Held, StateFile
from flower_desloc.flower.tensor_file import DamagedFileError


class Killed(BaseException):
    """The process was killed; nothing is cleaned up."""


CALLS = [(os, "link"), (Path, "replace"), (Path, "unlink"), (Path, "mkdir")]
"""The calls that change a folder; a process can be killed between any two of them."""
_LINK = os.link


def window(step: int, checkpoint: int = -1) -> tuple[Held, dict[str, dict[str, torch.Tensor]]]:
    held = Held(
        step=step, versions={"params": 0, "exp_avg": 0}, streams=["exp_avg"], checkpoint=checkpoint
    )
    return held, {"exp_avg": {"w": torch.full((100,), float(step))}}


def value(file: StateFile) -> float:
    return float(file.read(["exp_avg"])["exp_avg"]["w"].unique())


def five_windows(folder: Path) -> StateFile:
    """Five windows, with checkpoints of the server after the second and each that follows."""
    file = StateFile(folder, "run", "client-0")
    for step in range(1, 6):
        file.write(*window(step, checkpoint=step - 1 if step > 2 else -1))
    return file


def test_a_client_asked_again_for_a_window_has_its_state_before_it(tmp_path):
    file = five_windows(tmp_path)
    assert file.held_at(5).step == value(file) == 5
    assert file.held_at(4).step == value(file) == 4
    file.write(*window(5, checkpoint=4))
    assert file.held_at(4).step == value(file) == 4
    assert file.held_at(3) is None, "it goes back by one window only"
    assert not file.path.exists()


def test_a_state_kept_for_a_checkpoint_is_not_overwritten(tmp_path):
    file = five_windows(tmp_path)
    file.held_at(4)
    file.write(*window(5, checkpoint=4))
    file.go_back(3, "another attempt")
    assert file.held().step == value(file) == 3
    assert file.held_at(2) is None, "the states before it belong to the other attempt"


@pytest.mark.parametrize("killed", [None, 1, 2])
def test_a_client_whose_file_was_deleted_does_not_go_back(killed, tmp_path, monkeypatch):
    """Deleted by hand, or by a client that found it damaged and was killed while deleting."""
    file = five_windows(tmp_path)
    if killed is None:
        file.path.unlink()
    else:
        with monkeypatch.context() as patch:
            _kill_at(killed, patch)
            with pytest.raises(Killed):
                file.delete()
        assert file.held_at(4) is None, "the file before it is deleted first"
    file.write(*window(6, checkpoint=4))
    assert file.held_at(5) is None


def test_a_client_that_joined_after_the_checkpoint_becomes_new(tmp_path):
    file = StateFile(tmp_path, "run", "client-0")
    file.write(*window(5, checkpoint=4))
    file.write(*window(6, checkpoint=5))
    file.go_back(4, "another attempt")
    assert file.held() is None


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_a_client_killed_at_any_moment_of_a_write_can_repeat_the_window(
    links, tmp_path, monkeypatch
):
    """After the kill the old or the new file is there, and so is the state before the window.

    Later windows work as if nothing had happened, and use no more disk space.
    """
    if not links:
        monkeypatch.setattr(os, "link", _refuse)
    begun = five_windows(tmp_path / "begun")
    ended = 0
    for moment in range(100):
        folder = tmp_path / str(moment)
        _copied(tmp_path / "begun", folder)
        file = StateFile(folder, "run", "client-0")
        with monkeypatch.context() as patch:
            _kill_at(moment, patch)
            try:
                file.write(*window(6, checkpoint=5))
            except Killed:
                ended += 1
            else:
                break
        assert file.held().step == value(file)
        assert value(file) in (5, 6)
        assert file.held_at(5).step == value(file) == 5
        for step in (6, 7, 8):
            file.write(*window(step, checkpoint=step - 1))
            assert file.held().step == value(file) == step
            files = {path.stat().st_ino for path in folder.rglob("*") if path.is_file()}
            assert len(files) <= (4 if links else 6)
        assert file.held_at(7).step == value(file) == 7
    assert ended >= 4
    assert begun.held().step == 5


def _refuse(*_: object) -> None:
    raise OSError("no hard links")


def _copied(folder: Path, other: Path) -> None:
    """Copy a folder, links included."""
    names: dict[int, Path] = {}
    for path in sorted(folder.rglob("*")):
        copy = other / path.relative_to(folder)
        if path.is_dir():
            copy.mkdir(parents=True)
        elif (first := names.get(path.stat().st_ino)) is not None:
            _LINK(first, copy)
        else:
            shutil.copyfile(path, copy)
            names[path.stat().st_ino] = copy


def _kill_at(moment: int, patch: pytest.MonkeyPatch) -> None:
    """Kill the process before the call with that number."""
    left = [moment]

    def fatal(call: Callable[..., object]) -> Callable[..., object]:
        def called(*args: object, **kwargs: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return call(*args, **kwargs)

        return called

    for owner, name in CALLS:
        patch.setattr(owner, name, fatal(getattr(owner, name)))


def test_a_file_with_the_checksums_of_version_0_1_is_read(tmp_path):
    about, streams = window(3)[0], {"exp_avg/w": torch.arange(4.0)}
    file = StateFile(tmp_path, "run", "client-0")
    file.path.parent.mkdir()
    metadata = {"desloc": json.dumps(asdict(about)), "checksums": json.dumps({"exp_avg": 1})}
    save_file(streams, file.path, metadata)
    assert file.held().step == 3
    assert file.read(["exp_avg"])["exp_avg"]["w"].equal(streams["exp_avg/w"])


def test_a_flipped_bit_is_detected(tmp_path):
    file = StateFile(tmp_path, "run", "client-0")
    file.write(*window(3))
    whole = file.path.read_bytes()
    for place in range(0, len(whole), 7):
        file.path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with suppress(DamagedFileError):
            assert file.held() is None or value(file) == 3
