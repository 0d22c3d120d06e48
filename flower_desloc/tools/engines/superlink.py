"""A SuperLink of one's own, for one run, that leaves nothing behind.

It simulates the clients, or is the server of SuperNodes: then over TLS, and only of those whose key
was registered with it.

Why not the one `flwr run` starts or finds: it lives on in the folder where it was first started,
and simulated clients import `client_app` from *there* if there is one (Ray puts the driver's
working directory first on sys.path), silently, instead of from the app that was submitted.
"""

import json
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_desloc.sites.deployment.credentials import Certificates, make_certificates
from flower_desloc.sites.deployment.environment import (
    flower_environment,
    free_port,
    private_home,
    program,
)
from flower_desloc.sites.supervisor import ProcessError, Supervised, supervised

CONNECTION = "local"
"""Name of the connection, as in the configuration Flower itself writes: a command printed by us
works when it is typed again without us."""


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
    process: Supervised
    address: str
    """Host and port, of the SuperNodes' side as of ours."""
    certificates: Certificates | None
    """None in a simulation, where nobody else calls."""

    def register(self, public_key: Path) -> None:
        """Let the SuperNode that has this key take part."""
        self._flwr(
            ["flwr", "supernode", "register", str(public_key), CONNECTION, "--format", "json"]
        )

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
            reason = "\n".join(
                line
                for line in str(answer.get("error-message", answer)).splitlines()
                if line and not line.startswith("Using SuperLink")
            )
            self.check_alive()
            raise ProcessError(reason or f"{shlex.join(command[:2])} exited by {done.returncode}")
        return answer

    def check_alive(self) -> None:
        """Raise :class:`ProcessError` with the end of its log if the SuperLink has ended."""
        if self.process.has_exited:
            raise ProcessError(
                f"the SuperLink is gone; its log ends with\n{self.process.log_tail()}"
            )

    def wait_until_ready(self) -> None:
        """Return when the SuperLink serves its address."""
        # Its own log, not GET /health: should somebody else's SuperLink have taken the port in
        # the meantime, that one would answer.
        scheme = "https" if self.certificates else "http"
        ready = f"Uvicorn running on {scheme}://{self.address} "
        self.process.wait_for_log(ready, "the SuperLink did not start")


@contextmanager
def private_superlink(*, simulation: bool = True) -> Iterator[SuperLink]:
    """Start a SuperLink nobody else knows; in the end take it down, with all it started."""
    with private_home() as home:
        environment, port = flower_environment(home), free_port()
        certificates = None if simulation else make_certificates(home, ["localhost", "127.0.0.1"])
        address = f"127.0.0.1:{port}"
        trust = f'root-certificates = "{certificates.ca}"' if certificates else "insecure = true"
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "{address}"\n{trust}\n',
            encoding="utf-8",
        )
        command = _superlink_command(port, environment, certificates)
        with supervised(home, command, environment) as process:
            superlink = SuperLink(home, environment, process, address, certificates)
            superlink.wait_until_ready()
            yield superlink


def _superlink_command(
    port: int, environment: Mapping[str, str], certificates: Certificates | None
) -> list[str]:
    return [
        program("flower-superlink", environment),
        *(["--insecure", "--simulation"] if certificates is None else _tls(certificates)),
        *("--host", "127.0.0.1"),
        *("--port", str(port)),
        # The app runs in this environment; a `uv sync` of its own would fetch a second PyTorch.
        "--disable-runtime-dependency-installation",
    ]


def _tls(certificates: Certificates) -> list[str]:
    return [
        *("--ssl-ca-certfile", str(certificates.ca)),
        *("--ssl-certfile", str(certificates.certificate)),
        *("--ssl-keyfile", str(certificates.key)),
        "--enable-supernode-auth",
    ]
