"""Laws of the client's state file: it survives the end of the process at any moment."""

import errno
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flower_desloc.flower import tensor_file
from flower_desloc.flower.client_state import ClientState, LaterWrites, StateFiles, StateMemory
from flower_desloc.flower.tensor_file import DamagedFileError


class Killed(KeyboardInterrupt):
    """The process was killed; nothing is cleaned up."""


CALLS = [(Path, "replace"), (Path, "unlink"), (Path, "mkdir"), (Path, "rmdir")]
"""The calls that change a folder; a process can be killed between any two of them."""


def window(step: int, checkpoint: int = -1, attempt: str = "A") -> ClientState:
    return ClientState(
        step=step,
        versions={"params": 0, "exp_avg": 0},
        streams={"exp_avg": {"w": torch.full((100,), float(step))}},
        attempt=attempt,
        checkpoint=checkpoint,
    )


def state(files: StateFiles) -> ClientState:
    last = files.last()
    assert last is not None
    return last


def value(files: StateFiles) -> float:
    return float(state(files).streams["exp_avg"]["w"].unique())


def five_windows(folder: Path) -> StateFiles:
    """Five windows, with checkpoints of the server after the second and each that follows."""
    files = StateFiles(folder, "run", "client-0")
    for step in range(1, 6):
        files.write(window(step, checkpoint=step - 1 if step > 2 else -1))
    return files


def test_of_a_long_run_only_the_states_somebody_can_ask_for_are_left(tmp_path):
    """The last two, and those at the last two checkpoints, which are up to 40 steps apart."""
    files = StateFiles(tmp_path, "run", "client-0")
    checkpoints = [*range(3, 100, 7), *range(100, 300, 40)]
    for step in range(1, 300):
        past = [-1, *(at for at in checkpoints if at < step)]
        files.write(window(step, checkpoint=past[-1]))
        kept = {path.name: path for path in files.folder.iterdir()}
        wanted = {step, max(step - 1, 1), *(at for at in past[-2:] if at > 0)}
        assert kept.keys() == {f"step-{at:08d}.safetensors" for at in wanted}
    files.go_back({"A": -1, "B": checkpoints[-2]})
    assert state(files).step == value(files) == checkpoints[-2]


@pytest.mark.parametrize("killed", [None, 0, 1, 2, 3, 4])
def test_a_client_that_was_deleted_is_new(killed, tmp_path, monkeypatch):
    """If it is killed while deleting, its last state is deleted last."""
    files = five_windows(tmp_path)
    with monkeypatch.context() as patch, suppress(Killed):
        if killed is not None:
            _kill_at(killed, patch)
        files.delete()
    assert files.last() is None or state(files).step == 5
    assert killed is not None or not list(tmp_path.iterdir())


def test_a_state_is_kept_as_far_as_the_servers_history_contains_it(tmp_path):
    """Resumed from 5 by B, from 8 by C; D, which resumed from 8 as well, wrote no checkpoint."""
    history = {"A": -1, "B": 5, "C": 8}
    for attempt, last in (("A", 5), ("B", 8), ("C", 20), ("D", -1)):
        for step in range(1, 12):
            files = StateFiles(tmp_path / f"{attempt}{step}", "run", "client-0")
            files.write(window(step, attempt=attempt))
            files.go_back(history)
            assert (files.last() is not None) == (step <= last)


def test_a_file_that_cannot_be_read_now_is_not_taken_for_a_damaged_one(tmp_path, monkeypatch):
    files = five_windows(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    last = state(files)
    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "safe_open", fail)
        for call in (files.last, lambda: last.streams["exp_avg"]):
            with pytest.raises(OSError, match="Input/output error"):
                call()
    assert state(files).step == value(files) == 5


def test_a_torn_last_file_makes_the_client_new(tmp_path):
    files = five_windows(tmp_path)
    last = max(files.folder.iterdir())
    last.write_bytes(last.read_bytes()[:-1])
    assert files.last() is None
    files.go_back({"A": -1})
    assert files.last() is None


def test_a_client_killed_at_any_moment_of_a_write_can_repeat_the_window(tmp_path, monkeypatch):
    """After the kill the old or the new state is there, and so is the state before the window.

    Later windows work as if nothing had happened, and use no more disk space.
    """
    begun = five_windows(tmp_path / "begun")
    ended = 0
    for moment in range(100):
        folder = tmp_path / str(moment)
        shutil.copytree(tmp_path / "begun", folder)
        files = StateFiles(folder, "run", "client-0")
        with monkeypatch.context() as patch:
            _kill_at(moment, patch)
            try:
                files.write(window(6, checkpoint=5))
            except Killed:
                ended += 1
            else:
                break
        assert state(files).step == value(files)
        assert value(files) in (5, 6)
        at_5 = files.at(5)
        assert at_5 is not None
        assert at_5.step == value(files) == 5
        for step in (6, 7, 8):
            files.write(window(step, checkpoint=step - 1))
            assert state(files).step == value(files) == step
            assert len(list(files.folder.iterdir())) <= 4
        at_7 = files.at(7)
        assert at_7 is not None
        assert at_7.step == value(files) == 7
    assert ended >= 2
    assert state(begun).step == 5


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


def test_only_what_a_resume_looks_for_is_on_disk_while_memory_has_room(tmp_path):
    disk, here = tmp_path / "disk", tmp_path / "memory"
    here.mkdir()
    for limit, in_memory in ((1 << 20, [4, 5]), (0, [])):
        files = StateFiles(disk, "run", "client-0", StateMemory(here, disk, limit))
        for step in range(1, 6):
            files.write(window(step, checkpoint=3 if step > 3 else -1), for_resume=step == 3)
            assert state(files).step == value(files) == step
        assert steps_in(here) == in_memory
        assert steps_in(disk) == [step for step in (3, 4, 5) if step not in in_memory]
        assert files.at(4) is not None
        assert value(files) == 4
        files.delete()
        assert not list(disk.iterdir())
        assert not list(here.iterdir())


def test_the_last_states_of_a_run_are_moved_to_the_disk(tmp_path):
    """Only those: the ones before would be asked for by a server that is still there."""
    disk, here = tmp_path / "disk", tmp_path / "memory"
    here.mkdir()
    memory = StateMemory(here, disk, 1 << 20)
    for run, client in (("run", "client-0"), ("run", "client-1"), ("other", "client-0")):
        for step in (1, 2):
            StateFiles(disk, run, client, memory).write(window(step), for_resume=False)
    memory.move_to_disk("run", 2)
    assert steps_in(disk) == [2, 2]
    assert steps_in(here) == [1, 1, 1, 2]
    assert value(StateFiles(disk, "run", "client-1")) == 2


def test_a_window_that_failed_is_repeated_from_states_that_are_on_the_disk(tmp_path):
    """A client that took part in it has a later state; the server resumes before it."""
    disk, here = tmp_path / "disk", tmp_path / "memory"
    here.mkdir()
    memory = StateMemory(here, disk, 1 << 20)
    for step in (1, 2):
        StateFiles(disk, "run", "client-0", memory).write(window(step), for_resume=False)
    memory.move_to_disk("run", 1)
    assert steps_in(disk) == [1]
    assert value(StateFiles(disk, "run", "client-0")) == 1


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.stem[-8:]) for path in folder.rglob("step-*.safetensors"))


def test_a_process_killed_before_a_later_write_leaves_the_state_before(tmp_path, monkeypatch):
    later = LaterWrites()
    files = StateFiles(tmp_path, "run", "client-0", later=later)
    some_later = {"for_resume": False, "unchanged": True}
    files.write(window(1), **some_later)  # at once: this process does nothing after its reply
    later.is_on = True
    files.write(window(2), **some_later)
    assert value(files) == 1
    with monkeypatch.context() as patch, suppress(Killed):
        _kill_at(1, patch)
        later.run()
    assert value(files) == 1
    files.write(window(3), **some_later)
    later.run()
    later.settle()
    assert value(files) == 3


def test_a_later_write_that_fails_is_reported_once(tmp_path):
    later = LaterWrites()
    later.is_on = True
    (tmp_path / "run").write_text("no folder")
    files = StateFiles(tmp_path, "run", "client-0", later=later)
    files.write(window(1), for_resume=False, unchanged=True)
    later.run()
    with pytest.raises(OSError, match=r"write this client's state .*; free .* state-dir") as told:
        later.settle()
    assert str(tmp_path) not in str(told.value)
    assert str(tmp_path) in told.value.__notes__[0]
    later.settle()


def test_a_process_that_holds_a_state_does_not_read_it_unless_the_file_is_another(tmp_path):
    later = LaterWrites()
    later.is_on = True
    files = StateFiles(tmp_path, "run", "client-0", later=later)
    held = {"exp_avg": {"w": torch.zeros(1)}, "params": {"w": torch.zeros(1)}}
    for changed in (False, True):
        files.write(replace(window(1), streams=held), unchanged=True)
        if changed:
            StateFiles(tmp_path, "run", "client-0").write(window(1))
        first, second = state(files), state(files)  # the second is read: steps may have been taken
        assert (first.streams["exp_avg"] is held["exp_avg"]) != changed
        assert not any(second.streams[name] is held[name] for name in second.streams)
        assert changed or first.streams["params"] is not held["params"]  # an evaluation changes it
        assert set(first.streams) == set(second.streams)


def test_a_flipped_bit_is_detected(tmp_path):
    files = StateFiles(tmp_path, "run", "client-0")
    files.write(window(3))
    (path,) = files.folder.iterdir()
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with suppress(DamagedFileError):
            assert files.last() is None or value(files) == 3
