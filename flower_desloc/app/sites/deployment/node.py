"""A SuperNode that polls often while it is receiving messages: `desloc supernode`.

A SuperNode of Flower 1.41 that finds no message sleeps for three seconds, which no setting changes,
so every window waits for that. This SuperNode sleeps longer the longer no message has arrived, up
to Flower's three seconds.

A ClientApp's process starts while its SuperNode still downloads the message, and asks for what is
not there yet after 1, 2, 4, 8 and 10 seconds. Its SuperExec asks for a task once a second, and each
question costs a hundredth of a second of a core at either end. This SuperNode answers when there is
what they ask for. The processes of ClientApps are forked (``superexec``).

With ``accept-app`` in its node config it runs only these apps (``accepted``). Everything else, its
arguments included, is that of `flower-supernode`.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from flower_desloc.app.sites.deployment import superexec
from flower_desloc.app.sites.supervisor import SAVE_TIMEOUT, describe_exit, end_savers

COMMAND = (sys.executable, "-P", "-m", "flower_desloc.app.sites.deployment.node")
"""Runs this file; -P keeps modules in the working directory from being imported."""

_SHORTEST, _LONGEST = 0.1, 3.0
_LOOK = 0.05  # seconds between two looks of a handler that waits
_LONGEST_ANSWER = 5.0  # seconds; below the timeouts of Flower's clients
_LONGEST_END = 10.0  # seconds that a SuperNode may take to end, or to be asked to after its parts
_leaving, _failed = threading.Event(), threading.Event()


class PollInterval:
    """Time to sleep after a poll that found no message.

    One twentieth of the time since the last message, so polling delays a message by at most 5 %;
    after a minute without a message the node polls no more often than Flower's.
    """

    def __init__(self, clock: Any = time) -> None:
        self._clock = clock
        self._last_message = -float("inf")

    def message_received(self) -> None:
        """Restart from the shortest interval."""
        self._last_message = self._clock.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep for ``seconds`` at most."""
        interval = (self._clock.monotonic() - self._last_message) / 20
        self._clock.sleep(min(max(interval, _SHORTEST), _LONGEST, seconds))


def answers_when(
    is_ready: Callable[[Any], bool], handler: Callable[..., Any], clock: Any = time
) -> Callable[..., Any]:
    """Return Flower's ``handler``, which then answers when its answer ``is_ready``.

    It answers as before after some seconds.
    """

    def patient_handler(*args: Any) -> Any:
        until = clock.monotonic() + _LONGEST_ANSWER
        while True:
            answer = handler(*args)
            if is_ready(answer) or clock.monotonic() >= until:
                return answer
            clock.sleep(_LOOK)

    return patient_handler


def has_arrived(answer: Any) -> bool:
    """Return whether the object that was asked for is there, or will never be."""
    return answer.object_available or not answer.object_found


def has_task(answer: Any) -> bool:
    """Return whether a SuperExec that asked for a task has one."""
    return bool(answer.HasField("task"))


def start_superexec(command: list[str]) -> object:
    """Start the SuperExec of this package with the arguments of Flower's ``command``.

    When it ends, this process ends too: it would stay online, but answer no message.
    """
    process = subprocess.Popen([*superexec.COMMAND, *command[1:]])  # noqa: S603

    def wait() -> None:
        ended = describe_exit(process.wait())
        if _leaving.wait(_LONGEST_END):  # as after Ctrl-C, which ends both
            return
        print(f"The SuperExec {ended}, so this SuperNode ends.", file=sys.stderr, flush=True)
        _failed.set()
        os.kill(os.getpid(), signal.SIGTERM)  # Flower's own way out tells the SuperLink
        time.sleep(SAVE_TIMEOUT + _LONGEST_END)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    return process


def leave() -> None:
    """Let the trainers of this SuperNode write the state of a window that they have replied to.

    In a container all processes are killed once this one has ended.
    """
    _leaving.set()
    end_savers(os.getpid())


def main() -> None:
    """Run `flower-supernode` with the arguments of the command line."""
    # Imported here: the command line, which needs the name of this file only, would wait for them.
    from flower_desloc.app.sites.deployment.accepted import accepting
    from flower_desloc.flower.internals import (
        add_exit_handler,
        flower_supernode,
        runtime_handlers,
    )
    from flower_desloc.flower.internals import start_client_internal as loop
    from flower_desloc.flower.protection import APPS_COMPARED

    interval, pull = PollInterval(), accepting(loop._pull_and_store_message)

    def pull_and_note(*args: Any, **kwargs: Any) -> int | None:
        run_id = pull(*args, **kwargs)
        if run_id is not None:
            interval.message_received()
        return run_id

    # Flower offers no other hook: these are its own names for pulling, sleeping, and starting.
    runtime_handlers.pull_object = answers_when(has_arrived, runtime_handlers.pull_object)
    runtime_handlers.acquire_task = answers_when(has_task, runtime_handlers.acquire_task)
    loop._pull_and_store_message = pull_and_note
    loop.time = SimpleNamespace(**vars(time) | {"sleep": interval.sleep})  # type: ignore[attr-defined,assignment]
    if sys.platform == "linux":
        loop.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": start_superexec})  # type: ignore[attr-defined,assignment]
    os.environ[APPS_COMPARED] = "1"  # its ClientApps refuse `accept-app` without
    # How long its SuperExec waits between an answer, which may take seconds, and the next question.
    os.environ["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "0.01"
    sys.argv[0] = "flower-supernode"
    add_exit_handler(leave, run_before_force_exit=True)
    try:
        flower_supernode()
    except SystemExit as exiting:
        sys.exit(1 if _failed.is_set() else exiting.code)


if __name__ == "__main__":
    main()
