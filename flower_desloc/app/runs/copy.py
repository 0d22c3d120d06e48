"""A run's folder, copied while the run goes on to where models are kept: any URL of ``fsspec``.

In object stores (``s3``, ``gs``, ``abfs``, ``hf``) a file is there whole or not at all. Elsewhere
(``file``, ``sftp``, ``smb``) a part of it may be there after a crash, which a resumed run finds by
the checkpoint's checksums. A checkpoint is copied after the record of its windows, and
``summary.json`` last: where it is, all is.
"""

import logging
import shutil
import threading
from collections.abc import Iterator
from logging import INFO
from pathlib import Path
from typing import Any

from flower_desloc.app.config import ConfigError
from flower_desloc.app.runs.folder import Line, RunFolder
from flower_desloc.app.runs.record import RunRecord
from flower_desloc.core.client_info import ClientInfo
from flower_desloc.flower.internals import log
from flower_desloc.flower.observer import RunInfo

_log = logging.getLogger(__name__)
_PATIENCE = 60.0  # seconds between two lines of a run that has ended and is still copied


def is_url(text: str) -> bool:
    """Return whether this is the URL of a folder, and not its path."""
    return "://" in text


class Remote:
    """The copy of one run's folder, at ``url``/NAME.

    Raises ``ConfigError``, naming ``setting``, when the URL's package is missing.
    """

    def __init__(self, setting: str, url: str) -> None:
        from fsspec.core import url_to_fs  # it comes with datasets, and takes a moment to import

        self.text = f"{setting}={url}"
        try:
            self.fs, self.root = url_to_fs(url.rstrip("/"))
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{self.text}: {error}") from error

    def exists(self) -> bool:
        """Return whether a run is there; raises ``ConfigError`` if it cannot be asked."""
        try:
            return bool(self.fs.exists(f"{self.root}/config.yaml"))
        except Exception as error:  # each backend has its own
            raise ConfigError(f"{self.text}: cannot be read: {error!r}") from error

    def put(self, local: Path, name: str) -> None:
        """Copy one file."""
        target = f"{self.root}/{name}"
        self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        # Within a transaction, what is written appears at its end, where the backend can do that.
        with self.fs.transaction, local.open("rb") as source, self.fs.open(target, "wb") as file:
            shutil.copyfileobj(source, file, 2**24)

    def delete(self, name: str) -> None:
        """Delete one file, if it is there."""
        if self.fs.exists(path := f"{self.root}/{name}"):
            self.fs.rm_file(path)

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in one of the run's folders."""
        path = f"{self.root}/{folder}"
        listed = self.fs.ls(path, detail=False, refresh=True) if self.fs.exists(path) else []
        return [f"{folder}/{each.rpartition('/')[2]}" for each in listed]


class CopyView:
    """View that copies the run's folder to ``url``/NAME after each window, in a thread.

    A file that cannot be copied is said, and tried again after the next window. Raises
    ``ConfigError`` where nothing can be written, and where another run is.
    """

    def __init__(self, folder: RunFolder, url: str, *, resumed: bool) -> None:
        self._folder = folder
        where = f"{url.rstrip('/')}/{folder.path.name}"
        self._remote = Remote("run.copy_to", where)
        self._copied: dict[str, tuple[int, int]] = {}
        self._wake, self._is_over, self._is_whole = threading.Event(), False, False
        if not resumed and self._remote.exists():
            raise ConfigError(
                f"{self._remote.text}: another run is there; resume it with run.resume={where}, or "
                "give this one another run.name"
            )
        try:
            self._remote.delete("summary.json")  # of the attempt that is resumed
            self._put("config.yaml")
        except Exception as error:  # each backend has its own
            raise ConfigError(f"{self._remote.text}: cannot be written: {error!r}") from error
        self._thread = threading.Thread(target=self._run, name="run.copy_to", daemon=True)
        self._thread.start()

    def started(self, run: RunInfo) -> None:
        """Do nothing: there is no window yet."""

    def joined(self, client: str, info: ClientInfo) -> None:
        """Do nothing."""

    def replay(self, line: Line) -> None:
        """Do nothing: the file is copied whole."""

    def window(self, line: Line) -> None:  # noqa: ARG002
        """Let the thread copy what is new."""
        self._wake.set()

    def finish(self, record: RunRecord) -> None:  # noqa: ARG002
        """Copy the rest, and say where the run is."""
        self._is_over = True
        self._wake.set()
        self._thread.join(_PATIENCE)
        while self._thread.is_alive():
            log(INFO, "%s: still copying; Ctrl-C leaves the copy incomplete", self._remote.text)
            self._thread.join(_PATIENCE)
        if self._is_whole:
            log(INFO, "the run is copied to %s", self._remote.text.partition("=")[2])

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._wake.wait()
            self._wake.clear()
            is_last = self._is_over
            try:
                self._copy()
                self._is_whole = is_last
            except Exception as error:  # each backend has its own
                when = "the copy is incomplete" if is_last else "tried again after the next window"
                _log.warning("%s: %r; %s", self._remote.text, error, when)

    def _copy(self) -> None:
        # Listed first: the record that is read after that has the windows of these checkpoints.
        checkpoints = sorted(self._names("checkpoints/"))
        summary = list(self._names("summary.json"))
        others = [n for n in self._names() if n not in {*checkpoints, *summary}]
        for name in (*others, *checkpoints, *summary):
            self._put(name)
        if checkpoints:
            for old in self._remote.names("checkpoints"):
                if old not in checkpoints and not (self._folder.path / old).exists():
                    self._remote.delete(old)

    def _names(self, begin: str = "") -> Iterator[str]:
        root = self._folder.path
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root).as_posix()
            is_partial = name.endswith(".partial") or (
                name.startswith(".") and not name.startswith(self._folder.best_at_checkpoint.name)
            )
            if path.is_file() and not is_partial and name.startswith(begin):
                yield name

    def _put(self, name: str) -> None:
        path = self._folder.path / name
        try:
            found = path.stat()
            stamp = found.st_size, found.st_mtime_ns
            if self._copied.get(name) != stamp:
                self._remote.put(path, name)
                self._copied[name] = stamp
        except FileNotFoundError:
            if path.exists():
                raise
            # Deleted since it was listed: an old checkpoint, or a folder that was replaced.


def fetched(url: str, output_dir: Path) -> Path:
    """Return the folder of the run at ``url`` in ``output_dir``, where it is copied to once.

    Raises ``ConfigError`` if there is no run, or it cannot be read.
    """
    name = url.rstrip("/").rpartition("/")[2]
    folder = output_dir.expanduser().resolve() / name
    if folder.exists():
        return folder
    remote = Remote("run.resume", url)
    if not remote.exists():
        raise ConfigError(f"{remote.text}: no run is there")
    partial: Any = folder.with_name(f".{name}-fetched")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for path in remote.fs.find(remote.root):
            target = partial / path.removeprefix(remote.root).lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            remote.fs.get_file(path, str(target))
        partial.rename(folder)
    except Exception as error:  # each backend has its own
        raise ConfigError(f"{remote.text}: cannot be copied to {folder}: {error!r}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
