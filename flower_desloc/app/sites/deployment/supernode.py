"""A supervised SuperNode: it is restarted whenever it ends."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from flower_desloc.app.sites.deployment.environment import (
    as_argument,
    flower_environment,
    free_port,
)
from flower_desloc.app.sites.deployment.node import COMMAND
from flower_desloc.app.sites.supervisor import Supervised, supervised

KEY = "key"
"""Name of the file in a SuperNode's home that holds its private key."""


class SuperNode(Supervised):
    """A SuperNode under a supervisor."""

    def wait_until_online(self) -> None:
        """Wait until the SuperLink has accepted it; raises ``ProcessError`` if it refuses."""
        # A SuperNode that ends is restarted, but what refused it the first time will do so again.
        self.wait_for_log("SuperNode ID: ", "a SuperNode did not come online")

    @property
    def has_errors(self) -> bool:
        """True if it has ended, or its log holds an error of its own or of its ClientApp."""
        return self.has_exited or any(word in self.log() for word in ("ERROR", "Traceback"))


@contextmanager
def supernode(
    home: Path,
    superlink: str,
    ca: Path,
    node_config: Mapping[str, str | int],
    *,
    threads: int,
    enter: Sequence[str] = (),
) -> Iterator[SuperNode]:
    """Start a SuperNode, and end it with everything it started on exit.

    Parameters
    ----------
    home : Path
        Its FLWR_HOME, which holds its key. Each SuperNode needs its own: two ClientApps that unpack
        the app into one folder may import it half-written.
    superlink : str
        Host and port of the SuperLink.
    ca : Path
        Certificate of the authority that signed the SuperLink's certificate.
    node_config : Mapping[str, str | int]
        Its node config.
    threads : int
        Threads of its ClientApp, which would otherwise use every core.
    enter : Sequence[str], optional
        Words before its command line (``Host``).

    """
    environment = flower_environment(home) | {
        "OMP_NUM_THREADS": str(threads),
        "TMPDIR": str(home),  # files of a killed ClientApp are deleted with the home
    }
    command = [
        *enter,
        *COMMAND,
        *("--superlink", superlink),
        *("--root-certificates", str(ca)),
        *("--auth-supernode-private-key", str(home / KEY)),
        *("--node-config", as_argument(node_config)),
        *("--host", "127.0.0.1"),
        *("--port", str(free_port())),
    ]
    with supervised(home, command, environment, restart=True) as process:
        yield SuperNode(process.home, process.supervisor)
