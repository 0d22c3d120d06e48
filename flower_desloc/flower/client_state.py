"""A client's own state between windows, in files that survive the end of the process.

Flower's ``Context.state`` is lost when a SuperNode restarts and silently stale when it is large, so
a client keeps its state in a folder, found by the run's key and the client's name. Deleting the
folder makes the client a new one.

``step-S.safetensors`` is the state after step S of the run. A stream that was due then is not in
it: its average comes with a later message. With ``sync_delay`` it is, because the client goes on
from it until that average is merged. A client keeps

- its last state;
- the one before it, from which it repeats a window that it is asked for again;
- its states at the server's last checkpoints. A server that resumes is behind its clients; they go
  back to these.

A state that a resume looks for is on the disk before the client replies. In a simulation on one
machine the others are in a folder in memory, where each of its processes finds them; a process that
outlives its messages, as at a site, writes them once the reply is sent (``LaterWrites``).

A file is complete or absent, whenever the process ends. It is not fsynced: if the machine crashes,
a torn file is detected, and the client starts as a new one.
"""

import contextlib
import json
import os
import shutil
import socket
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from flwr.app import Context
from torch import Tensor

from flower_desloc.core.errors import SiteRefusedError
from flower_desloc.core.schedule import BUFFERS, PARAMS
from flower_desloc.core.types import Stream, Streams
from flower_desloc.flower import tensor_file
from flower_desloc.flower.atomic import atomic_write
from flower_desloc.flower.checkpoint import KEEP
from flower_desloc.flower.messages import is_name
from flower_desloc.flower.system import flower_home

STATE_DIR = "DESLOC_STATE_DIR"
"""Environment variable: the folder of the state of clients whose node config has no state-dir."""

STATE_MEMORY = "DESLOC_STATE_MEMORY"
"""Environment variable: a ``StateMemory`` of simulated clients, for states no resume looks for."""

STATE_SHARED = "DESLOC_STATE_SHARED"
"""Environment variable: if set, clients move between machines, and all see that folder."""


@dataclass(frozen=True, kw_only=True)
class ClientState:
    """What a client keeps between two windows."""

    step: int
    """The run's step when this was written, after a window or an evaluation."""
    versions: Mapping[str, int]
    """Of every stream, the step of the average from which it started its local steps."""
    steps_since_average: Mapping[str, int] = field(default_factory=dict)
    """Of every stream, the local steps taken since then: fewer than the federation's where the
    client is slow."""
    streams: Streams
    """The client's own streams, without those that it sent and whose averages it will be sent."""
    late: Sequence[str] = ()
    """Those of ``streams`` that were sent as well, and whose averages come late."""
    late_averages: Streams = field(default_factory=dict)
    """Averages of ``late`` that have arrived already, with an evaluation."""
    references: Streams = field(default_factory=dict)
    """The parameters that all clients have and that compressed ones are a difference to."""
    residuals: Streams = field(default_factory=dict)
    """The quantisation error of each compressed stream that has a sign."""
    attempt: str = ""
    """The start of the server (``WindowRequest.attempt``) under which this was written."""
    checkpoint: int = -1
    """Step of the server's last checkpoint when this was written; -1: none."""
    ratios: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    """The bounds of first moments by all decays so far (``flower_desloc.optim.bounds``)."""
    loop_state: Mapping[str, Any] = field(default_factory=dict)
    """What a training loop of the user's own keeps (``ClientWindow.loop_state``)."""

    def has(self, name: str, version: int | None) -> bool:
        """Return whether it has a stream in that version, with the local steps taken since."""
        return name in self.streams and self.versions[name] == version


_PREFIXES: Final = {
    "streams": "",
    "late_averages": "average.",
    "references": "reference.",
    "residuals": "residual.",
}
"""Fields of ``ClientState`` that hold streams, and what precedes a stream's name in the file."""


class _StoredStreams(Mapping[str, Stream]):
    """Streams in a state file; each is read, and its checksum verified, when it is used."""

    def __init__(self, path: Path, prefix: str, names: Sequence[str]) -> None:
        self._path, self._prefix, self._names = path, prefix, names

    def __getitem__(self, name: str) -> dict[str, Tensor]:
        if name not in self._names:
            raise KeyError(name)
        full = f"{self._prefix}{name}"
        return tensor_file.read(self._path, [full])[full]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class StateNotWrittenError(SiteRefusedError, OSError):
    """A client's state cannot be written; the detail names the folder."""


class LaterWrites:
    """The state that a process writes after its reply, once it has said that it will.

    If the process is killed in between, the state before is the client's last. The optimizer states
    are still in the process when the next message comes; they need not be read from the file.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._write: Callable[[], None] | None = None
        self._error: OSError | None = None
        self._held: tuple[tuple[Path, int, int], Streams] | None = None

    def add(self, write: Callable[[], None]) -> None:
        """Call ``write`` after the reply, or now if this process does nothing after it."""
        if not self.is_on:
            write()
            return
        self._write = write

    def run(self) -> None:
        """Write what is to be written; ``settle`` raises the error if that fails."""
        write, self._write = self._write, None
        if write is None:
            return
        try:
            write()
        except OSError as error:
            self._error = error

    def hold(self, path: Path, state: ClientState) -> None:
        """Keep the optimizer states that were written to a file, unless steps are taken ahead."""
        if self.is_on and not state.late:
            states = {n: s for n, s in state.streams.items() if n not in (PARAMS, BUFFERS)}
            self._held = _identity(path), states

    def claim(self, path: Path) -> Streams:
        """Return the optimizer states that a file holds as far as they are here; forget them."""
        held, self._held = self._held, None
        return held[1] if held is not None and held[0] == _identity(path) else {}

    def settle(self) -> None:
        """Raise the ``OSError`` of a write that failed since the last call."""
        self.run()
        error, self._error = self._error, None
        if error is not None:
            raise error


@dataclass(frozen=True)
class StateMemory:
    """A folder in memory for the states of the clients whose disk folder is ``disk``."""

    folder: Path
    disk: Path
    limit: int
    """Bytes that may be in it."""

    @classmethod
    def of_environment(cls) -> "StateMemory | None":
        """Return what ``STATE_MEMORY`` says; None if it is not set."""
        text = os.environ.get(STATE_MEMORY)
        if not text:
            return None
        folder, disk, limit = json.loads(text)
        return cls(Path(folder), Path(disk), limit)

    def to_text(self) -> str:
        """Return the value of ``STATE_MEMORY``."""
        return json.dumps([str(self.folder), str(self.disk), self.limit])

    def has_room(self, size: int) -> bool:
        """Return whether there may be ``size`` bytes more in it, and are."""
        used = 0
        for path in self.folder.glob("*/*/*"):
            with contextlib.suppress(FileNotFoundError):  # another client deletes it just now
                used += path.stat().st_size
        return used + size <= self.limit and size <= shutil.disk_usage(self.folder).free

    def move_to_disk(self, run_key: str, step: int) -> None:
        """Move what a resume after ``step`` looks for of a run's clients to the disk."""
        for client in self.folder.glob(f"{run_key}/*"):
            StateFiles(self.disk, run_key, client.name, self).move_to_disk(step)


class StateFiles:
    """The state files of one client in one run. One process writes at a time.

    Those that no resume looks for are in ``memory`` (``STATE_MEMORY``) if it is given and has room,
    and may be written ``later``.
    """

    def __init__(
        self,
        folder: Path,
        run_key: str,
        client: str,
        memory: StateMemory | None = None,
        later: LaterWrites | None = None,
    ) -> None:
        self.folder = folder / run_key / client
        self._memory = memory
        self._later = later or LaterWrites()
        self._folders = [self.folder]
        if memory is not None:
            self._folders.append(memory.folder / run_key / client)

    def last(self) -> ClientState | None:
        """Return the last state; None for a missing or torn file.

        Its streams are read when they are used, which raises ``DamagedFileError`` when they are
        not what was written.
        """
        files = self._files()
        state = _read(files[-1]) if files else None
        if state is None or not (held := self._later.claim(files[-1])):
            return state
        return replace(state, streams=ChainMap(dict(held), state.streams))  # type: ignore[arg-type]

    def at(self, step: int) -> ClientState | None:
        """Return the state for a window that begins after ``step``.

        Later states are deleted: the client is asked for these windows again.
        """
        for path in reversed(self._files()):
            if _step(path) > step:
                path.unlink()
        return self.last()

    def steps(self) -> set[int]:
        """Return the steps after which there is a state."""
        return {_step(path) for path in self._files()}

    def write(
        self, state: ClientState, *, for_resume: bool = True, unchanged: bool = False
    ) -> None:
        """Write the state after ``state.step``; states that are no longer needed are deleted.

        Args:
            state: What to write.
            for_resume: Whether a resume looks for it.
            unchanged: Whether its tensors do not change before the next message. If the process
                outlives the reply, it writes what no resume looks for after it, and holds the
                optimizer states.

        Raises ``StateNotWrittenError`` when it cannot be written; the last state is kept.

        """

        def write() -> None:
            path = self._write(state, for_resume=for_resume)
            if unchanged:
                self._later.hold(path, state)

        if unchanged and not for_resume:
            self._later.add(write)
        else:
            write()

    def _write(self, state: ClientState, *, for_resume: bool) -> Path:
        fields = dict(vars(state))
        groups: dict[str, Streams] = {group: fields.pop(group) for group in _PREFIXES}
        names = {group: list(streams) for group, streams in groups.items()}
        tensors = {
            f"{_PREFIXES[group]}{name}": stream
            for group, streams in groups.items()
            for name, stream in streams.items()
        }
        try:
            self._delete_unneeded(state.checkpoint)  # first, to free the space
            folder = self.folder if for_resume else self._room_for(tensors)
            with atomic_write(_file(folder, state.step), sync=False) as temporary:
                tensor_file.write(temporary, fields | names, tensors)
            for other in self._folders:  # from an evaluation, or before there was no room
                if other != folder:
                    _file(other, state.step).unlink(missing_ok=True)
            return _file(folder, state.step)
        except OSError as error:
            raise self._not_written(error) from error

    def _not_written(self, error: OSError) -> OSError:
        return StateNotWrittenError(
            f"cannot write this client's state ({error.strerror or type(error).__name__}); free "
            "disk space, or name another folder: --output-dir of a simulation, state-dir of a site",
            f"{self.folder}: {error}",
        )

    def go_back(self, attempts: Mapping[str, int]) -> None:
        """Delete the states that are no part of the server's history.

        ``attempts`` are the starts of the server that led to the present one, in order, each with
        the step from which it resumed. A state written under an attempt is part of the history up
        to the step from which the next one resumed. A client without such a state is new, and so
        is one whose last file is torn.
        """
        resumed = [*attempts.values(), sys.maxsize]
        ends = dict(zip(attempts, resumed[1:], strict=True))
        files = self._files()
        if files and _read(files[-1]) is None:
            self.delete()
            return
        for path in files:
            state = _read(path)
            if state is None or _step(path) > ends.get(state.attempt, -1):
                path.unlink()

    def delete(self) -> None:
        """Delete the client's files, and the run's folder with its last client."""
        for path in self._files():  # the oldest first: the last leads to no older one
            path.unlink()
        self._delete_partial()
        for folder in self._folders:
            with contextlib.suppress(OSError):  # absent, or other clients' files are in it
                folder.rmdir()
                folder.parent.rmdir()

    def _files(self) -> list[Path]:
        """Return the files, the oldest first."""
        names = f"step-{'[0-9]' * 8}.safetensors"
        return sorted((path for each in self._folders for path in each.glob(names)), key=_step)

    def _room_for(self, tensors: Streams) -> Path:
        """Return the folder in memory if it has room for so much more, otherwise that on disk."""
        if self._memory is None:
            return self.folder
        size = sum(tensor.nbytes for stream in tensors.values() for tensor in stream.values())
        return self._folders[-1] if self._memory.has_room(size) else self.folder

    def move_to_disk(self, step: int) -> None:
        """Move the last state up to ``step`` to the disk, if it is in memory.

        Raises ``OSError`` as ``write``.
        """
        for path in [path for path in self._files() if _step(path) <= step][-1:]:
            if path.parent == self.folder:
                continue
            try:
                with atomic_write(_file(self.folder, _step(path)), sync=False) as temporary:
                    shutil.copyfile(path, temporary)
                path.unlink()
            except FileNotFoundError:
                pass  # its client is late, and has deleted it
            except OSError as error:
                raise self._not_written(error) from error

    def _delete_unneeded(self, checkpoint: int) -> None:
        """Delete all but the last state and those at the last checkpoints of the server."""
        files = self._files()
        known = {state.checkpoint for state in map(_read, files) if state} | {checkpoint}
        keep = set(files[-1:])
        for step in sorted(known)[-KEEP:]:
            keep |= set([path for path in files if _step(path) <= step][-1:])
        for path in files:
            if path not in keep:
                path.unlink()
        self._delete_partial()

    def _delete_partial(self) -> None:
        """Delete what a killed process has left."""
        for folder in self._folders:
            for path in folder.glob("*.partial"):
                path.unlink()


def _identity(path: Path) -> tuple[Path, int, int]:
    """Return what another file in the place of this one would not have."""
    found = path.stat()
    return path, found.st_ino, found.st_mtime_ns


def _file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.safetensors"


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _read(path: Path) -> ClientState | None:
    """Return the state in a file; None for a torn or foreign one."""
    fields = tensor_file.metadata(path)
    if fields is None:
        return None
    try:
        for group, prefix in _PREFIXES.items():
            fields[group] = _StoredStreams(path, prefix, fields[group])
        return ClientState(**fields)
    except (KeyError, TypeError):
        return None


def state_files(context: Context, run_key: str, later: LaterWrites | None = None) -> StateFiles:
    """Return the state files of a node's client for a run.

    Raises ``ValueError`` for a name of either that cannot be a file's.
    """
    for what, name in (("run", run_key), ("client", client_name(context))):
        # Both become file names, and the run's comes from outside.
        if not is_name(name):
            raise ValueError(
                f"{what} name {name!r} may hold letters, digits, '_', '-' and '.' only"
            )
    folder, memory = state_folder(context), StateMemory.of_environment()
    return StateFiles(folder, run_key, client_name(context), memory, later)


def client_name(context: Context) -> str:
    """Return a name that survives restarts: the partition's, or the one the site gave."""
    node = context.node_config
    if "partition-id" in node:
        return f"client-{node['partition-id']}"
    return str(node.get("name", f"node-{context.node_id}"))


def state_folder(context: Context) -> Path:
    """Return the folder in which the clients of a node keep their state.

    Raises ``FileNotFoundError`` if clients move between machines, and this one does not have it.
    """
    named = context.node_config.get("state-dir") or os.environ.get(STATE_DIR)
    folder = Path(str(named)).expanduser() if named else flower_home() / "desloc"
    if os.environ.get(STATE_SHARED) and not folder.is_dir():
        raise FileNotFoundError(
            f"{socket.gethostname()} does not have {folder}, where the clients keep their state; "
            "put --output-dir on a disk that all machines of the Ray cluster share"
        )
    return folder
