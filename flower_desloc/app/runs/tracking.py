"""Experiment trackers: each is sent the run by a process of its own, which reads the run's folder.

So nothing that a tracker does can reach the run: not an error, a crash or a slow network.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

from flower_desloc.app.config import Config, ConfigError
from flower_desloc.app.runs.folder import Line, RunFolder
from flower_desloc.app.runs.record import RunRecord
from flower_desloc.core.client_info import ClientInfo
from flower_desloc.core.extras import to_install
from flower_desloc.flower.observer import RunInfo
from flower_desloc.trackers.tracker import TOO_SLOW, time_limit

_MODULE = "flower_desloc.app.runs.tracker_process"


class TrackerError(RuntimeError):
    """A tracker has failed, or was too slow."""


def require_installed(config: Config) -> None:
    """Raise ``ConfigError`` if a package that a tracker or Prometheus needs is not installed."""
    needed = [(f"run.trackers={name}", name, name) for name in config.run.trackers]
    if (port := config.run.metrics_port) is not None:
        needed.append((f"run.metrics_port={port}", "prometheus_client", "metrics"))
    for setting, package, extra in needed:
        spec = find_spec(package)
        # A folder of that name, such as Weights & Biases writes, is a package without an origin.
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"{setting}: {package} is not installed where the server runs; {to_install(extra)}"
            )


class TrackerView:
    """View that lets a process of its own send the run to the tracker ``name``."""

    def __init__(self, name: str, folder: RunFolder, *, with_model: bool) -> None:
        self._name = name
        self._options = ["--model"] if with_model else []
        self._model = folder.final if with_model else None
        self._folder = folder
        self._log = folder.trackers / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def started(self, run: RunInfo) -> None:  # noqa: ARG002
        """Start the process."""
        self._folder.trackers.mkdir(exist_ok=True)
        python = [sys.executable, "-P", "-m", _MODULE]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603
                [*python, self._name, str(self._folder.path), *self._options],
                cwd=self._folder.path.parent,  # where trackers put what they write
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C ends the run first
            )

    def joined(self, client: str, info: ClientInfo) -> None:
        """Do nothing: the process reads the run's files."""

    def replay(self, line: Line) -> None:
        """Do nothing: the process reads the run's files."""

    def window(self, line: Line) -> None:  # noqa: ARG002
        """Raise ``TrackerError`` if the process has ended."""
        if self._process is not None and self._process.poll() is not None:
            self._close()
            raise TrackerError(self._reason(self._process.returncode))

    def finish(self, record: RunRecord) -> None:  # noqa: ARG002
        """Wait, for a limited time, until everything was sent; raise ``TrackerError`` if not."""
        if self._process is None:
            return
        self._close()
        try:
            code = self._process.wait(time_limit(self._model))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            code = TOO_SLOW
        if code:
            raise TrackerError(self._reason(code))

    def _close(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _reason(self, code: int) -> str:
        written = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = next((line for line in reversed(written) if line.strip()), f"exit status {code}")
        if code == TOO_SLOW:
            said = "it did not take everything in time"
        said = re.sub(r"//[^/@\s]+@", "//***@", said.strip())  # user and password of a URL
        return f"{self._name}: {said[:300]}; all it said: {self._log}"
