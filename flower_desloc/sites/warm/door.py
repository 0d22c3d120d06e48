"""The way from a process of one message to its node's trainer: find it, or start one.

The process that starts a trainer binds the socket and hands it over. So there is nothing to wait
for: who connects before the trainer has imported anything stands in line, and if it dies the line
is cut.
"""

import contextlib
import hashlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.supercore.task_identity import TaskIdentity

from flower_desloc.flower.fingerprint import fingerprint
from flower_desloc.sites.warm.wire import (
    Stream,
    read_context,
    read_head,
    read_message,
    write_context,
    write_head,
    write_message,
)

_DYING = 10.0  # seconds a trainer whose line is cut may take to end
_CUT = (OSError, EOFError)


class NoTrainerError(RuntimeError):
    """A trainer cannot be started here."""


class Door:
    """Where the trainer of one node is to be found, and for which run it must be.

    Raises :class:`NoTrainerError` where no private folder can be had for the socket.
    """

    def __init__(self, reference: str, context: Context) -> None:
        self.reference = reference
        self.run = _digest([reference, context.run_id, fingerprint(), sys.path])
        """What a trainer may not be shared beyond: the run, and the code."""
        node = [context.node_id, context.node_config.get("state-dir"), os.environ.get("FLWR_HOME")]
        self.path = _private_folder() / f"{_digest(node)}.sock"

    def answer(self, message: Message, context: Context) -> Message:
        """Return the trainer's reply, and take over what it did to the context's state.

        Raises what the app raised, under the same name and with the same text; ``RuntimeError``
        if a trainer dies that was started for this message; :class:`NoTrainerError` if none
        can be started. One that was there and dies is replaced, and asked again: a window is
        begun from the state file, whoever did part of it before.
        """
        with contextlib.suppress(*_CUT):  # not there, or it ends as it served another run
            return self._ask(message, context)
        trainer = self._start()
        try:
            return self._ask(message, context)
        except _CUT as error:
            raise RuntimeError(
                f"the process that trains for this node {_ending(trainer)} while it was at a "
                f"{message.metadata.message_type} message; the SuperNode's log may say why"
            ) from error

    def _ask(self, message: Message, context: Context) -> Message:
        with self._line() as stream:
            write_head(stream, {"run": self.run, "task": TaskIdentity.task_id})
            write_message(stream, message)
            write_context(stream, context)
            stream.flush()
            head = read_head(stream)
            context.state = read_context(stream).state
            if "raised" in head:
                raise _raised(head)
            reply = read_message(stream)
        # Flower holds on to the message while it sends the reply, and copies that: three times the
        # memory. It wants no more of it than whom to reply to, and nobody will be asked again.
        if message.has_content():
            message.content.clear()
        return reply

    @contextlib.contextmanager
    def _line(self) -> Iterator[Stream]:
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(self.path))
            with line.makefile("rwb") as stream:
                yield stream

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            with contextlib.ExitStack() as stack:
                node = [os.pidfd_open(process) for process in _node_processes()]
                for handle in node:
                    stack.callback(os.close, handle)
                listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                self.path.unlink(missing_ok=True)
                listener.bind(str(self.path))
                listener.listen()
                handles = [listener.fileno(), *node]
                return subprocess.Popen(  # noqa: S603
                    [
                        *(sys.executable, "-P", "-m", "flower_desloc.sites.warm.trainer"),
                        *(self.reference, self.run, str(self.path)),
                        *map(str, handles),
                    ],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    stdin=subprocess.DEVNULL,
                    pass_fds=handles,
                    start_new_session=True,  # a SuperNode stopped by Ctrl-C stops it by ending
                )
        except OSError as error:
            raise NoTrainerError(f"cannot start a trainer at {self.path}: {error}") from error


def _node_processes() -> list[int]:
    """Return the processes that a trainer must not outlive.

    They are the SuperExec, which starts the processes of one message, and its SuperNode. The
    SuperExec alone would not do: it may go on for ten seconds after a SuperNode that was killed.
    """
    superexec = os.getppid()
    status = Path(f"/proc/{superexec}/stat").read_text(encoding="utf-8", errors="replace")
    supernode = int(status.rpartition(")")[2].split()[1])
    return [process for process in (superexec, supernode) if process > 0]


def _private_folder() -> Path:
    # Not beside the state: that may lie on a disk shared by several machines, and a socket's path
    # may have 107 bytes.
    folder = Path(tempfile.gettempdir()) / f"desloc-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise NoTrainerError(f"no folder for a trainer's socket: {error}") from error
    if (stat.S_IFMT(found.st_mode), found.st_uid) != (stat.S_IFDIR, os.getuid()) or (
        stat.S_IMODE(found.st_mode) & 0o077
    ):
        raise NoTrainerError(f"{folder} is not a folder that this user alone may enter")
    return folder


def _ending(trainer: subprocess.Popen[bytes]) -> str:
    try:
        code = trainer.wait(_DYING)
    except subprocess.TimeoutExpired:
        return "hung up"
    if code < 0:
        name = signal.Signals(-code).name
        return f"was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"ended with status {code}"


def _raised(head: dict[str, Any]) -> Exception:
    """Return an exception that reads as the one in the trainer does.

    Flower tells the server an exception's type and text; the type may be known in the trainer only.
    """
    module, name, text = head["raised"]
    kind = type(name, (Exception,), {"__module__": module, "__str__": lambda _: text})
    error: Exception = kind(text)
    error.add_note(f"In the trainer:\n{head['traceback']}")
    return error


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
