"""A run's folder, copied while the run goes on to where models are kept: any URL of ``fsspec``.

In object stores (``s3``, ``gs``, ``abfs``, ``hf``) a file is there whole or not at all. Elsewhere
(``file``, ``sftp``, ``smb``) a part of it may be there after a crash, which a resumed run finds by
the checkpoint's checksums. A checkpoint is copied after the record of its windows, and
``summary.json`` last: where it is, all is.
"""

import json
import logging
import re
import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import INFO
from pathlib import Path

from flower_desloc.app.config import ConfigError
from flower_desloc.app.runs.folder import Line, RunFolder
from flower_desloc.app.runs.record import RunRecord
from flower_desloc.core.client_info import ClientInfo
from flower_desloc.flower.checkpoint import Checkpoints
from flower_desloc.flower.internals import log
from flower_desloc.flower.observer import RunInfo

_log = logging.getLogger(__name__)
_CHECKPOINTS, _MARK = "checkpoints", "copy.json"
_PATIENCE = 60.0  # seconds between two lines of a run that has ended and is still copied


def is_url(text: str) -> bool:
    """Return whether this is the URL of a folder, and not its path."""
    return "://" in text


class Remote:
    """The copy of one run's folder, at ``url``/NAME.

    Raises ``ConfigError``, naming ``setting``, when the URL's package is missing, or when the URL
    has a password, which would be in the run's files.
    """

    def __init__(self, setting: str, url: str) -> None:
        from fsspec.core import url_to_fs  # it comes with datasets, and takes a moment to import

        self.text = f"{setting}={url}"
        if re.search("//[^/@]*:[^/@]*@", url):
            raise ConfigError(
                f"{setting}: no password in the URL, which is written into the run's files; the "
                "package of its storage reads it from the environment, fsspec from ~/.config/fsspec"
            )
        try:
            self.fs, self.root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{self.text}: {error}") from error

    @contextmanager
    def asked(self, what: str) -> Iterator[None]:
        """Raise ``ConfigError`` for whatever error its backend raises in the block."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{self.text}: cannot be {what}: {error!r}") from error

    def exists(self) -> bool:
        """Return whether a run is there."""
        return bool(self.fs.exists(f"{self.root}/config.yaml"))

    def mark(self) -> Mapping[str, str]:
        """Return which run this is the copy of, and which start of its server writes it."""
        path = f"{self.root}/{_MARK}"
        return _mark(self.fs.cat_file(path)) if self.fs.exists(path) else {}

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

    def checkpoints(self) -> list[str]:
        """Return the names of the checkpoints, oldest first."""
        path = f"{self.root}/{_CHECKPOINTS}"
        self.fs.invalidate_cache(path)  # not each backend's ``ls`` has an option for it
        listed = self.fs.ls(path, detail=False) if self.fs.exists(path) else []
        return sorted(f"{_CHECKPOINTS}/{each.rpartition('/')[2]}" for each in listed)


class CopyView:
    """View that copies the run's folder to ``url``/NAME after each window, in a thread.

    A file that cannot be copied is said, and tried again after the next window. ``copy.json``, in
    the folder and its copy, says which run it is and which start of its server writes it: one that
    another server has resumed is left to that server. Raises ``ConfigError`` where nothing can be
    written, where another run is, and where the copy has got further than the folder.
    """

    def __init__(self, folder: RunFolder, url: str) -> None:
        self._folder = folder
        where = f"{url}{folder.path.name}" if url.endswith("/") else f"{url}/{folder.path.name}"
        self._remote = Remote("run.copy_to", where)
        self._copied: dict[str, tuple[int, int]] = {}
        self._wake, self._is_over, self._is_whole = threading.Event(), False, False
        with self._remote.asked("read"):
            self._require_ours(where)
        known = _local_mark(folder.path)
        self._mark = {
            "run": known.get("run", secrets.token_hex(8)),
            "attempt": secrets.token_hex(8),
        }
        (folder.path / _MARK).write_text(json.dumps(self._mark) + "\n", encoding="utf-8")
        with self._remote.asked("written"):
            self._put(_MARK)  # first: from here on no other server writes
            self._remote.delete("summary.json")  # of the attempt that is resumed
            self._put("config.yaml")
        self._thread = threading.Thread(target=self._run, name="run.copy_to", daemon=True)
        self._thread.start()

    def _require_ours(self, where: str) -> None:
        remote = self._remote
        known, there = _local_mark(self._folder.path), remote.mark()
        if remote.exists() and (not known or known.get("run") != there.get("run")):
            raise ConfigError(
                f"{remote.text}: another run is there; resume it with run.resume={where}, or give "
                "this one another run.name"
            )
        if _is_behind(self._folder.path, remote):
            raise ConfigError(
                f"{remote.text}: the copy has got further than {self._folder.path}; delete that "
                f"folder, and resume with run.resume={where}"
            )

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
                if self._remote.mark() != self._mark:
                    _log.warning("%s: another server writes it now", self._remote.text)
                    return
                self._copy()
                self._is_whole = is_last
            except Exception as error:  # each backend has its own
                when = "the copy is incomplete" if is_last else "tried again after the next window"
                _log.warning("%s: %r; %s", self._remote.text, error, when)

    def _copy(self) -> None:
        # Listed first: the record that is read after that has the windows of these checkpoints.
        checkpoints = sorted(self._names(f"{_CHECKPOINTS}/"), reverse=True)
        summary = list(self._names("summary.json"))
        others = [n for n in self._names() if n not in {*checkpoints, *summary}]
        for name in (*others, *checkpoints, *summary):
            self._put(name)
        there = self._remote.checkpoints()
        # A newer one is there before the last one goes: those that were listed may be gone.
        kept = max((name for name in there if name in self._copied), default="")
        for name in there:
            if kept and name != kept and not (self._folder.path / name).exists():
                self._remote.delete(name)

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

    Raises ``ConfigError`` if there is no run, if it cannot be read, or if the folder is of another
    run or has got less far.
    """
    url = url.rstrip("/")
    name = url.rpartition("/")[2]
    folder = output_dir.expanduser().resolve() / name
    remote = Remote("run.resume", url)
    with remote.asked("read"):
        if not remote.exists():
            raise ConfigError(f"{remote.text}: no run is there")
        if folder.exists():
            known = _local_mark(folder)
            if not known or known.get("run") != remote.mark().get("run"):
                raise ConfigError(
                    f"{remote.text}: {folder} is another run; give another --output-dir"
                )
            if _is_behind(folder, remote):
                raise ConfigError(
                    f"{remote.text}: has got further than {folder}; delete that folder"
                )
            return folder
    partial = folder.with_name(f".{name}-fetched")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with remote.asked(f"copied to {folder}"):
            for path in remote.fs.find(remote.root):
                target = partial / path.removeprefix(remote.root).lstrip("/")
                if not target.resolve().is_relative_to(partial.resolve()):
                    raise ConfigError(f"{remote.text}: has a file outside of it, {path}")
                target.parent.mkdir(parents=True, exist_ok=True)
                remote.fs.get_file(path, str(target))
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _local_mark(folder: Path) -> Mapping[str, str]:
    """Return what ``copy.json`` in a run's folder says; nothing without one."""
    path = folder / _MARK
    return _mark(path.read_bytes()) if path.is_file() else {}


def _mark(data: bytes) -> Mapping[str, str]:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_behind(folder: Path, remote: Remote) -> bool:
    """Return whether the copy has a checkpoint of a later step than the folder."""
    ours = Checkpoints(folder / _CHECKPOINTS).all()
    theirs = remote.checkpoints()
    return bool(theirs) and (not ours or f"{_CHECKPOINTS}/{ours[-1].name}" < theirs[-1])
