"""The server's checkpoints: what a run needs to resume, in one file that is replaced whole.

Windows, coins, the draw of clients and every batch are functions of the seed and the step, and
clients report what they hold. So the averages and a few numbers are all there is to save.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from flower_desloc.core.types import Stream
from flower_desloc.flower import tensor_file
from flower_desloc.flower.atomic import atomic_write
from flower_desloc.flower.tensor_file import DamagedFileError

KEEP = 2
"""If the last one is damaged, the one before can be used."""
_OUTER = "outer."


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The server's state after a window and its evaluation."""

    run_key: str
    """Names the run in the clients' own files."""
    round: int
    """Number of the window, from 1."""
    step: int
    """Local steps completed at its end."""
    evaluated: int
    """Step of the last evaluation."""
    versions: Mapping[str, int]
    """Step of the last average or reset of every stream; 0 before the first."""
    averages: Mapping[str, Stream]
    """The average of every stream, and the errors and the difference that compression keeps."""
    previous_version: int = -1
    """Version of params before their last average; -1: there was none."""
    outer: Mapping[str, Stream] = field(default_factory=dict)
    """States of the server's own optimizer."""
    settings: str = ""
    """The app's own settings; it compares them with those it resumes with."""
    paces: Mapping[str, float] = field(default_factory=dict)
    """Seconds per local step of every client, as measured."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """How often each client was left out of the window after this one, which ended the run."""
    lengths: Mapping[str, float] = field(default_factory=dict)
    """The median length of the clients' last updates of every stream
    (``flower_desloc.core.robust``)."""
    attempts: Mapping[str, int] = field(default_factory=dict)
    """The starts of the server that led here (``WindowRequest.attempts``)."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Digests of the code that every client ran (``WindowRequest.code``)."""
    data: Mapping[str, str] = field(default_factory=dict)
    """Version of each client's data, as it stated it."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a checkpoint; raises ``CheckpointError`` for a damaged, foreign or missing file."""
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file")
        try:
            metadata = tensor_file.metadata(path)
            if metadata is None or metadata.keys() != _METADATA:
                raise CheckpointError(
                    f"{path} is not a complete checkpoint; take the one before it"
                )
            streams = tensor_file.read(path)
        except (DamagedFileError, OSError) as error:
            raise CheckpointError(f"{error}; take the checkpoint before it") from error
        outer = {n.removeprefix(_OUTER): s for n, s in streams.items() if n.startswith(_OUTER)}
        averages = {n: s for n, s in streams.items() if not n.startswith(_OUTER)}
        return cls(**metadata, averages=averages, outer=outer)


_METADATA = Checkpoint.__dataclass_fields__.keys() - {"averages", "outer"}


class Checkpoints:
    """A folder of checkpoints, written every ``every`` windows and after the last; 0: never.

    ``settings``, the app's own, are written into each; the app reads them when it resumes.
    """

    def __init__(self, folder: Path | str, every: int = 1, settings: str = "") -> None:
        self.folder = Path(folder)
        self.every = every
        self.settings = settings

    def is_due(self, server_round: int, *, is_last: bool) -> bool:
        """Return whether to write a checkpoint after that window."""
        return self.every > 0 and (is_last or server_round % self.every == 0)

    def write(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, then delete all but the last ``KEEP``.

        Raises ``OSError`` naming the file when it cannot be written; the others are then intact.
        """
        path = self._path(checkpoint.step)
        outer = {f"{_OUTER}{name}": stream for name, stream in checkpoint.outer.items()}
        metadata: dict[str, Any] = {name: getattr(checkpoint, name) for name in _METADATA}
        metadata["settings"] = self.settings
        try:
            with atomic_write(path) as temporary:
                tensor_file.write(temporary, metadata, {**checkpoint.averages, **outer})
            for old in self.all()[:-KEEP]:
                old.unlink()
        except OSError as error:
            raise OSError(
                f"cannot write the checkpoint {path}: {error}; free disk space, then resume with "
                "run.resume"
            ) from error

    def delete_after(self, step: int) -> None:
        """Delete the checkpoints after ``step``, from which the run is repeated."""
        for path in set(self.all()) - set(self.up_to(step)):
            path.unlink()

    def up_to(self, step: int) -> list[Path]:
        """Return the checkpoints up to ``step``, oldest first."""
        return [path for path in self.all() if path <= self._path(step)]

    def all(self) -> list[Path]:
        """Return the checkpoints in the folder, oldest first."""
        return sorted(self.folder.glob("step-*.safetensors"))

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.safetensors"


def last_checkpoint(path: Path) -> Path:
    """Return the last checkpoint in a folder, or in its folder ``checkpoints``, as a run's has.

    Returns ``path`` itself if it is a checkpoint. Raises ``CheckpointError`` when there is none.
    """
    path = path.resolve()
    if path.suffix == ".safetensors":
        files = [path] if path.is_file() else []
    else:
        files = Checkpoints(path / "checkpoints").all() or Checkpoints(path).all()
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    if not files:
        raise CheckpointError(
            f"{path} has no checkpoint; give the folder of a run that has some, or one of them"
        )
    return files[-1]
