"""A client's own state between windows: one file, replaced whole.

Flower's ``Context.state`` is lost when a SuperNode restarts and silently stale when it is large,
so what a client keeps lies in a file of its own, keyed by the run and the client's name. Deleting
the file is the same as being a new client.

What a client replied with is not in it: the average of that comes with a later message. So a client
that is asked for a window once more goes back to the file it had before that window, which is kept
until the next one ends.

The server may die and go on from its last checkpoint, which lies behind the clients. So the first
time a client would overwrite what it held at a checkpoint, it keeps that file beside the new one
(a hard link: nothing is copied), and a server that resumes has it go back there.

A file outlives its process at any moment. It is not waited for until it is on the disk: should the
machine itself go down, a file that is torn is noticed, and the client is new; one of a window or
two before, whose place it was written in, is not, and the client goes on from there.
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
from flower_desloc.flower.checkpoint import KEEP


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a client holds, beside the tensors."""

    step: int
    """Local steps the streams have been through."""
    versions: Mapping[str, int]
    """Of every stream that was held at ``step``, the step of the average it descends from."""
    streams: Sequence[str]
    """Names of those in the file: the others were replied, and what becomes of them is to come."""
    beside: Sequence[str] = ()
    """Names of what is held beside the streams (see :mod:`flower_desloc.flower.coding`)."""
    attempt: str = ""
    """Which start of the server this was written under."""
    checkpoint: int = -1
    """Step of the server's last checkpoint when this was written; -1: there was none."""


class StateFile:
    """The file of one client in one run."""

    def __init__(self, folder: Path, run_key: str, client: str) -> None:
        self.path = folder / run_key / f"{client}.safetensors"
        # One name, so that what a killed process left is overwritten. One process writes at a time.
        self._partial = self.path.with_suffix(".partial")
        # A folder of this client's own: others come and go at the same time.
        self._kept = self.path.with_suffix(".checkpoint")
        self._before = self.path.with_suffix(".before")

    def held(self) -> Held | None:
        """Return what the file holds, or None where there is no whole file."""
        return _held(self.path)

    def held_at(self, step: int) -> Held | None:
        """Return what is held for a window that begins after ``step``; go back if it is ahead.

        A client that is asked for the last window once more goes back to the file before it; one
        that has no such file is new.
        """
        held = self.held()
        if held is not None and held.step > step and self._before.exists():
            self._before.replace(self.path)
            held = self.held()
        if held is not None and held.step > step:
            self.path.unlink()
            return None
        return held

    def read(self, streams: Iterable[str]) -> dict[str, dict[str, Tensor]]:
        """Return the named streams, of those that :meth:`held` lists and what it has beside them.

        Raises :class:`~flower_desloc.flower.tensor_file.DamagedFileError` when they are not what
        was written.
        """
        return tensor_file.read(self.path, streams)

    def write(self, held: Held, streams: Mapping[str, Stream]) -> None:
        """Replace the file; a crash at any moment leaves the old one or the new one.

        Raises ``OSError`` naming the file when it cannot be written; the old one is then whole.
        """
        try:
            self._make_room()
            tensor_file.write(self._partial, asdict(held), streams, sync=False)
            self._keep_for(held.checkpoint)
            if self.path.exists():
                _link(self.path, self._before)
            else:  # what was before the file that is gone is not before this one
                self._before.unlink(missing_ok=True)
            self._partial.replace(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._partial.unlink()
            raise OSError(
                f"cannot write this client's state to {self.path}: {error}; free the disk or set "
                "state-dir in the node config"
            ) from error

    def go_back(self, step: int, attempt: str) -> None:
        """Hold what was held at the server's checkpoint after ``step``, in another attempt's life.

        What was not there at that checkpoint, or is not kept any more, is deleted; -1 is a server
        that has none.
        """
        held = self.held()
        if held is not None and (held.attempt == attempt or held.checkpoint < step):
            return
        kept = self._kept_from(step) if step >= 0 else []
        # What was held at a later checkpoint was held at this one too, if nothing was written
        # between them.
        then = _held(kept[0]) if kept else None
        if then is None or then.checkpoint >= step:
            self.delete()
            return
        self._before.unlink(missing_ok=True)
        _link(kept[0], self._partial)
        self._partial.replace(self.path)
        for other in kept:  # of a course that is taken again
            other.unlink()

    def delete(self) -> None:
        """Forget everything; the run's folder goes with its last client."""
        self._before.unlink(missing_ok=True)  # first: it is the way back to what is forgotten
        self.path.unlink(missing_ok=True)
        self._partial.unlink(missing_ok=True)
        shutil.rmtree(self._kept, ignore_errors=True)
        with contextlib.suppress(OSError):  # absent, or other clients' files are in it
            self.path.parent.rmdir()

    def _make_room(self) -> None:
        """Leave to be written over what nobody needs, and nothing else."""
        for superfluous in self._kept_from(0)[:-KEEP]:
            superfluous.replace(self._partial)
        if not self._partial.exists() and self._before.exists():
            self._before.replace(self._partial)
        if self._partial.exists() and self._partial.stat().st_nlink > 1:
            self._partial.unlink()  # another name of a kept file

    def _keep_for(self, checkpoint: int) -> None:
        """Keep the file as it is, if it is what was held at that checkpoint."""
        old = self.held()
        if old is None or old.checkpoint >= checkpoint:
            return
        self._kept.mkdir(exist_ok=True)
        _link(self.path, self._kept / f"step-{checkpoint:08d}.safetensors")

    def _kept_from(self, checkpoint: int) -> list[Path]:
        """Return the files kept for that checkpoint and later ones, the oldest first."""
        found = sorted(self._kept.glob("step-*.safetensors"))
        return [path for path in found if int(path.stem.removeprefix("step-")) >= checkpoint]


def _held(path: Path) -> Held | None:
    try:
        return Held(**(tensor_file.about(path) or {}))
    except TypeError:
        # Torn, foreign or absent: to the federation this client is new.
        return None


def _link(path: Path, other: Path) -> None:
    other.unlink(missing_ok=True)
    try:
        os.link(path, other)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, other)
