"""The trainer: one node's ClientApp of one run, in a process that outlives the messages.

``trainer_client`` starts it with a listening socket and the pids of the node's processes. It ends
with the run, with the node, after an error, when another run's message arrives, when the process
whose message it is answering ends, after SIGTERM, and after ten minutes without a message. It ends
at once in each case, but first writes the state of a window that it has replied to.
"""

import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

from flwr.app import Message

from flower_desloc.app.sites.supervisor import SAVE_TIMEOUT, on_exit
from flower_desloc.app.sites.warm.framing import receive, send
from flower_desloc.flower.internals import set_task

_IDLE_TIMEOUT = 600.0  # seconds
_GOODBYE = "query.goodbye"


class Trainer:
    """Serves the app that ``reference`` names to the messages of one run, one at a time."""

    def __init__(self, reference: str, run: str, path: Path, listener: int) -> None:
        self.reference = reference
        self.run = run
        self.path = path
        self.inode = path.stat().st_ino
        self.listener = socket.socket(fileno=listener)
        self.listener.settimeout(_IDLE_TIMEOUT)
        self.client = 0  # pid of the process whose message is being answered
        self.saving = threading.Lock()

    def serve(self) -> NoReturn:
        """Answer messages until there is a reason to end."""
        more = True
        with suppress(OSError, EOFError):  # the idle timeout, or the client is gone
            while more:
                accepted, _ = self.listener.accept()
                with Connection(accepted.detach()) as connection:
                    more = self._serve(connection)
        self.end()

    def _serve(self, connection: Connection) -> bool:
        """Answer one message; return whether to wait for another."""
        run, task, pid = json.loads(connection.recv_bytes())
        if run != self.run:
            return False
        message, context, _ = receive(connection)
        assert message is not None
        set_task(context.run_id, context.node_id, task)
        self.client = pid
        on_exit(pid, lambda: self.end() if self.client == pid else None)
        app: Any = None
        reply: Message | None = None
        raised = None
        try:
            app = resolve_name(self.reference)
            _call(app, "outlive_messages")
            reply = app(message, context)
        except Exception as error:
            raised = _described(error)
        with self.saving:
            self.client = 0
            try:
                send(connection, reply, context, raised, release=True)
            except (TypeError, ValueError) as error:  # protobuf has no such value; nothing was sent
                reply = None
                send(connection, None, context, _described(error), release=True)
            finally:
                _call(app, "write_state")
        _call(app, "take_steps_ahead")
        # After an error the process itself may be broken, as after an error of CUDA.
        return reply is not None and message.metadata.message_type != _GOODBYE

    def end(self) -> NoReturn:
        """End this process, whatever it is doing, unless that is to write a state."""
        self.saving.acquire(timeout=SAVE_TIMEOUT)
        with suppress(OSError):
            if self.path.stat().st_ino == self.inode:  # not yet replaced by a successor's
                self.path.unlink()
        sys.stdout.flush()
        # Not sys.exit: another thread may be in the middle of a window. Its state file is whole.
        os._exit(0)


def _on_sigterm(action: Callable[[], None]) -> None:
    """Call ``action`` in a thread at SIGTERM, even while this thread computes or writes."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def wait() -> None:
        while os.read(reader, 1)[0] != signal.SIGTERM:  # an app may handle other signals
            pass
        action()

    def undo() -> None:  # for example in the workers of a DataLoader
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=undo)
    threading.Thread(target=wait, daemon=True).start()
    # A handler in Python waits until this thread's current call into C returns. The descriptor does
    # not, but asyncio may set another.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, _: os.write(writer, bytes([number])))


def _described(error: Exception) -> tuple[str, str, str, str]:
    """Return module, class, words and traceback of the error that is being handled."""
    kind = type(error)
    return kind.__module__, kind.__qualname__, str(error), traceback.format_exc()


def _call(app: Any, name: str) -> None:
    """Call a method that the app may have: it may be any ClientApp."""
    if method := getattr(app, name, None):
        method()


def main(arguments: list[str]) -> NoReturn:
    """Run as ``python -m`` of this module with --saves-state REFERENCE RUN PATH LISTENER PID..."""
    _, reference, run, path, listener, *node = arguments
    trainer = Trainer(reference, run, Path(path), int(listener))
    for pid in node:
        on_exit(int(pid), trainer.end)
    _on_sigterm(trainer.end)
    trainer.serve()


if __name__ == "__main__":
    main(sys.argv[1:])
