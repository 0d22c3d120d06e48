"""A client's own state between windows: one file, replaced whole.

Flower's ``Context.state`` is lost when a SuperNode restarts and silently stale when it is large,
so what a client keeps lies in a file of its own, keyed by the run and the client's name. Deleting
the file is the same as being a new client.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flower_desloc.averaging import Stream
from flower_desloc.streams import digest

_ABOUT = "desloc"
_DIGESTS = "sha256"
_SEPARATOR = "/"  # joins stream and tensor; no stream name contains it


class DamagedStateError(ValueError):
    """A client's state file holds other values than were written."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a client holds, beside the tensors."""

    step: int
    """Local steps the streams have been through."""
    versions: Mapping[str, int]
    """Of every stream held, the step of the average it descends from."""
    window_start: int = -1
    """Where the window began that ended at ``step``; -1: none yet."""
    metrics: Mapping[str, int | float | list[int] | list[float]] = field(default_factory=dict)
    """What was replied of that window, so that it can be replied again."""


class StateFile:
    """The file of one client in one run."""

    def __init__(self, folder: Path, run_key: str, client: str) -> None:
        self.path = folder / run_key / f"{client}.safetensors"
        # One name, so that what a killed process left is overwritten. One process writes at a time.
        self._partial = self.path.with_suffix(".partial")

    def held(self) -> Held | None:
        """Return what the file holds, or None where there is no whole file."""
        try:
            with safe_open(self.path, framework="pt") as file:
                about = json.loads(file.metadata()[_ABOUT])
            return Held(**about)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            # Torn, foreign or absent: to the federation this client is new.
            return None

    def read(self, streams: Iterable[str]) -> dict[str, dict[str, Tensor]]:
        """Return the named streams of those that :meth:`held` lists.

        Raises :class:`DamagedStateError` when they are not what was written.
        """
        wanted = set(streams)
        result: dict[str, dict[str, Tensor]] = {name: {} for name in wanted}
        with safe_open(self.path, framework="pt") as file:
            digests = json.loads(file.metadata()[_DIGESTS])
            for full in file.keys():  # noqa: SIM118 - not a mapping
                name, _, key = full.partition(_SEPARATOR)
                if name in wanted:
                    result[name][key] = file.get_tensor(full)
        for name, stream in result.items():
            # Lengths are checked by the format; a flipped bit is not.
            if digest(stream) != digests.get(name):
                raise DamagedStateError(f"{name} in {self.path} is not what was written")
        return result

    def write(self, held: Held, streams: Mapping[str, Stream]) -> None:
        """Replace the file; a crash at any moment leaves the old one or the new one.

        Raises ``OSError`` naming the file when it cannot be written; the old one is then whole.
        """
        tensors = {
            f"{name}{_SEPARATOR}{key}": tensor.contiguous()
            for name, stream in streams.items()
            for key, tensor in stream.items()
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            digests = json.dumps({name: digest(stream) for name, stream in streams.items()})
            about = {_ABOUT: json.dumps(asdict(held)), _DIGESTS: digests}
            try:
                save_file(tensors, self._partial, metadata=about)
                with self._partial.open("rb+") as file:
                    os.fsync(file.fileno())
                self._partial.replace(self.path)
            except BaseException:
                self._partial.unlink(missing_ok=True)
                raise
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"cannot write this client's state to {self.path}: {error}; free the disk or set "
                "state-dir in the node config"
            ) from error

    def delete(self) -> None:
        """Forget everything; the run's folder goes with its last client."""
        self.path.unlink(missing_ok=True)
        self._partial.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # absent, or other clients' files are in it
            self.path.parent.rmdir()
