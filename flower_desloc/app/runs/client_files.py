"""The folder in which the clients that `desloc` starts keep their state."""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Final

from flower_desloc.app.config import Config, ConfigError
from flower_desloc.app.runs.folder import RunFolder, locked
from flower_desloc.app.runs.resume import completed
from flower_desloc.app.setup.machine import memory
from flower_desloc.flower import tensor_file
from flower_desloc.flower.checkpoint import Checkpoints
from flower_desloc.flower.client_state import STATE_MEMORY, StateMemory
from flower_desloc.flower.system import private_folder

_IN_MEMORY: Final = Path("/dev/shm")  # noqa: S108
_STATES: Final = "states-"
_KEYS: Final = "keys-"
_RUN_KEY = re.compile(r"(?P<folder>.+)-[0-9a-f]{8}")  # as the ServerApp makes it


def clients_folder(output_dir: Path) -> Path:
    """Return the folder in which the clients of the runs in ``output_dir`` keep their state."""
    return output_dir.expanduser().resolve() / ".clients"


@contextmanager
def client_files(output_dir: Path) -> Iterator[Path]:
    """Yield ``clients_folder``; delete before and after the block what no run can use any more.

    A run that completes deletes the state and keys of its clients; one that is killed cannot. The
    state stays as long as that run can be resumed.
    """
    folder = clients_folder(output_dir)
    _delete_unused(folder)
    try:
        yield folder
    finally:
        _delete_unused(folder)
        with suppress(OSError):  # there is none, or it is not empty
            folder.rmdir()


@contextmanager
def client_memory(
    disk: Path, *, possible: bool = True, limit: int | None = None
) -> Iterator[Mapping[str, str]]:
    """Yield the environment of clients that keep in memory what no resume looks for.

    It is set in this process as well. Empty where there is no file system in memory, and if it is
    not ``possible``, as on a cluster: clients move between its machines. What the clients keep
    there is deleted after the block, or if this process is killed, by the next run; it may take
    ``limit`` bytes, by default a quarter of the memory that is free now, and no more than half of
    that file system's. ``disk`` is ``clients_folder``.
    """
    folder = _folder_in_memory() if possible else None
    if folder is None:
        yield {}
        return
    size = memory()[1] // 4 if limit is None else limit
    size = min(size, shutil.disk_usage(folder).free // 2)  # Ray's objects are there too
    environment = {STATE_MEMORY: StateMemory(folder, disk, size).to_text()}
    try:
        with locked(folder, f"{folder} is in use"):
            os.environ.update(environment)
            yield environment
    finally:
        os.environ.pop(STATE_MEMORY, None)
        shutil.rmtree(folder, ignore_errors=True)


def _folder_in_memory() -> Path | None:
    """Make a folder in memory, where that is possible."""
    if sys.platform != "linux":
        return None
    try:
        parent = private_folder(_IN_MEMORY)
        _delete_unowned(parent, _STATES)
        return Path(mkdtemp(prefix=_STATES, dir=parent))
    except OSError:
        return None


def _delete_unowned(parent: Path, prefix: str) -> None:
    """Delete the folders of killed processes, which hold no lock any more."""
    for folder in parent.glob(f"{prefix}*"):
        with suppress(ConfigError), locked(folder, f"{folder} is in use"):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def client_keys(config: Config, number: int, folder: Path) -> Iterator[Path | None]:
    """Yield a folder in ``folder`` with new keys of clients on this machine, for secure sums.

    None if ``config`` has no secure aggregation. It is deleted after the block, or if this process
    is killed, by the next run in the same output folder.
    """
    if not config.privacy.secure_aggregation:
        yield None
        return
    from flower_desloc.secure.identity import introduce  # few runs need it

    folder.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory(prefix=_KEYS, dir=folder, ignore_cleanup_errors=True) as keys,
        locked(Path(keys), f"{keys} is in use"),
    ):
        introduce(Path(keys), [f"client-{index}" for index in range(number)])
        yield Path(keys)


def _delete_unused(folder: Path) -> None:
    _delete_unowned(folder, _KEYS)
    for state in folder.glob("*"):
        key = _RUN_KEY.fullmatch(state.name)
        if key is None or _can_resume(run := RunFolder(folder.parent / key["folder"]), state.name):
            continue
        if not run.path.is_dir():
            shutil.rmtree(state, ignore_errors=True)
            continue
        with suppress(ConfigError), run.claimed():  # otherwise it is still going on
            shutil.rmtree(state, ignore_errors=True)


def _can_resume(run: RunFolder, key: str) -> bool:
    """Return whether the run, or a later one in the same folder, resumes with these files."""
    if completed(run):
        return False
    try:
        found = [tensor_file.metadata(file) for file in Checkpoints(run.checkpoints).all()]
    except OSError:  # it cannot be read now
        return True
    return key in [metadata["run_key"] for metadata in found if metadata]
