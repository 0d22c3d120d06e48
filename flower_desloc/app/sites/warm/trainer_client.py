"""Forwards a message to the node's trainer, and starts the trainer if there is none.

The process that starts a trainer binds the socket and passes it on. So no client has to wait until
the trainer is ready: a connection is queued while the trainer imports its modules, and it closes if
the trainer dies.
"""

import hashlib
import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import psutil
from flwr.app import Context, Message

from flower_desloc.app.sites.supervisor import (
    SAVES_STATE,
    Process,
    can_watch,
    describe_exit,
    start_module,
)
from flower_desloc.app.sites.warm.framing import receive, send
from flower_desloc.flower.internals import TaskIdentity
from flower_desloc.flower.system import socket_folder

_EXIT_TIMEOUT = 10.0  # seconds a trainer may take to end after its connection has closed
_DISCONNECTED = (OSError, EOFError)


class NoTrainerError(RuntimeError):
    """A trainer cannot be started here."""


def forward(reference: str, message: Message, context: Context) -> Message:
    """Return the trainer's reply, and copy its changes to the context's state.

    Raises what the app raised, with the same type name and text; ``RuntimeError`` if a trainer
    that was started for this message dies; ``NoTrainerError`` if none can be started. A trainer
    that was already there and dies is replaced, and the message is sent again: a window always
    starts from the state file.
    """
    # A trainer is shared by messages with equal values. A run's code is in a folder of its own.
    run = _digest([reference, context.run_id, sys.path])
    node = [context.node_id, context.node_config.get("state-dir"), os.environ.get("FLWR_HOME")]
    path = _socket_folder() / f"{_digest(node)}.sock"
    with suppress(*_DISCONNECTED):  # there is none, or it ends because it serves another run
        return _ask(path, run, message, context)
    trainer = _start(reference, run, path)
    try:
        return _ask(path, run, message, context)
    except _DISCONNECTED as error:
        raise RuntimeError(
            f"the process that trains for this node {_how_it_ended(trainer)} while it "
            f"handled a {message.metadata.message_type} message; see the SuperNode's log"
        ) from error


def _ask(path: Path, run: str, message: Message, context: Context) -> Message:
    with Client(str(path), "AF_UNIX") as connection:
        hello = [run, TaskIdentity.task_id, os.getpid()]
        connection.send_bytes(json.dumps(hello).encode())
        send(connection, message, context)
        reply, after, raised = receive(connection)
    context.state = after.state
    if raised is not None:
        raise _as_raised(*raised)
    assert reply is not None
    # Flower keeps the message while it copies and sends the reply: three times the memory.
    # Only the message's metadata is needed from here on, and it is not sent again.
    if message.has_content():
        message.content.clear()
    return reply


def _start(reference: str, run: str, path: Path) -> Process:
    # A trainer must not outlive the SuperExec, which starts the processes of one message, nor
    # its SuperNode: a SuperExec may run for ten seconds after its SuperNode was killed.
    node = [process.pid for process in psutil.Process().parents()[:2]]
    if not can_watch():
        raise NoTrainerError("cannot start a trainer: os.pidfd_open does not work here")
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            path.unlink(missing_ok=True)
            listener.bind(str(path))
            listener.listen()
            return start_module(
                "flower_desloc.app.sites.warm.trainer",
                *(SAVES_STATE, reference, run, path, listener.fileno(), *node),
                pass_fds=[listener.fileno()],
            )
    except OSError as error:
        raise NoTrainerError(f"cannot start a trainer at {path}: {error}") from error


def _socket_folder() -> Path:
    # Not in the state's folder: that may be on a disk shared by several machines.
    try:
        return socket_folder()
    except OSError as error:
        raise NoTrainerError(f"no folder for a trainer's socket: {error}") from error


def _how_it_ended(trainer: Process) -> str:
    try:
        return describe_exit(trainer.wait(_EXIT_TIMEOUT))
    except subprocess.TimeoutExpired:
        return "closed the connection"


def _as_raised(module: str, name: str, text: str, trace: str) -> Exception:
    """Return an exception with the type name and text of the one in the trainer.

    Flower sends both to the server; the type itself may exist in the trainer only.
    """
    kind = type(name, (Exception,), {"__module__": module, "__str__": lambda _: text})
    error: Exception = kind(text)
    error.add_note(f"In the trainer:\n{trace}")
    return error


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
