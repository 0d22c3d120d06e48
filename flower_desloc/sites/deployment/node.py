"""A SuperNode that looks for messages often while it is sent any: `desloc supernode`.

A SuperNode of Flower 1.41 that finds no message sleeps for three seconds, which no setting changes,
so every window waits for that. This one is Flower's own in everything else: the longer nothing has
come, the longer it sleeps, up to Flower's three seconds.

Its arguments are those of `flower-supernode`.
"""

import os
import sys
import time
from types import SimpleNamespace
from typing import Any

COMMAND = (sys.executable, "-P", "-m", "flower_desloc.sites.deployment.node")
"""What runs this file, without what is in the working directory."""

_SHORTEST, _LONGEST = 0.1, 3.0


class Pauses:
    """How long to sleep after a look that found nothing.

    A twentieth of the time since something was found: waiting is at most 5 % longer for it, and a
    node that is sent nothing for a minute asks no more often than Flower's.
    """

    def __init__(self, clock: Any = time) -> None:
        self._clock = clock
        self._found = -float("inf")

    def found(self) -> None:
        """Note that there was something."""
        self._found = self._clock.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep for ``seconds`` at most."""
        since = (self._clock.monotonic() - self._found) / 20
        self._clock.sleep(min(max(since, _SHORTEST), _LONGEST, seconds))


def main() -> None:
    """Run `flower-supernode` with the arguments of the command line."""
    from flwr.supernode import start_client_internal as loop
    from flwr.supernode.cli import flower_supernode

    pauses, pull = Pauses(), loop._pull_and_store_message

    def pull_and_note(*args: Any, **kwargs: Any) -> int | None:
        run_id = pull(*args, **kwargs)
        if run_id is not None:
            pauses.found()
        return run_id

    # Flower's loop has no other seam: these are its own names for the two.
    loop._pull_and_store_message = pull_and_note
    loop.time = SimpleNamespace(**vars(time) | {"sleep": pauses.sleep})  # type: ignore[attr-defined,assignment]
    # How often its SuperExec asks for work: once a second otherwise.
    os.environ.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1")
    sys.argv[0] = "flower-supernode"
    flower_supernode()


if __name__ == "__main__":
    main()
