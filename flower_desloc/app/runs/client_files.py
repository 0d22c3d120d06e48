"""The folder in which the clients that `desloc` starts keep their state."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from flower_desloc.app.config import Config, ConfigError
from flower_desloc.app.runs.folder import RunFolder
from flower_desloc.app.runs.resume import completed
from flower_desloc.flower import tensor_file
from flower_desloc.flower.checkpoint import Checkpoints

_RUN_KEY = re.compile(r"(?P<folder>.+)-[0-9a-f]{8}")  # as the ServerApp makes it


def clients_folder(output_dir: Path) -> Path:
    """Return the folder in which the clients of the runs in ``output_dir`` keep their state."""
    return output_dir.expanduser().resolve() / ".clients"


@contextmanager
def client_files(output_dir: Path) -> Iterator[Path]:
    """Yield ``clients_folder``; delete before and after the block what no run can use any more.

    A run that completes deletes the state of its clients; one that is killed cannot. It stays as
    long as that run can be resumed.
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
def client_keys(config: Config, number: int, folder: Path) -> Iterator[Path | None]:
    """Yield a folder in ``folder`` with new keys of clients on this machine, for secure sums.

    None if ``config`` has no secure aggregation. It is deleted after the block.
    """
    if not config.privacy.secure_aggregation:
        yield None
        return
    from flower_desloc.secure.identity import introduce  # few runs need it

    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="keys-", dir=folder) as keys:
        introduce(Path(keys), [f"client-{index}" for index in range(number)])
        yield Path(keys)


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
    return key in [about["run_key"] for about in found if about]
