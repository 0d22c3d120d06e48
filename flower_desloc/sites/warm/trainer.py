"""The trainer: one node's ClientApp of one run, in a process that outlives the messages.

Started by ``door`` with an open socket and handles on the node's processes.
It ends with the run, with the node, after an error, when another run's message comes, when the
process it works for is gone, or when nothing has come for a while; at once in each case, as nothing
is lost.
"""

import contextlib
import os
import select
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity

from flower_desloc.sites.warm.app import load
from flower_desloc.sites.warm.wire import (
    Stream,
    read_context,
    read_head,
    read_message,
    write_context,
    write_head,
    write_message,
)

_IDLE = 600.0  # seconds without a message; to begin anew then is little beside the wait
_GOODBYE = "query.goodbye"


class Trainer:
    """Serves the app that ``reference`` names to the messages of one run, one at a time."""

    def __init__(
        self, reference: str, run: str, path: Path, listener: int, node: list[int]
    ) -> None:
        self.reference = reference
        self.run = run
        self.path = path
        self.inode = path.stat().st_ino
        self.listener = socket.socket(fileno=listener)
        self.node = node  # pidfds: readable when such a process has ended

    def serve(self) -> NoReturn:
        """Answer messages until there is a reason to end."""
        with contextlib.suppress(OSError, EOFError):  # whoever asked is gone
            while _ready(self.listener, *self.node, timeout=_IDLE) == [self.listener]:
                line, _ = self.listener.accept()
                with line.makefile("rwb") as stream:
                    if not self._serve(line, stream):
                        break
                line.close()
        self._end()

    def _serve(self, line: socket.socket, stream: Stream) -> bool:
        """Answer one message; return whether more may come."""
        head = read_head(stream)
        if head["run"] != self.run:
            return False
        message, context = read_message(stream), read_context(stream)
        TaskIdentity.task_id = head["task"]
        TaskIdentity.run_id, TaskIdentity.node_id = context.run_id, context.node_id
        reply: Message | None = None
        head = {}
        with self._ending_with(line):
            try:
                reply = load(self.reference)(message, context)
            except Exception as error:
                kind = type(error)
                head = {"raised": [kind.__module__, kind.__qualname__, str(error)]}
                head["traceback"] = traceback.format_exc()
        write_head(stream, head)
        write_context(stream, context)
        if reply is not None:
            write_message(stream, reply, release=True)
        stream.flush()
        # What raised may be this process itself: after a CUDA error, nothing works in it any more.
        return reply is not None and message.metadata.message_type != _GOODBYE

    @contextlib.contextmanager
    def _ending_with(self, line: socket.socket) -> Iterator[None]:
        """End this process if meanwhile the node or the process that asked does."""
        done, tell = os.pipe()

        def watch() -> None:
            if done not in _ready(done, line, *self.node):
                self._end()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            os.close(tell)  # readable, as at its end
            watcher.join()
            os.close(done)

    def _end(self) -> NoReturn:
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self.inode:  # not yet a successor's
                self.path.unlink()
        sys.stdout.flush()
        # Not sys.exit: a thread may be in the middle of a window. Its state file is whole.
        os._exit(0)


def _ready(*files: Any, timeout: float | None = None) -> list[Any]:
    return select.select(files, [], [], timeout)[0]


def main(arguments: list[str]) -> Any:
    """Run as ``python -m flower_desloc.sites.warm.trainer REFERENCE RUN PATH LISTENER NODE...``."""
    reference, run, path, listener, *node = arguments
    Trainer(reference, run, Path(path), int(listener), [int(handle) for handle in node]).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
