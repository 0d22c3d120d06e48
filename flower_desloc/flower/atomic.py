"""Replace a file as a whole: readers see the old file or the new one, never a part."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``path``; it replaces ``path`` at the end.

    It is deleted instead when the block raises. With ``sync`` the file is on disk before it
    replaces the old one; without, it survives the end of the process but not of the machine.
    """
    # One name for each file: the next write replaces what a killed process left.
    temporary = path.with_suffix(".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        if sync:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
