"""Starting a program of Flower's that nobody else sees, and that ends with us."""

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path

from flower_desloc.sites.deployment import guard

_LAST_LINES = 20
_FIRST_PORT, _MOST_PORTS = 20_000, 10_000
_PORTS = cycle(
    random.SystemRandom().sample(range(_FIRST_PORT, _FIRST_PORT + _MOST_PORTS), _MOST_PORTS)
)

# Ray's socket names are about 68 characters long and may have 107, on macOS 103.
_LONGEST_TMPDIR = 20


class ProcessError(RuntimeError):
    """A program of Flower's did not start, refused what was asked, or went away."""


@contextmanager
def guarded(
    home: Path, command: Sequence[str], environment: Mapping[str, str], *, restart: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``command`` in ``home/cwd``, its output in ``home/log``; yield its guard.

    With ``restart`` it is started again whenever it ends by itself.
    """
    flags = ["--restart"] if restart else []
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-I", guard.__file__, *flags, str(home), *command],
        env=environment,
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait()
        guard.take_down(home)  # nothing is left to do, unless somebody killed the guard


def log_of(home: Path) -> str:
    """Return what the process of ``home`` has written so far."""
    try:
        return (home / guard.LOG).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:  # its guard is just starting
        return ""


def last_words(home: Path) -> str:
    """Return the end of what the process of ``home`` has written."""
    return "\n".join(log_of(home).splitlines()[-_LAST_LINES:])


def program(name: str, environment: Mapping[str, str]) -> str:
    """Return the path of a program that comes with Flower."""
    found = shutil.which(name, path=environment["PATH"])
    if found is None:
        raise ProcessError(
            f"no {name} beside {sys.executable} or on PATH; install with `pip install -e .`"
        )
    return found


@contextmanager
def private_home() -> Iterator[Path]:
    """Make a folder for FLWR_HOME, with an empty ``cwd`` in it, and delete it in the end."""
    home = _private_folder()
    try:
        (home / "cwd").mkdir()
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _private_folder() -> Path:
    system = tempfile.gettempdir()
    short = system if len(system) <= _LONGEST_TMPDIR else "/tmp"  # noqa: S108
    return Path(tempfile.mkdtemp(prefix="desloc-", dir=short)).resolve()


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on, another one each time.

    Whoever is to listen there does so seconds later. No connection may have been given the port
    until then: Linux gives them ports from 32768 on, others from 49152.

    Raises :class:`ProcessError` when there is none.
    """
    for port in islice(_PORTS, _MOST_PORTS):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ProcessError(f"of the ports from {_FIRST_PORT} on none of {_MOST_PORTS} is free")


def flower_environment(home: Path) -> dict[str, str]:
    """Return our environment, less what would lead Flower or Ray elsewhere.

    PYTHONPATH stays, because some clusters provide packages by it. Measured with Flower 1.41 and
    Ray 2.55, with another client_app, server_app and flower_desloc on PYTHONPATH, and this package
    installed by `pip install -e .`: ServerApp and Ray actors import all three from the app that was
    submitted, whose folder Flower puts first. Only the working directory goes before it, in the
    actors; ours is empty.
    """
    stale = ("FLWR_", "RAY_ADDRESS", "RAY_TMPDIR")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(stale)}
    # Flower starts its parts by name, from PATH: a `desloc` called by its full path, without the
    # environment activated, would run them from elsewhere or not at all.
    programs = [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
    # Flower's client obeys the proxy variables, for 127.0.0.1 too.
    direct = ",".join(filter(None, [os.environ.get("no_proxy"), os.environ.get("NO_PROXY")]))
    quiet = "ignore::FutureWarning:ray._private.worker"
    return environment | {
        "PATH": os.pathsep.join(programs),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # How soon a submitted run is noticed; 1 s if not set.
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        # Otherwise ray.init() joins a cluster it finds under /tmp/ray, and leaves its logs there.
        "RAY_TMPDIR": str(home),
        "NO_PROXY": f"{direct},127.0.0.1,localhost".lstrip(","),
        "no_proxy": f"{direct},127.0.0.1,localhost".lstrip(","),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), quiet])),
        # The width of this terminal, for what the ServerApp prints with rich.
        "COLUMNS": str(shutil.get_terminal_size().columns),
    }
