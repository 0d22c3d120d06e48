"""A run's folder, copied while the run goes on to where models are kept: any URL of ``fsspec``.

In object stores (``s3``, ``gs``, ``abfs``, ``hf``) a file is there whole or not at all. Elsewhere
(``file``, ``sftp``, ``smb``) a part of it may be there after a crash, which a resumed run finds by
the checkpoint's checksums. A checkpoint is copied after the record of its windows and the best
model up to it, and ``summary.json`` last: where it is, all is.

The run goes on meanwhile, and replaces and moves what it keeps. So each pass opens its checkpoints
and best models first, as they are at one moment, and copies from the open files.
"""

import json
import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from logging import INFO
from pathlib import Path
from typing import Any, BinaryIO

from flower_desloc.app.config import ConfigError
from flower_desloc.app.runs.best import ABOUT, best_up_to
from flower_desloc.app.runs.folder import Line, RunFolder
from flower_desloc.app.runs.record import RunRecord
from flower_desloc.core.client_info import ClientInfo
from flower_desloc.flower.checkpoint import Checkpoints
from flower_desloc.flower.internals import log
from flower_desloc.flower.observer import RunInfo

_log = logging.getLogger(__name__)
_CHECKPOINTS, _MARK = "checkpoints", "copy.json"
_PARTIAL = ".partial"
_Stamp = tuple[int, int, int]
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

    def has(self, name: str) -> bool:
        """Return whether a file or a folder is there."""
        return bool(self.fs.exists(f"{self.root}/{name}"))

    def exists(self) -> bool:
        """Return whether a run is there."""
        return self.has("config.yaml")

    def names(self) -> Iterator[str]:
        """Yield the names of all files."""
        self.fs.invalidate_cache()
        for path in self.fs.find(self.root):
            yield path.removeprefix(self.root).lstrip("/")

    def mark(self) -> Mapping[str, Any]:
        """Return which run this is the copy of, and which start of its server writes it."""
        return self.json(_MARK)

    def json(self, name: str) -> Mapping[str, Any]:
        """Return the content of a small file; nothing without it."""
        return _mapping(self.fs.cat_file(f"{self.root}/{name}")) if self.has(name) else {}

    def put(self, source: BinaryIO, name: str) -> None:
        """Copy one open file."""
        target = f"{self.root}/{name}"
        self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        source.seek(0)
        # Within a transaction, what is written appears at its end, where the backend can do that.
        with self.fs.transaction, self.fs.open(target, "wb") as file:
            shutil.copyfileobj(source, file, 2**24)

    def delete(self, name: str) -> None:
        """Delete a file or a folder, if it is there."""
        self.fs.invalidate_cache()  # another server may have written it
        if self.has(name):
            self.fs.rm(f"{self.root}/{name}", recursive=True)

    def checkpoints(self) -> list[str]:
        """Return the names of the checkpoints, oldest first."""
        path = f"{self.root}/{_CHECKPOINTS}"
        self.fs.invalidate_cache(path)  # not each backend's ``ls`` has an option for it
        listed = self.fs.ls(path, detail=False) if self.fs.exists(path) else []
        names = (each.rpartition("/")[2] for each in listed)
        return sorted(f"{_CHECKPOINTS}/{name}" for name in names if name.startswith("step-"))


@dataclass(frozen=True, eq=False)
class _Model:
    """The open files of a model that ``run.keep_best`` has kept, by their names in its folder."""

    files: Mapping[str, BinaryIO]

    @property
    def step(self) -> int:
        """The step it is of."""
        about = self.files[ABOUT]
        about.seek(0)
        return _step_in(_mapping(about.read()))

    @property
    def stamp(self) -> _Stamp:
        """Tells it from every other, whichever folder it is moved to."""
        return _stamp(os.fstat(self.files[ABOUT].fileno()))


class CopyView:
    """View that copies the run's folder to ``url``/NAME after each window, in a thread.

    A file that cannot be copied is said, and tried again after the next window. ``copy.json``, in
    the folder and its copy, says which run it is and which start of its server writes it: one that
    another server has resumed is left to that server. With ``anew``, a copy that cannot be resumed,
    as it has no checkpoint, is replaced. Raises ``ConfigError`` where nothing can be written, where
    another run is, and where the copy has got further than the folder.
    """

    def __init__(self, folder: RunFolder, url: str, *, anew: bool = False) -> None:
        self._folder = folder
        where = f"{url}{folder.path.name}" if url.endswith("/") else f"{url}/{folder.path.name}"
        self._remote = Remote("run.copy_to", where)
        self._best, self._former = folder.best.name, folder.best_at_checkpoint.name
        self._copied: dict[str, _Stamp] = {}
        self._models: dict[str, _Stamp | None] = {}  # those in the copy's folders, if it is known
        self._wake, self._is_over, self._is_whole = threading.Event(), False, False
        with self._remote.asked("read"):
            replaces = self._replaces(where, anew=anew)
        known = _local_mark(folder.path)
        self._mark = {
            "run": known.get("run", secrets.token_hex(8)),
            "attempt": secrets.token_hex(8),
        }
        (folder.path / _MARK).write_text(json.dumps(self._mark) + "\n", encoding="utf-8")
        with self._remote.asked("written"):
            self._put(_MARK)  # first: from here on no other server writes
            for name in [*self._remote.names()] if replaces else ["summary.json"]:
                if name != _MARK:  # the summary of the attempt that is resumed, or all of a run
                    self._remote.delete(name)
            self._put("config.yaml")
        self._thread = threading.Thread(target=self._run, name="run.copy_to", daemon=True)
        self._thread.start()

    def _replaces(self, where: str, *, anew: bool) -> bool:
        """Return whether another run is there, which this one replaces."""
        remote = self._remote
        known, there = _local_mark(self._folder.path), remote.mark()
        if remote.exists() and (not known or known.get("run") != there.get("run")):
            other = f"{remote.text}: another run is there; "
            name = "give this one another run.name"
            if remote.checkpoints():
                raise ConfigError(f"{other}resume it with run.resume={where}, or {name}")
            if remote.has(self._folder.final.name) or remote.has(self._best):
                raise ConfigError(f"{other}its model would be lost: {name}, or delete that folder")
            if not anew:
                raise ConfigError(
                    f"{other}it has no checkpoint: replace it with run.resume=auto, or {name}"
                )
            return True
        if _is_behind(self._folder.path, remote):
            raise ConfigError(
                f"{remote.text}: the copy has got further than {self._folder.path}; delete that "
                f"folder, and resume with run.resume={where}"
            )
        return False

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
                if is_last:
                    self._put(self._folder.summary.name)
                self._is_whole = is_last
            except Exception as error:  # each backend has its own
                when = "the copy is incomplete" if is_last else "tried again after the next window"
                _log.warning("%s: %r; %s", self._remote.text, error, when)

    def _copy(self) -> None:
        """Copy all but the summary.

        A run that resumes from the copy at any moment finds the best model up to its checkpoint in
        one of two folders, as it does in the run's own (``KeepBest``).
        """
        with ExitStack() as opened:
            files = self._opened(opened)
            # The record that is read after that has the windows of these checkpoints.
            for name in self._names():
                self._put(name)
            checkpoints = sorted((n for n in files if n.startswith(_CHECKPOINTS)), reverse=True)
            best, former = _model(files, self._best), _model(files, self._former)
            last = _step_of(checkpoints[0]) if checkpoints else -1
            needed = best_up_to(last, {each: each.step for each in (best, former) if each})
            if needed and needed.stamp not in self._models.values():
                self._put_model(needed, self._unneeded())
            for name in checkpoints:
                self._put(name, files[name])
            for name in self._remote.checkpoints() if checkpoints else []:
                if name not in files:
                    self._remote.delete(name)
            if needed and needed is not best:
                self._put_model(needed, self._former)
            if best:
                self._put_model(best, self._best)
            if best and needed is best:
                self._delete_model(self._former)

    def _opened(self, stack: ExitStack) -> Mapping[str, BinaryIO]:
        """Return the files of the checkpoints and the best models at one moment, open."""
        root = self._folder.path
        while True:  # until none is moved while they are opened, which takes milliseconds
            with ExitStack() as opened, suppress(FileNotFoundError):
                before = self._moving()
                files = {name: opened.enter_context((root / name).open("rb")) for name in before}
                if self._moving() == before:
                    stack.push(opened.pop_all())
                    return files

    def _moving(self) -> dict[str, _Stamp]:
        """Return the files that the run moves, replaces and deletes."""
        folder = self._folder
        models = (path.rglob("*") for path in (folder.best, folder.best_at_checkpoint))
        paths = chain(Checkpoints(folder.checkpoints).all(), *models)
        return {
            path.relative_to(folder.path).as_posix(): _stamp(path.stat())
            for path in paths
            if path.is_file()
        }

    def _names(self) -> Iterator[str]:
        """Yield the names of the other files but the summary's."""
        root = self._folder.path
        apart = {_CHECKPOINTS, self._best, self._folder.summary.name}
        for parent, folders, files in os.walk(root):
            for names in (folders, files) if Path(parent) == root else ():
                names[:] = [n for n in names if n not in apart and not n.startswith(".")]
            for name in sorted(files):
                path = Path(parent, name)
                if path.is_file() and path.suffix != _PARTIAL:
                    yield path.relative_to(root).as_posix()

    def _put(self, name: str, file: BinaryIO | None = None) -> None:
        """Copy a file if it is not yet copied as it is; ``file`` is it, if it is open."""
        with ExitStack() as opened:
            if file is None:
                try:
                    file = opened.enter_context((self._folder.path / name).open("rb"))
                except FileNotFoundError:
                    return  # deleted since it was listed
            stamp = _stamp(os.fstat(file.fileno()))
            if self._copied.get(name) != stamp:
                self._remote.put(file, name)
                self._copied[name] = stamp

    def _unneeded(self) -> str:
        """Return the folder whose model a run that resumes from the copy now would not take."""
        there = self._remote.checkpoints()
        last = _step_of(there[-1]) if there else -1
        about = {each: self._remote.json(f"{each}/{ABOUT}") for each in (self._best, self._former)}
        taken = best_up_to(last, {each: _step_in(found) for each, found in about.items()})
        return self._former if taken == self._best else self._best

    def _put_model(self, model: _Model, folder: str) -> None:
        """Copy a model; without its ``best.json``, which is copied last, it is not there."""
        if self._models.get(folder) == model.stamp:
            return
        self._delete_model(folder)
        for name in sorted(model.files, key=lambda name: (name == ABOUT, name)):
            self._remote.put(model.files[name], f"{folder}/{name}")
        self._models[folder] = model.stamp

    def _delete_model(self, folder: str) -> None:
        if self._models.pop(folder, ()) is not None:  # as soon as a file is gone, it is no model
            for name in (f"{folder}/{ABOUT}", folder):
                self._remote.delete(name)
        self._models[folder] = None


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
        if not remote.checkpoints():
            anew = "" if remote.has("final") else "; run.resume=auto begins it anew"
            raise ConfigError(f"{remote.text}: the run there has no checkpoint{anew}")
    partial = folder.with_name(f".{name}-fetched")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with remote.asked(f"copied to {folder}"):
            for path in remote.names():
                target = partial / path
                if not target.resolve().is_relative_to(partial.resolve()):
                    raise ConfigError(f"{remote.text}: has a file outside of it, {path}")
                target.parent.mkdir(parents=True, exist_ok=True)
                remote.fs.get_file(f"{remote.root}/{path}", str(target))
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _local_mark(folder: Path) -> Mapping[str, Any]:
    """Return what ``copy.json`` in a run's folder says; nothing without one."""
    path = folder / _MARK
    return _mapping(path.read_bytes()) if path.is_file() else {}


def _mapping(data: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _model(files: Mapping[str, BinaryIO], folder: str) -> _Model | None:
    begin = f"{folder}/"
    found = {name.removeprefix(begin): f for name, f in files.items() if name.startswith(begin)}
    return _Model(found) if ABOUT in found else None


def _step_in(about: Mapping[str, Any]) -> int:
    """Return the step in a ``best.json``; -1 without one."""
    return int(about.get("step", -1))


def _step_of(checkpoint: str) -> int:
    return int(Path(checkpoint).stem.rpartition("-")[2])


def _stamp(found: os.stat_result) -> _Stamp:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _is_behind(folder: Path, remote: Remote) -> bool:
    """Return whether the copy has a checkpoint of a later step than the folder."""
    ours = Checkpoints(folder / _CHECKPOINTS).all()
    theirs = remote.checkpoints()
    return bool(theirs) and (not ours or f"{_CHECKPOINTS}/{ours[-1].name}" < theirs[-1])
