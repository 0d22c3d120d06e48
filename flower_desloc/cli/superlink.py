"""A SuperLink of one's own, for one run, that leaves nothing behind.

Why not the one `flwr run` starts or finds: it lives on in the folder where it was first started,
and simulated clients import `client_app` from *there* if there is one (Ray puts the driver's
working directory first on sys.path), silently, instead of from the app that was submitted.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_desloc.cli.guard import take_down

CONNECTION = "local"
"""Name of the connection, as in the configuration Flower itself writes: a command printed by us
works when it is typed again without us."""

_START_TIMEOUT = 120.0
# Ray's socket names are about 68 characters long and may have 107, on macOS 103.
_LONGEST_TMPDIR = 20


class SuperLinkError(RuntimeError):
    """Flower did not start, refused the run, or went away."""


@dataclass(frozen=True)
class RunStatus:
    """What the SuperLink says of a run."""

    state: str
    """`pending`, `starting`, `running` or `finished:` with `completed`, `failed` or `stopped`."""
    details: str

    @property
    def finished(self) -> bool:
        """Whether the run is over, well or not."""
        return self.state.startswith("finished")

    @property
    def completed(self) -> bool:
        """Whether the run is over and no exception ended it."""
        return self.state == "finished:completed"


@dataclass(frozen=True)
class SuperLink:
    """A running SuperLink, and the `flwr` command that talks to it."""

    home: Path
    environment: Mapping[str, str]
    guard: subprocess.Popen[bytes]

    def submit(self, command: Sequence[str]) -> str:
        """Run a `flwr run ... --format json` and return the id of the run it started."""
        return str(self._flwr(command)["run-id"])

    def status(self, run_id: str) -> RunStatus:
        """Return the status of a run, which is the truth: `flwr run` and `flwr log` exit by 0."""
        answer = self._flwr(["flwr", "ls", CONNECTION, "--run-id", run_id, "--format", "json"])
        run = answer["runs"][0]
        return RunStatus(run["status"], run["status-details"])

    def log(self, run_id: str) -> Iterator[str]:
        """Yield the lines of a run, from its first, as they come, until it has finished.

        The simulation hands its output to the SuperLink every 0.2 s, which hands it out every
        0.5 s; the SuperLink's own output has nothing of it.
        """
        # In a session of its own, so that Ctrl-C comes to us alone.
        with subprocess.Popen(  # noqa: S603
            ["flwr", "log", run_id, CONNECTION, "--stream"],  # noqa: S607
            cwd=self.home / "cwd",
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    yield line.rstrip("\n")
            finally:
                process.kill()

    def _flwr(self, command: Sequence[str]) -> dict[str, Any]:
        done = subprocess.run(  # noqa: S603
            command,
            cwd=self.home / "cwd",
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
            check=False,
        )
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            answer = {"error-message": done.stdout + done.stderr}
        # With `--format json` Flower exits by 0 even when it says "success": false.
        if not (isinstance(answer, dict) and answer.get("success")):
            self.check_alive()
            reason = str(answer.get("error-message", answer)).splitlines()
            raise SuperLinkError(
                "\n".join(
                    line for line in reason if line and not line.startswith("Using SuperLink")
                )
            )
        return answer

    def check_alive(self) -> None:
        """Raise :class:`SuperLinkError` with the end of its log if the SuperLink is gone."""
        if self.guard.poll() is not None:
            raise SuperLinkError("the SuperLink is gone; its log ends with\n" + self._last_words())

    def _last_words(self) -> str:
        with suppress(OSError):
            log = (self.home / "superlink.log").read_text(encoding="utf-8", errors="replace")
            return "\n".join(log.splitlines()[-20:])
        return "(no log)"

    def wait_until_ready(self, port: int) -> None:
        """Return when the SuperLink serves on ``port``."""
        # Its own word, not GET /health: should somebody else's SuperLink have taken the port in
        # the meantime, that one would answer.
        ready = f"Uvicorn running on http://127.0.0.1:{port} "
        deadline = time.monotonic() + _START_TIMEOUT
        log = self.home / "superlink.log"
        while not (log.exists() and ready in log.read_text(encoding="utf-8", errors="replace")):
            self.check_alive()
            if time.monotonic() > deadline:
                raise SuperLinkError(
                    f"the SuperLink did not start within {_START_TIMEOUT:.0f} s; its log ends "
                    f"with\n{self._last_words()}"
                )
            time.sleep(0.05)


@contextmanager
def private_superlink() -> Iterator[SuperLink]:
    """Start a SuperLink nobody else knows; in the end take it down, with all it started."""
    home = _private_folder()
    environment = _environment(home)
    port = _free_port()
    try:
        (home / "cwd").mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "127.0.0.1:{port}"\ninsecure = true\n',
            encoding="utf-8",
        )
        with _guarded(home, _superlink_command(port, environment), environment) as guard:
            superlink = SuperLink(home, environment, guard)
            superlink.wait_until_ready(port)
            yield superlink
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def _guarded(
    home: Path, command: Sequence[str], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    guard = subprocess.Popen(  # noqa: S603
        [sys.executable, "-I", str(Path(__file__).with_name("guard.py")), str(home), *command],
        env=environment,
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert guard.stdin is not None
    try:
        yield guard
    finally:
        guard.stdin.close()
        guard.wait()
        take_down(home)  # nothing is left to do, unless somebody killed the guard


def _superlink_command(port: int, environment: Mapping[str, str]) -> list[str]:
    program = shutil.which("flower-superlink", path=environment["PATH"])
    if program is None:
        raise SuperLinkError(
            f"no flower-superlink beside {sys.executable} or on PATH; "
            "install with `pip install -e .`"
        )
    return [
        program,
        "--insecure",
        "--simulation",
        *("--host", "127.0.0.1"),
        *("--port", str(port)),
        # The app runs in this environment; a `uv sync` of its own would fetch a second PyTorch.
        "--disable-runtime-dependency-installation",
    ]


def _private_folder() -> Path:
    system = tempfile.gettempdir()
    short = system if len(system) <= _LONGEST_TMPDIR else "/tmp"  # noqa: S108
    return Path(tempfile.mkdtemp(prefix="desloc-", dir=short)).resolve()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _environment(home: Path) -> dict[str, str]:
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
