"""A private SuperLink for one run, with the `flwr` commands that control it.

It simulates the clients, or it serves SuperNodes over TLS and accepts only registered keys.

The SuperLink that `flwr run` starts or finds is not used: it outlives the run in the folder where
it was first started, and simulated clients silently import `client_app` from that folder, if it has
one, instead of from the submitted app (Ray puts the driver's working directory first on sys.path).
"""

import json
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_desloc.app.sites.deployment.credentials import Certificates, make_certificates
from flower_desloc.app.sites.deployment.environment import (
    HERE,
    Host,
    flower_environment,
    free_port,
    private_home,
    program,
)
from flower_desloc.app.sites.supervisor import ProcessError, Supervised, require_unix, supervised

CONNECTION = "local"
"""Name of the connection, as in Flower's own configuration: a command that is printed here also
works when a user types it."""


@dataclass(frozen=True)
class RunStatus:
    """The status of a run, from the SuperLink."""

    state: str
    """`pending`, `starting`, `running` or `finished:` with `completed`, `failed` or `stopped`."""
    details: str

    @property
    def finished(self) -> bool:
        """True if the run has ended, with or without an error."""
        return self.state.startswith("finished")

    @property
    def completed(self) -> bool:
        """True if the run has ended without an error."""
        return self.state == "finished:completed"

    @property
    def error(self) -> str:
        """The status as an error message."""
        return f"the run is {self.state}: {self.details}"


@dataclass(frozen=True)
class SuperLink:
    """A running SuperLink, and the `flwr` command that talks to it."""

    home: Path
    environment: Mapping[str, str]
    process: Supervised
    address: str
    """Host and port, for SuperNodes and for `flwr`."""
    certificates: Certificates | None
    """None in a simulation."""
    enter: tuple[str, ...] = ()
    """Words before the `flwr` command, which runs where the SuperLink runs."""

    def register(self, public_key: Path) -> None:
        """Accept the SuperNode that has this key."""
        self._flwr(
            ["flwr", "supernode", "register", str(public_key), CONNECTION, "--format", "json"]
        )

    def submit(self, command: Sequence[str]) -> str:
        """Run a `flwr run APP ... --format json` and return the id of the run it started."""
        flwr, run, app, *rest = command
        return str(self._flwr([flwr, run, str(app_alone(Path(app), self.home)), *rest])["run-id"])

    def status(self, run_id: str) -> RunStatus:
        """Return the status of a run: `flwr run` and `flwr log` always exit with code 0."""
        answer = self._flwr(["flwr", "ls", CONNECTION, "--run-id", run_id, "--format", "json"])
        run = answer["runs"][0]
        return RunStatus(run["status"], run["status-details"])

    def log(self, run_id: str) -> Iterator[str]:
        """Yield all lines of a run's output as they come, until it has finished."""
        with subprocess.Popen(  # noqa: S603
            [*self.enter, "flwr", "log", run_id, CONNECTION, "--stream"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # its own words; `status` says what is wrong
            **self._options,
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    yield line.rstrip("\n")
            finally:
                process.kill()

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "cwd": self.home / "cwd",
            "env": self.environment,
            "stdin": subprocess.DEVNULL,
            "encoding": "utf-8",
            "errors": "replace",
            "start_new_session": True,  # Ctrl-C reaches only this process
        }

    def _flwr(self, command: Sequence[str]) -> dict[str, Any]:
        done = subprocess.run(  # noqa: S603
            [*self.enter, *command], capture_output=True, check=False, **self._options
        )
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            answer = {"error-message": done.stdout + done.stderr}
        # With `--format json` Flower exits with code 0 even if it answers "success": false.
        if not (isinstance(answer, dict) and answer.get("success")):
            reason = "\n".join(
                line
                for line in str(answer.get("error-message", answer)).splitlines()
                if line and not line.startswith("Using SuperLink")
            )
            if self.process.has_exited:
                reason = f"the SuperLink is gone; its log ends with\n{self.process.log_tail()}"
            raise ProcessError(
                reason or f"{shlex.join(command[:2])} exited with code {done.returncode}"
            )
        return answer


def app_alone(app: Path, home: Path) -> Path:
    """Return a folder in ``home`` with only the files that Flower builds ``app`` from.

    Flower compares every file below ``app`` with the patterns of its `fab-include`. For a clone
    with a virtual environment that took 4.3 of the quickstart's 77 seconds.
    """
    settings = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))
    alone = home / "app"
    include = settings["tool"]["flwr"]["app"].get("fab-include", ["**/*"])
    for pattern in ("/pyproject.toml", "/.gitignore", *include):
        anywhere = "" if "/" in pattern else "**/"  # as in .gitignore
        for file in app.glob(anywhere + pattern.lstrip("/")):
            if file.is_file():
                copy = alone / file.relative_to(app)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
    return alone


@contextmanager
def private_superlink(
    *, simulation: bool = True, host: Host = HERE, add: Mapping[str, str] | None = None
) -> Iterator[SuperLink]:
    """Start a SuperLink, and end it with everything it started on exit.

    ``add`` are further environment variables. Raises ``ProcessError`` on Windows.
    """
    require_unix()
    with private_home() as home:
        environment = flower_environment(home) | dict(add or {})
        address = host.superlink or f"127.0.0.1:{free_port()}"
        hosts = dict.fromkeys(["localhost", "127.0.0.1", address.rpartition(":")[0]])
        certificates = None if simulation else make_certificates(home, list(hosts))
        trust = f'root-certificates = "{certificates.ca}"' if certificates else "insecure = true"
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "{address}"\n{trust}\n',
            encoding="utf-8",
        )
        command = [*host.enter, *superlink_command(address, environment, certificates)]
        with supervised(home, command, environment) as process:
            # Its log, not GET /health: another SuperLink that took the port would answer that.
            ready = f"Uvicorn running on {'https' if certificates else 'http'}://{address} "
            process.wait_for_log(ready, "the SuperLink did not start")
            yield SuperLink(home, environment, process, address, certificates, host.enter)


def superlink_command(
    address: str, environment: Mapping[str, str], certificates: Certificates | None
) -> list[str]:
    """Return the command line of a SuperLink; without certificates it simulates the clients."""
    host, _, port = address.rpartition(":")
    security = ["--insecure", "--simulation"]
    if certificates is not None:
        security = [
            *("--ssl-ca-certfile", str(certificates.ca)),
            *("--ssl-certfile", str(certificates.certificate)),
            *("--ssl-keyfile", str(certificates.key)),
            "--enable-supernode-auth",
        ]
    return [
        program("flower-superlink", environment),
        *security,
        *("--host", host),
        *("--port", port),
        # The app runs in this environment; Flower's `uv sync` would install a second PyTorch.
        "--disable-runtime-dependency-installation",
    ]
