"""The folder of a run and its files, each of them complete whenever the run ends."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from flower_desloc.app.config import ConfigError
from flower_desloc.flower.atomic import atomic_write
from flower_desloc.flower.json_lines import append, as_json

Line = dict[str, Any]
"""One window as a JSON object; a number that was not finite is ``None``."""


class RunFolder:
    """The paths of a run's files, and how they are written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"  # the resolved configuration
        self.metrics = path / "metrics.jsonl"  # one JSON object per window
        self.summary = path / "summary.json"
        self.picture = path / "overview.png"
        self.partition = path / "partition.png"
        self.report = path / "report.html"
        self.tensorboard = path / "tensorboard"
        self.trackers = path / "trackers"  # which run this is at each tracker, and its output
        self.checkpoints = path / "checkpoints"
        self.members = path / "members.jsonl"  # the sites, and what the operator made of them
        self.resumes = path / "resumes.jsonl"  # one JSON object per resumption
        self.final = path / "final"  # the trained model
        self.best = path / "best"  # the model with the best value of run.keep_best
        self.best_at_checkpoint = path / ".best-at-checkpoint"  # what a resumed run would need

    @classmethod
    def create(cls, output_dir: str | Path, name: str) -> "RunFolder":
        """Make ``<output_dir>/<name>``, or the first free one of ``<name>-2``, ``<name>-3``, ...

        One in which only members were invited yet is free.

        Raises ``ConfigError`` when the folder cannot be made.
        """
        parent = Path(output_dir).expanduser().resolve()
        try:
            parent.mkdir(parents=True, exist_ok=True)
            for each in chain([name], (f"{name}-{number}" for number in count(2))):
                try:  # making the folder claims it: of two runs that start at once, one gets it
                    (parent / each).mkdir()
                except FileExistsError:
                    if not _claim_prepared(cls(parent / each)):
                        continue
                return cls(parent / each)
            raise AssertionError  # there are infinitely many names
        except OSError as error:
            raise ConfigError(
                f"output-dir={output_dir}: cannot make the folder of a run in {parent} "
                f"({error.strerror}); give a folder with write permission"
            ) from error

    def discard(self) -> None:
        """Delete what a run has written, but not its list of members."""
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path != self.members:
                path.unlink()
        if not self.members.exists():
            self.path.rmdir()

    def claimed(self) -> AbstractContextManager[None]:
        """Lock the folder against other processes.

        Raises ``ConfigError`` if another process has locked it, or if it is not writable.
        """
        return locked(self.path, f"run.resume: the run in {self.path} is still going on")

    def is_claimed(self) -> bool:
        """Return whether another process has locked the folder."""
        try:
            with self.claimed():
                return False
        except ConfigError:
            return True

    def write_config(self, text: str) -> None:
        """Write ``config.yaml``."""
        _replace(self.config, text)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``."""
        _replace(self.summary, as_json(summary, indent=2) + "\n")

    def append_metrics(self, line: Line) -> None:
        """Append one complete line to ``metrics.jsonl``.

        Raises ``OSError``, naming the file, when it cannot be written.
        """
        try:
            append(self.metrics, line)
        except OSError as error:
            raise OSError(
                error.errno, f"cannot record the window: {error.strerror}", str(self.metrics)
            ) from error

    def rewind(self, server_round: int) -> None:
        """Delete the windows after a round, before the run resumes from there.

        ``resumes.jsonl`` keeps the error that had ended the run.
        """
        lines = list(read_lines(self.metrics))
        kept = [line for line in lines if line["round"] <= server_round]
        resumption = {
            "step": kept[-1]["step"] if kept else 0,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "windows_again": len(lines) - len(kept),
            "ended": read_summary(self.summary).get("error") or "",
        }
        append(self.resumes, resumption)  # before the summary with the error is deleted
        _replace(self.metrics, "".join(as_json(line) + "\n" for line in kept))
        self.summary.unlink(missing_ok=True)

    def write_final(self, write: Callable[[Path], None]) -> None:
        """Call ``write`` with an empty folder, which becomes ``final/`` once it returns."""
        with replaced(self.final) as partial:
            write(partial)
        shutil.rmtree(self.best_at_checkpoint, ignore_errors=True)


def _claim_prepared(run: RunFolder) -> bool:
    """Return whether the folder has nothing but a list of members, and is now this process's."""
    if not run.path.is_dir() or list(run.path.iterdir()) != [run.members]:
        return False
    try:
        (run.path / ".lock").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces ``folder`` at the end, unless the block raises."""
    partial = folder.with_name(f".{folder.name}-partial")
    former = folder.with_name(f".{folder.name}-former")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
        _make_readable(partial)
        if folder.exists():
            shutil.rmtree(former, ignore_errors=True)
            folder.rename(former)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(former, ignore_errors=True)


@contextmanager
def locked(folder: Path, held: str, wait: float = 0) -> Iterator[None]:
    """Lock ``folder``, which is made if there is none, against other processes.

    Raises ``ConfigError``, with ``held`` if another process has locked it for ``wait`` seconds, or
    if it cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock").acquire(timeout=wait)
    except Timeout as error:
        raise ConfigError(f"{held}, in another process") from error
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written to ({error.strerror})") from error
    with lock:
        yield


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the complete lines of a ``.jsonl`` file; none if there is no file yet."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            if text.endswith("\n"):  # the last line of a live run may be incomplete
                try:
                    line = json.loads(text)
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: is damaged ({error})") from error
                yield line


def evaluations(lines: Iterable[Line], where: str) -> list[tuple[int, dict[str, Any]]]:
    """Return the step and the evaluation of each line that has one of this kind."""
    seen = ((line["step"], line["evaluation"].get(where)) for line in lines)
    return [(step, evaluation) for step, evaluation in seen if evaluation is not None]


def read_summary(path: Path) -> dict[str, Any]:
    """Return the content of ``summary.json``; empty if it is missing or cannot be read."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def _make_readable(folder: Path) -> None:
    """Give the files in ``folder`` its own read permissions; safetensors makes them private."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def _replace(path: Path, text: str) -> None:
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")
