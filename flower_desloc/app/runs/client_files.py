"""The folder in which the clients that `desloc` starts keep their state."""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
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
_LONGEST_WAIT: Final = 60.0  # seconds for another process that makes or deletes such a folder
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

    def clean() -> None:
        _delete_unused(folder)
        if (keys := _keys_folder(folder)).is_dir():
            with suppress(ConfigError), _alone(keys):
                _delete_unowned(keys, _KEYS)

    clean()
    try:
        yield folder
    finally:
        clean()
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
    with ExitStack() as stack:
        folder = None
        if possible and sys.platform == "linux":
            with suppress(ConfigError, OSError):
                folder = stack.enter_context(_own(private_folder(_IN_MEMORY), _STATES))
        if folder is None:
            yield {}
            return
        size = memory()[1] // 4 if limit is None else limit
        size = min(size, shutil.disk_usage(folder).free // 2)  # Ray's objects are there too
        environment = {STATE_MEMORY: StateMemory(folder, disk, size).to_text()}
        stack.callback(os.environ.pop, STATE_MEMORY, None)
        os.environ.update(environment)
        yield environment


@contextmanager
def client_keys(config: Config, number: int, folder: Path) -> Iterator[Path | None]:
    """Yield a folder with new keys of clients on this machine, for secure sums.

    None if ``config`` has no secure aggregation. It is beside ``folder``, which is
    ``clients_folder``, and is deleted after the block, or if this process is killed, by the next
    run in the same output folder.

    Raises ``ConfigError`` if it cannot be written.
    """
    if not config.privacy.secure_aggregation:
        yield None
        return
    from flower_desloc.secure.identity import introduce  # few runs need it

    with _own(_keys_folder(folder), _KEYS) as keys:
        with _writing(keys):
            introduce(keys, [f"client-{index}" for index in range(number)])
        yield keys


def _keys_folder(clients: Path) -> Path:
    """Return the folder of all keys. It stays when it is empty, since processes wait at its lock.

    Not ``clients``, where the name of a run decides what a folder is called.
    """
    return clients.with_name(".client-keys")


@contextmanager
def _own(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a new folder in ``parent``, which no other process deletes before the block ends.

    Raises ``ConfigError`` if there can be none.
    """
    with ExitStack() as stack:
        with _alone(parent), _writing(parent):  # a folder without its lock is deleted
            _delete_unowned(parent, prefix)
            folder = Path(mkdtemp(prefix=prefix, dir=parent))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.enter_context(locked(folder, f"{folder} is in use"))
        yield folder


def _alone(parent: Path) -> AbstractContextManager[None]:
    """Wait until no other process makes or deletes folders in ``parent``."""
    return locked(parent, f"{parent} is in use", _LONGEST_WAIT)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written to ({error.strerror})") from error


def _delete_unowned(parent: Path, prefix: str) -> None:
    """Delete the folders of killed processes, which hold no lock any more; call it ``_alone``."""
    for folder in parent.glob(f"{prefix}*"):
        with suppress(ConfigError), locked(folder, f"{folder} is in use"):
            shutil.rmtree(folder, ignore_errors=True)


def _delete_unused(folder: Path) -> None:
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
