"""Environment of a Flower program: home folder, environment variables, port, arguments."""

import os
import random
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from flower_desloc.app.sites.supervisor import ProcessError
from flower_desloc.flower.system import direct_on_loopback, new_temporary_folder, remove

_PORTS = iter(random.SystemRandom().sample(range(20_000, 30_000), 10_000))

# The paths of Ray's sockets add about 68 characters; the limit is 107, on macOS 103.
_LONGEST_TMPDIR = 20


@dataclass(frozen=True)
class Host:
    """Host of a SuperLink or a SuperNode: this machine, or a network namespace of it."""

    enter: tuple[str, ...] = ()
    """Words before every command line, such as ``("ip", "netns", "exec", NAME)``."""
    superlink: str = ""
    """Host and port of the SuperLink as seen from here; empty: 127.0.0.1 and a free port."""


HERE = Host()


@contextmanager
def private_home() -> Iterator[Path]:
    """Make a folder for FLWR_HOME with an empty ``cwd`` in it; delete it on exit.

    Raises ``ProcessError`` if it cannot be made.
    """
    try:
        home = new_temporary_folder(_LONGEST_TMPDIR)
    except OSError as error:
        raise ProcessError(str(error)) from error
    try:
        (home / "cwd").mkdir()
        yield home
    finally:
        remove(home)


def program(name: str, environment: Mapping[str, str]) -> str:
    """Return the path of a program that comes with Flower."""
    found = shutil.which(name, path=environment["PATH"])
    if found is None:
        raise ProcessError(
            f"no {name} next to {sys.executable} or on PATH; install flwr[simulation] there"
        )
    return found


def free_port() -> int:
    """Return a free port of 127.0.0.1, a different one each time.

    The program that gets it listens seconds later. Until then no connection can take it: Linux
    assigns connections ports from 32768, other systems from 49152.

    Raises ``ProcessError`` when no port is free.
    """
    for port in _PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ProcessError("no port from 20000 to 29999 is free")


def flower_environment(home: Path) -> dict[str, str]:
    """Return this process's environment without what would misdirect Flower or Ray.

    PYTHONPATH is kept, because some clusters provide packages by it. Measured with Flower 1.41 and
    Ray 2.55, with another client_app, server_app and flower_desloc on PYTHONPATH and this package
    installed by `pip install -e .`: ServerApp and Ray actors import all three from the submitted
    app, whose folder Flower puts first. In the actors only the working directory comes before it;
    ours is empty.
    """
    stale = ("FLWR_", "RAY_ADDRESS", "RAY_TMPDIR")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(stale)}
    # Flower starts its parts by name from PATH. If `desloc` is called by its full path, without
    # the virtual environment activated, PATH would find other programs or none.
    programs = [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
    quiet = "ignore::FutureWarning:ray._private.worker"
    return direct_on_loopback(environment) | {
        "PATH": os.pathsep.join(programs),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Seconds until a SuperLink notices a submitted run, 1 by default. It asks all the time that
        # the run takes, which at 0.1 takes a tenth of a core.
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
        # Otherwise ray.init() joins a cluster it finds under /tmp/ray, and leaves its logs there.
        "RAY_TMPDIR": str(home),
        # The clients' priority is the command's. Ray lowers it by 15, and beside another busy
        # process they would get a thirtieth of a core.
        "RAY_worker_niceness": environment.get("RAY_worker_niceness", "0"),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), quiet])),
        # The width of this terminal, for what the ServerApp prints with rich.
        "COLUMNS": str(shutil.get_terminal_size().columns),
    }


def as_argument(settings: Mapping[str, str | int | float]) -> str:
    """Return the value of `--run-config`, `--federation-config` or `--node-config`."""
    return " ".join(f"{key}={_toml(value)}" for key, value in settings.items())


def _toml(value: str | int | float) -> str:
    if not isinstance(value, str):
        return str(value)
    # Flower ends a value at the next quotation mark, even an escaped one. TOML also accepts it as
    # a Unicode escape.
    special = str.maketrans({'"': "\\u0022", "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"})
    return f'"{value.translate(special)}"'
