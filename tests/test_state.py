"""A client's file: whatever ends the process, the file or the one before it is there, whole."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flower_desloc.flower.client_state import Held, StateFile


class Killed(BaseException):
    """The process is no more; nothing is tidied up."""


CALLS = [(os, "link"), (Path, "replace"), (Path, "unlink"), (Path, "mkdir")]
"""What changes a folder; nothing else of a file's life may be half done."""
_LINK = os.link


def window(step: int, checkpoint: int = -1) -> tuple[Held, dict[str, dict[str, torch.Tensor]]]:
    held = Held(
        step=step, versions={"params": 0, "exp_avg": 0}, streams=["exp_avg"], checkpoint=checkpoint
    )
    return held, {"exp_avg": {"w": torch.full((100,), float(step))}}


def value(file: StateFile) -> float:
    return float(file.read(["exp_avg"])["exp_avg"]["w"].unique())


def lives(folder: Path) -> StateFile:
    """Five windows, with checkpoints of the server after the second and each that follows."""
    file = StateFile(folder, "run", "client-0")
    for step in range(1, 6):
        file.write(*window(step, checkpoint=step - 1 if step > 2 else -1))
    return file


def test_a_client_asked_once_more_has_what_it_had_before_the_window(tmp_path):
    file = lives(tmp_path)
    assert file.held_at(5).step == value(file) == 5
    assert file.held_at(4).step == value(file) == 4
    file.write(*window(5, checkpoint=4))
    assert file.held_at(4).step == value(file) == 4
    assert file.held_at(3) is None, "it never goes back by two"
    assert not file.path.exists()


def test_what_is_kept_for_a_checkpoint_is_not_written_over(tmp_path):
    file = lives(tmp_path)
    file.held_at(4)
    file.write(*window(5, checkpoint=4))
    file.go_back(3, "another attempt")
    assert file.held().step == value(file) == 3
    assert file.held_at(2) is None, "what was before it is of another course"


@pytest.mark.parametrize("killed", [None, 1, 2])
def test_a_file_that_is_gone_is_not_come_back_to(killed, tmp_path, monkeypatch):
    """Deleted by hand, or by a client that found it damaged and was killed on the way."""
    file = lives(tmp_path)
    if killed is None:
        file.path.unlink()
    else:
        with monkeypatch.context() as patch:
            _kill_at(killed, patch)
            with pytest.raises(Killed):
                file.delete()
        assert file.held_at(4) is None, "the way back goes first"
    file.write(*window(6, checkpoint=4))
    assert file.held_at(5) is None


def test_who_was_not_there_at_a_checkpoint_goes_back_to_nothing(tmp_path):
    file = StateFile(tmp_path, "run", "client-0")
    file.write(*window(5, checkpoint=4))
    file.write(*window(6, checkpoint=5))
    file.go_back(4, "another attempt")
    assert file.held() is None


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_killed_at_any_moment_of_a_write_a_client_can_take_the_window_again(
    links, tmp_path, monkeypatch
):
    """At every call that changes the folder: the old file or the new, and the way back to the old.

    What follows is as if nothing had been, and takes no more room.
    """
    if not links:
        monkeypatch.setattr(os, "link", _refuse)
    begun = lives(tmp_path / "begun")
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
    raise OSError("this file system has no links")


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
    """Let the process die at the so manieth call, before it is carried out."""
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
