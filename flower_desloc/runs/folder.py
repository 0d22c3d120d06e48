"""The folder a run leaves behind: what is in it is whole, at whatever moment the run ends."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from flower_desloc.config import ConfigError
from flower_desloc.runs.metrics import read_lines


@dataclass(frozen=True)
class RunFolder:
    """A run's files; :meth:`create` makes a new folder for them."""

    path: Path

    @classmethod
    def create(cls, output_dir: str | Path, name: str) -> "RunFolder":
        """Make ``<output_dir>/<name>``, or the first free one of ``<name>-2``, ``<name>-3``, ...

        Raises :class:`ConfigError` when that cannot be done in ``output_dir``.
        """
        parent = Path(output_dir).expanduser().resolve()
        try:
            parent.mkdir(parents=True, exist_ok=True)
            names = chain([name], (f"{name}-{number}" for number in count(2)))
            return cls(next(path for each in names if _claim(path := parent / each)))
        except OSError as error:
            raise ConfigError(
                f"output-dir={output_dir}: cannot make a run's folder in {parent} "
                f"({error.strerror}); give a folder that may be written to"
            ) from error

    @property
    def config(self) -> Path:
        """The resolved configuration, YAML."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object a window."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The whole run in one JSON object."""
        return self.path / "summary.json"

    @property
    def picture(self) -> Path:
        """The run at a glance."""
        return self.path / "overview.png"

    @property
    def report(self) -> Path:
        """The run in detail, one page."""
        return self.path / "report.html"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """What it takes to go on, should the run be cut off."""
        return self.path / "checkpoints"

    @property
    def resumes(self) -> Path:
        """One JSON object for every time the run was gone on with."""
        return self.path / "resumes.jsonl"

    @property
    def final(self) -> Path:
        """The trained model."""
        return self.path / "final"

    def write_config(self, text: str) -> None:
        """Write ``config.yaml``."""
        _replace(self.config, text)

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Append one line to ``metrics.jsonl``; it is there whole, or not at all.

        Raises ``OSError``, naming the file, when it cannot be written.
        """
        try:
            _append(self.metrics, line)
        except OSError as error:
            raise OSError(
                error.errno, f"cannot record the window: {error.strerror}", str(self.metrics)
            ) from error

    def go_back(self, server_round: int) -> None:
        """Forget the windows after a round, as the run goes on from there.

        ``resumes.jsonl`` keeps what had ended it, which is in no window; nothing, if it was killed.
        """
        lines = list(read_lines(self.metrics))
        kept = [line for line in lines if line["round"] <= server_round]
        told = {
            "step": kept[-1]["step"] if kept else 0,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "windows_again": len(lines) - len(kept),
            "ended": read_summary(self.summary).get("error") or "",
        }
        _append(self.resumes, told)  # first, or it would be lost with a process that is killed here
        _replace(self.metrics, "".join(_json(line) + "\n" for line in kept))
        self.summary.unlink(missing_ok=True)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep other processes out of the folder.

        Raises :class:`ConfigError` if one is in it, or if the folder cannot be written to.
        """
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise ConfigError(
                f"run.resume: the run in {self.path} is still going on, in another process"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"run.resume: {self.path} cannot be written to ({error.strerror})"
            ) from error
        try:
            yield
        finally:
            lock.release()

    def is_claimed(self) -> bool:
        """Return whether another process is in the folder."""
        try:
            with self.claimed():
                return False
        except ConfigError:
            return True

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``, or leave the former one as it is."""
        _replace(self.summary, _json(summary, indent=2) + "\n")

    def write_final(self, write: Callable[[Path], None]) -> Path:
        """Call ``write`` with an empty folder, which is ``final/`` once it returns."""
        partial = self.path / ".final-partial"
        shutil.rmtree(partial, ignore_errors=True)  # of an attempt that was cut off here
        partial.mkdir()
        try:
            write(partial)
            readable(partial)
            shutil.rmtree(self.final, ignore_errors=True)
            partial.rename(self.final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return self.final


def read_summary(path: Path) -> dict[str, Any]:
    """Return what ``summary.json`` says; nothing where there is none that can be read."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def readable(folder: Path) -> None:
    """Let whoever may look into ``folder`` read its files: safetensors makes them the owner's."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def _claim(path: Path) -> bool:
    # To make it is to claim it: of two runs that start at once, one goes on to the next name.
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


def _append(path: Path, line: Mapping[str, Any]) -> None:
    data = memoryview((_json(line) + "\n").encode())
    # Unbuffered: a line is in the file when this returns, and goes there in one piece.
    with path.open("ab", buffering=0) as file:
        whole = file.seek(0, os.SEEK_END)
        try:
            while data:
                data = data[file.write(data) :]
        except BaseException:
            file.truncate(whole)  # a full disk takes half a line
            raise


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}-partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    # JSON knows neither NaN nor infinity, and a run that diverges has both.
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
