"""The server's checkpoints: what it takes to go on, in one file, replaced whole.

The schedule, its coins, the draw of clients and every batch are functions of the seed and the
step, and what the clients hold they say themselves, so the streams and a few numbers are all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from flower_desloc.core.averaging import Stream
from flower_desloc.flower import tensor_file
from flower_desloc.flower.atomic import atomic_write
from flower_desloc.flower.tensor_file import DamagedFileError

KEEP = 2
"""Should the disk have harmed the last one, there is the one before."""
_OUTER = "outer."


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The federation's state after a window, evaluation included."""

    run_key: str
    """Names the run for the clients' own files."""
    round: int
    step: int
    evaluated: int
    """Step of the last evaluation."""
    versions: Mapping[str, int]
    """Of every stream, the step of its last average or reset; 0 before the first."""
    averages: Mapping[str, Stream]
    """As they travel, and what goes with them (:meth:`Globals.to_checkpoint`)."""
    former: int = -1
    """Version of the parameters before the last average of them; -1: there was none."""
    outer: Mapping[str, Stream] = field(default_factory=dict)
    """The server's own optimizer's states."""
    settings: str = ""
    """The app's, so that a checkpoint is only gone on with under its own."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a checkpoint; raises :class:`CheckpointError` for a torn or a foreign file."""
        about = tensor_file.about(path)
        if about is None or not about.keys() >= _ABOUT:
            raise CheckpointError(f"{path} is no whole checkpoint; take the one before it")
        try:
            streams = tensor_file.read(path)
        except DamagedFileError as error:
            raise CheckpointError(f"{error}; take the checkpoint before it") from error
        outer = {n.removeprefix(_OUTER): s for n, s in streams.items() if n.startswith(_OUTER)}
        averages = {n: s for n, s in streams.items() if not n.startswith(_OUTER)}
        return cls(**{name: about[name] for name in _ABOUT}, averages=averages, outer=outer)


_ABOUT = Checkpoint.__dataclass_fields__.keys() - {"averages", "outer"}


class Checkpoints:
    """A folder of checkpoints, one written every ``every`` windows and at the end; 0: none.

    ``settings`` are written into each.
    """

    def __init__(self, folder: Path, every: int = 0, settings: str = "") -> None:
        self.folder = folder
        self.every = every
        self.settings = settings

    def falls_due(self, server_round: int, *, last: bool) -> bool:
        """Return whether a checkpoint follows that window."""
        return self.every > 0 and (last or server_round % self.every == 0)

    def write(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint and delete those that are too many.

        Raises ``OSError`` naming the file when it cannot be written; the others are then whole.
        """
        path = self._path(checkpoint.step)
        outer = {f"{_OUTER}{name}": stream for name, stream in checkpoint.outer.items()}
        about: dict[str, Any] = {name: getattr(checkpoint, name) for name in _ABOUT}
        about["settings"] = self.settings
        try:
            with atomic_write(path) as temporary:
                tensor_file.write(temporary, about, {**checkpoint.averages, **outer})
            for old in self.all()[:-KEEP]:
                old.unlink()
        except OSError as error:
            raise OSError(
                f"cannot write the checkpoint {path}: {error}; free the disk, then go on with "
                "run.resume"
            ) from error

    def forget_after(self, step: int) -> None:
        """Delete the checkpoints after ``step``: of a course that is taken again from there."""
        for path in self.all():
            if path > self._path(step):
                path.unlink()

    def all(self) -> list[Path]:
        """Return the checkpoints there are, the oldest first."""
        return sorted(self.folder.glob("step-*.safetensors"))

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.safetensors"
