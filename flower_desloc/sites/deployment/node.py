"""A SuperNode that polls often while it is receiving messages: `desloc supernode`.

A SuperNode of Flower 1.41 that finds no message sleeps for three seconds, which no setting changes,
so every window waits for that. This SuperNode sleeps longer the longer no message has arrived, up
to Flower's three seconds. Everything else, its arguments included, is that of `flower-supernode`.
"""

import os
import sys
import time
from types import SimpleNamespace
from typing import Any

COMMAND = (sys.executable, "-P", "-m", "flower_desloc.sites.deployment.node")
"""Runs this file; -P keeps modules in the working directory from being imported."""

_SHORTEST, _LONGEST = 0.1, 3.0


class PollInterval:
    """How long to sleep after a poll that found no message.

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


def main() -> None:
    """Run `flower-supernode` with the arguments of the command line."""
    from flwr.supernode import start_client_internal as loop
    from flwr.supernode.cli import flower_supernode

    interval, pull = PollInterval(), loop._pull_and_store_message

    def pull_and_note(*args: Any, **kwargs: Any) -> int | None:
        run_id = pull(*args, **kwargs)
        if run_id is not None:
            interval.message_received()
        return run_id

    # Flower's loop offers no other hook: these are its own names for pulling and sleeping.
    loop._pull_and_store_message = pull_and_note
    loop.time = SimpleNamespace(**vars(time) | {"sleep": interval.sleep})  # type: ignore[attr-defined,assignment]
    # How often its SuperExec asks for work: once a second by default.
    os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1")
    sys.argv[0] = "flower-supernode"
    flower_supernode()


if __name__ == "__main__":
    main()
