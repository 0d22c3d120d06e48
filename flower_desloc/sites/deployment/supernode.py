"""A SuperNode that is kept running: started again whenever it ends."""

import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flower_desloc.sites.deployment.arguments import as_argument
from flower_desloc.sites.deployment.guard import ENDED
from flower_desloc.sites.deployment.node import COMMAND
from flower_desloc.sites.deployment.processes import (
    ProcessError,
    flower_environment,
    free_port,
    guarded,
    last_words,
    log_of,
)

KEY = "key"
"""Name of the file in a SuperNode's home that holds its private key."""

_START_TIMEOUT = 120.0


@dataclass(frozen=True)
class SuperNode:
    """A SuperNode of ours."""

    home: Path
    guard: subprocess.Popen[bytes]

    def wait_until_online(self) -> None:
        """Return when the SuperLink has taken it in.

        Raises :class:`ProcessError` with the end of its log if it was turned away, or takes long.
        """
        deadline = time.monotonic() + _START_TIMEOUT
        while "SuperNode ID: " not in (log := log_of(self.home)):
            # It would be started again, but what turned it away at first will do so again.
            if ENDED in log or time.monotonic() > deadline:
                raise ProcessError(
                    f"a SuperNode did not come online; its log ends with\n{last_words(self.home)}"
                )
            time.sleep(0.05)

    @property
    def has_complained(self) -> bool:
        """Whether its log holds an error, its own or its ClientApp's, or it has ended."""
        log = log_of(self.home)
        return "ERROR" in log or "Traceback" in log or ENDED in log


@contextmanager
def supernode(
    home: Path, superlink: str, ca: Path, settings: Mapping[str, str | int], *, threads: int
) -> Iterator[SuperNode]:
    """Start the SuperNode that has ``home`` and its key; in the end take it down.

    Parameters
    ----------
    home : Path
        Its FLWR_HOME: one for each, because of two ClientApps that unpack the app into one folder
        one may import the other's half.
    superlink : str
        Host and port of the SuperLink.
    ca : Path
        Certificate of the authority that signed the SuperLink's.
    settings : Mapping[str, str | int]
        Its node config.
    threads : int
        Threads of its ClientApp, which would else take every core.

    """
    environment = flower_environment(home) | {
        "OMP_NUM_THREADS": str(threads),
        "TMPDIR": str(home),  # what a ClientApp that is killed leaves there goes with the rest
    }
    command = [
        *COMMAND,
        *("--superlink", superlink),
        *("--root-certificates", str(ca)),
        *("--auth-supernode-private-key", str(home / KEY)),
        *("--node-config", as_argument(settings)),
        *("--host", "127.0.0.1"),
        *("--port", str(free_port())),
    ]
    with guarded(home, command, environment, restart=True) as guard:
        yield SuperNode(home, guard)
