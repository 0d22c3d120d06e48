"""Injected faults, and the outcome that the algorithm prescribes.

    faults = Faults(run)
    faults.fail_at(node=2, window=3, phase="uploading")
    states = run.start()
    assert_close(states, faults.expected())

Client 2 of a ``flower_path.Run`` is killed in the third window, after it has trained and saved
and before its reply is sent: that window of that client runs in a process of its own, which ends by
SIGKILL.

``Faults.expected`` is Algorithm 1 of reference.py with these clients absent, unheard or new.
"""

import contextlib
import os
import resource
import signal
import sys
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from flower_path import Run, oracle
from flwr.app import Context, Error, Message, RecordDict
from reference import State

from flower_desloc.flower import tensor_file
from flower_desloc.flower.observer import EventKind

Phase = Literal["starting", "training", "saving", "uploading"]
"""Where a client is killed: before its first step, in its last step, half through its state file,
or when only the reply is missing."""

Outcome = Literal["undone", "unheard", "new", "unharmed"]
"""The outcome of a fault for the client.

undone    as if it had been away: its state is that of before the window
unheard   it has taken its steps and kept them, but is not in the averages
new       it starts the window from the last averages, or from zeros where there is none
unharmed  nothing happens
"""

Answer = Callable[[Message, Context], Message]
Spoil = Callable[[RecordDict], object]


@dataclass(frozen=True)
class Fault:
    """A fault of client ``node`` in window ``window`` (1 is the first)."""

    node: int
    window: int
    outcome: Outcome
    kind: EventKind | None
    """Kind of the event that must be recorded, and a pattern of its text; None: no event."""
    words: str = ""
    around: Callable[[Answer, Message, Context], Message] = lambda answer, *asked: answer(*asked)
    """Replaces the call of the client's app."""
    reply: Callable[[Message], list[Message]] = lambda reply: [reply]
    """What arrives at the server instead of the reply."""


UNHARMED = Fault(-1, -1, "unharmed", None)


class Faults:
    """The faults of one run, stated in the order of the windows; each happens once."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.planned: list[Fault] = []
        self._at_the_client: dict[tuple[int, int], Fault] = {}
        self._on_the_way: dict[tuple[int, int], Fault] = {}
        self._before: dict[int, Message] = {}  # every client's last reply
        self._late: dict[str, Message] = {}  # by the request's id
        self._client_app, self._pull = run.grid.client_app, run.grid.pull_messages
        run.grid.client_app = self._app
        run.grid.pull_messages = self._pulled  # type: ignore[method-assign]

    # Faults

    def fail_at(self, *, node: int, window: int, phase: Phase) -> None:
        """The client's process is killed in this phase of the window."""

        def around(answer: Answer, message: Message, context: Context) -> Message:
            def answer_and_die() -> None:
                self._arm(phase, message)
                answer(message, context)
                _die()

            _kill_in_a_child(answer_and_die)
            return Message(Error(8, "ClientApp stopped responding."), reply_to=message)

        outcome: Outcome = "unheard" if phase == "uploading" else "undone"
        self._plan(Fault(node, window, outcome, "failed", "stopped responding", around))

    def diverge_at(self, *, node: int, window: int) -> None:
        """The client's loss is infinite."""

        def around(answer: Answer, message: Message, context: Context) -> Message:
            self._change_losses(lambda loss, t: loss * torch.inf)
            try:
                return answer(message, context)
            finally:
                object.__delattr__(self.run.problem, "loss")

        self._plan(Fault(node, window, "undone", "failed", "training diverged", around))

    def exit_at(self, *, node: int, window: int) -> None:
        """The client's code calls ``sys.exit``, as after a check of its own."""

        def around(answer: Answer, message: Message, context: Context) -> Message:
            self._change_losses(lambda loss, t: sys.exit(0))
            try:
                return answer(message, context)
            finally:
                object.__delattr__(self.run.problem, "loss")

        self._plan(Fault(node, window, "undone", "failed", r"called sys\.exit\(0\)", around))

    def lose_state_at(self, *, node: int, window: int) -> None:
        """The client's state file is gone when the window begins."""

        def around(answer: Answer, message: Message, context: Context) -> Message:
            self.run.files(node).delete()
            return answer(message, context)

        # Before its first completed window there is nothing to lose.
        undone = {f.window for f in self.planned if f.node == node and f.outcome == "undone"}
        if undone >= set(range(1, window)):
            self._plan(Fault(node, window, "unharmed", None, "", around))
        else:
            self._plan(Fault(node, window, "new", "state lost", "", around))

    def damage_state_at(self, *, node: int, window: int) -> None:
        """Bits of the client's state file have flipped when the window begins, in every tensor."""

        def around(answer: Answer, message: Message, context: Context) -> Message:
            path = max(self.run.files(node).folder.iterdir())
            data = bytearray(path.read_bytes())
            header = 8 + int.from_bytes(data[:8], "little")
            data[header::8] = bytes(byte ^ 4 for byte in data[header::8])
            path.write_bytes(data)
            return answer(message, context)

        self._plan(Fault(node, window, "new", "state lost", "", around))

    def fill_disk_at(self, *, node: int, window: int) -> None:
        """The client's state cannot be written: its file exceeds a limit."""

        def around(answer: Answer, message: Message, context: Context) -> Message:
            with files_of_at_most(100):  # bytes, less than a header
                return answer(message, context)

        self._plan(Fault(node, window, "undone", "failed", "File too large", around))

    def be_late_at(self, *, node: int, window: int) -> None:
        """The reply does not arrive within the policy's timeout, but before the next window."""

        def held_back(reply: Message) -> list[Message]:
            self._late[reply.metadata.reply_to_message_id] = reply
            return []

        self._plan(Fault(node, window, "unheard", "late", "was not answered", reply=held_back))

    def lose_request_at(self, *, node: int, window: int) -> None:
        """The reply never arrives."""
        self._plan(Fault(node, window, "unheard", "late", "was not answered", reply=lambda _: []))

    def spoil_at(self, *, node: int, window: int, spoil: Spoil, words: str) -> None:
        """The reply is malformed."""

        def changed(reply: Message) -> list[Message]:
            spoil(reply.content)
            return [reply]

        self._plan(Fault(node, window, "unheard", "refused", words, reply=changed))

    def answer_twice_at(self, *, node: int, window: int) -> None:
        """The reply arrives twice."""
        self._plan(Fault(node, window, "unharmed", None, reply=lambda reply: [reply, copy(reply)]))

    def answer_the_last_at(self, *, node: int, window: int) -> None:
        """The client sends its reply to the window before."""

        def stale(reply: Message) -> list[Message]:
            reply.content = self._before[node].content
            return [reply]

        words = "its reply is for the steps|its reply has the stream"
        self._plan(Fault(node, window, "unheard", "refused", words, reply=stale))

    # Injection

    def _plan(self, fault: Fault) -> None:
        at = (fault.node, fault.window)
        assert at not in self._at_the_client, f"{at} has a fault already"
        self.planned.append(fault)
        self._at_the_client[at] = self._on_the_way[at] = fault

    def _app(self, message: Message, context: Context) -> Message:
        # Once: it is asked again where it has lost its state.
        fault = self._at_the_client.pop(_place(message), UNHARMED)
        return fault.around(self._client_app, message, context)

    def _pulled(self, message_ids: Any) -> list[Message]:
        replies: list[Message] = []
        for message_id in message_ids:
            asked = next(m for m in self.run.grid.sent if m.metadata.message_id == message_id)
            node, window = _place(asked)
            if asked.metadata.dst_node_id in self.run.strategy.loop.exchange.silent:
                replies += filter(None, [self._late.pop(message_id, None)])
            for reply in self._pull([message_id]):
                replies += self._on_the_way.pop((node, window), UNHARMED).reply(reply)
                if window > 0 and reply.has_content():
                    self._before[node] = reply
        return replies

    def _arm(self, phase: Phase, message: Message) -> None:
        """Let this process, which is the client's own, die in the phase."""
        if phase == "starting":
            _die()
        if phase == "training":
            stop: Any = message.content["config"]["stop-step"]
            self._change_losses(lambda loss, t: _die() if t == stop - 1 else loss)
        if phase == "saving":
            write = tensor_file.write

            def torn(path: Path, *args: Any, **kwargs: Any) -> None:
                write(path, *args, **kwargs)
                os.truncate(path, path.stat().st_size // 2)
                _die()

            tensor_file.write = torn

    def _change_losses(self, change: Callable[[torch.Tensor, int], Any]) -> None:
        problem, loss = self.run.problem, self.run.problem.loss
        object.__setattr__(problem, "loss", lambda module, m, t: change(loss(module, m, t), t))

    # Expected outcome

    def expected(self) -> list[State]:
        """Return what every client holds in the end, including the averages."""
        outcomes = {(fault.node, fault.window): fault.outcome for fault in self.planned}
        ends = [window.stop for window in self.run.schedule.windows(self.run.num_steps)]

        def outcome(m: int, t: int) -> Outcome:
            return outcomes.get((m, bisect_right(ends, t) + 1), "unharmed")

        return oracle(
            self.run,
            present=lambda m, t: outcome(m, t) != "undone",
            heard=lambda m, t: outcome(m, t) != "unheard",
            restarts=lambda m, t: t in ends and outcome(m, t) == "new",
        )


def _place(message: Message) -> tuple[int, int]:
    """Return client and window of a message; window 0 for anything but training."""
    if message.metadata.message_type != "train":
        return message.metadata.dst_node_id - 1, 0
    config: Any = message.content["config"]
    return message.metadata.dst_node_id - 1, int(config["server-round"])


def _kill_in_a_child(act: Callable[[], None]) -> None:
    """Let a child of this process act; it must end by SIGKILL."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads; there is one
        child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            os._exit(1)  # it was not killed
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Limit the files that this process writes to so many bytes, as a full disk does."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
