"""A client's own state between windows: one file, replaced as a whole.

Flower's ``Context.state`` is lost when a SuperNode restarts and silently stale when it is large, so
a client keeps its state in a file, found by the run's key and the client's name. Deleting the file
makes the client a new one.

Three files of a client ``c`` in a run's folder:

- ``c.safetensors``: the state after the last window. A stream that was due is not in it: its
  average comes with a later message.
- ``c.before``: the state before that window. A client that is asked for a window again starts from
  it.
- ``c.checkpoint/step-*.safetensors``: hard links to the states at the server's last checkpoints. A
  server that resumes is behind its clients; they go back to these.

The file survives the end of its process at any moment. It is not fsynced: if the machine crashes,
a torn file is detected, and the client starts as a new one.
"""

import contextlib
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from flower_desloc.core.averaging import Stream
from flower_desloc.flower import tensor_file
from flower_desloc.flower.atomic import atomic_write
from flower_desloc.flower.checkpoint import KEEP


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a client holds, without the tensors."""

    step: int
    """Local steps the streams have been through."""
    versions: Mapping[str, int]
    """Of every stream held at ``step``, the step of the average it descends from."""
    streams: Sequence[str]
    """Streams in the file; the others were sent to the server."""
    beside: Sequence[str] = ()
    """What compression keeps in the file besides (:mod:`flower_desloc.flower.coding`)."""
    attempt: str = ""
    """The start of the server under which this was written."""
    checkpoint: int = -1
    """Step of the server's last checkpoint when this was written; -1: none."""


class StateFile:
    """The state file of one client in one run. One process writes at a time."""

    def __init__(self, folder: Path, run_key: str, client: str) -> None:
        self.path = folder / run_key / f"{client}.safetensors"
        self._before = self.path.with_suffix(".before")
        self._kept = self.path.with_suffix(".checkpoint")

    def held(self) -> Held | None:
        """Return what the file holds; None for a missing or torn file."""
        return _held(self.path)

    def held_at(self, step: int) -> Held | None:
        """Return what is held for a window that begins after ``step``.

        A client that is asked for its last window again goes back to the file before it. If there
        is none, the client is new.
        """
        held = self.held()
        if held is not None and held.step > step and self._before.exists():
            self._before.replace(self.path)
            held = self.held()
        if held is not None and held.step > step:
            self.path.unlink()
            return None
        return held

    def read(self, names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
        """Return tensors by the names in :attr:`Held.streams` and :attr:`Held.beside`.

        Raises :class:`~flower_desloc.flower.tensor_file.DamagedFileError` when they are not what
        was written.
        """
        return tensor_file.read(self.path, names)

    def write(self, held: Held, streams: Mapping[str, Stream]) -> None:
        """Replace the file; after a crash at any moment the old or the new one is there.

        Raises ``OSError`` naming the file when it cannot be written; the old one is kept.
        """
        try:
            self._before.unlink(missing_ok=True)  # first, to free its disk space
            for superfluous in self._kept_from(0)[:-KEEP]:
                superfluous.unlink()
            with atomic_write(self.path, sync=False) as temporary:
                tensor_file.write(temporary, asdict(held), streams)
                self._keep_for(held.checkpoint)
                if self.path.exists():
                    _link(self.path, self._before)
        except OSError as error:
            raise OSError(
                f"cannot write this client's state to {self.path}: {error}; free the disk or set "
                "state-dir in the node config"
            ) from error

    def go_back(self, step: int, attempt: str) -> None:
        """Return to the state at the server's checkpoint after ``step``, for a new ``attempt``.

        A client that did not exist then, or has no such state any more, becomes new. ``step`` is
        -1 for a server without a checkpoint.
        """
        held = self.held()
        if held is not None and (held.attempt == attempt or held.checkpoint < step):
            return
        kept = self._kept_from(step) if step >= 0 else []
        # A state kept for a later checkpoint is that of this one if nothing was written between.
        then = _held(kept[0]) if kept else None
        if then is None or then.checkpoint >= step:
            self.delete()
            return
        self._before.unlink(missing_ok=True)
        with atomic_write(self.path, sync=False) as temporary:
            _link(kept[0], temporary)
        for other in kept:  # of windows that are repeated
            other.unlink()

    def delete(self) -> None:
        """Delete the client's files, and the run's folder with its last client."""
        self._before.unlink(missing_ok=True)  # first: it leads back to the state that is deleted
        self.path.unlink(missing_ok=True)
        self.path.with_suffix(".partial").unlink(missing_ok=True)
        shutil.rmtree(self._kept, ignore_errors=True)
        with contextlib.suppress(OSError):  # absent, or other clients' files are in it
            self.path.parent.rmdir()

    def _keep_for(self, checkpoint: int) -> None:
        """Keep a link to the file if it is the state at that checkpoint."""
        old = self.held()
        if old is None or old.checkpoint >= checkpoint:
            return
        self._kept.mkdir(exist_ok=True)
        _link(self.path, self._kept / f"step-{checkpoint:08d}.safetensors")

    def _kept_from(self, checkpoint: int) -> list[Path]:
        """Return the states kept for that checkpoint and later ones, the oldest first."""
        found = sorted(self._kept.glob("step-*.safetensors"))
        return [path for path in found if int(path.stem.removeprefix("step-")) >= checkpoint]


def _held(path: Path) -> Held | None:
    try:
        return Held(**(tensor_file.about(path) or {}))
    except TypeError:  # no such file, or a foreign one
        return None


def _link(path: Path, other: Path) -> None:
    other.unlink(missing_ok=True)
    try:
        os.link(path, other)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, other)
