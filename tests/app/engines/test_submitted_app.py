"""A tiny app in a real simulation: whose code runs, exit codes, and that nothing is left behind."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import pytest
from files import write
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import parse_config_args
from processes import DEFAULT_SIGNALS, processes_with, wait_until
from scripts import ROOT, without_environment

from flower_desloc.app.engines import superlink

PYPROJECT = """\
[project]
name = "tiny"
version = "0.1.0"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.41.0"]
[tool.flwr.app]
publisher = "somebody"
fab-format-version = 1
flwr-version-target = "1.41.0"
fab-include = ["/LICENSE", "*.py", "/a/b.json", "a/**/*.md"]
[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"
[tool.flwr.app.config]
config = ""
overrides = ""
output-dir = ""
"""

SERVER_APP = """\
import time
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
import flower_desloc
app = ServerApp()
@app.main()
def main(grid, context):
    print("server: run config", dict(context.run_config))
    print("server: imported", __file__, flower_desloc.__file__)
    if "raises" in context.run_config["overrides"]:
        raise ValueError("the app has had enough")
    while len(nodes := list(grid.get_node_ids())) < 2:  # they start beside the ServerApp
        time.sleep(0.01)
    ask = [Message(RecordDict(), dst_node_id=node, message_type="train") for node in nodes]
    for reply in grid.send_and_receive(ask):
        print("client: imported", *reply.content["imported"].values())
    while "waits" in context.run_config["overrides"]:
        time.sleep(0.1)
"""

CLIENT_APP = """\
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
import flower_desloc
app = ClientApp()
@app.train()
def train(message, context):
    imported = ConfigRecord({"app": __file__, "package": flower_desloc.__file__})
    return Message(RecordDict({"imported": imported}), reply_to=message)
"""


@pytest.fixture
def tiny(tmp_path):
    """Return an app that says whose code runs."""
    folder = tmp_path / "tiny app"
    for name in ("LICENSE", "a/b.json", "a/c/d.md"):
        write(folder / name, "none\n")
    write(folder / "pyproject.toml", PYPROJECT)
    write(folder / "server_app" / "__init__.py", SERVER_APP)
    write(folder / "client_app" / "__init__.py", CLIENT_APP)
    write(folder / "flower_desloc" / "__init__.py", "")
    return folder


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # of flwr
def test_an_app_that_is_submitted_alone_is_the_app_that_flower_builds(tiny, tmp_path):
    for name in ("secret.py", "f.json", "a/c.json", "a/c/e.py"):
        write(tiny / name, name)
    write(tiny / ".gitignore", "secret.py\n")
    (clone := tmp_path / "clone").mkdir()
    for folder in (without_environment(clone), tiny):
        alone = superlink.app_alone(folder, tmp_path / "home" / folder.name)
        built = build_fab_from_disk(folder)
        assert build_fab_from_disk(alone) == built
        left = {file.relative_to(alone).as_posix() for file in alone.rglob("*") if file.is_file()}
        assert left - {*ZipFile(BytesIO(built)).namelist()} <= {".gitignore", "secret.py"}


DESLOC = f"""\
{DEFAULT_SIGNALS}
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from flower_desloc.app.cli import app, run
run.APP_FOLDER = Path(sys.argv.pop(1))
app()
"""


@dataclass
class Place:
    """Where `desloc` is called from: a working directory, an environment, a folder for temp."""

    cwd: Path
    environment: dict[str, str]
    temp: Path

    def start(self, tiny, *arguments):
        script = self.cwd.parent / "desloc.py"
        script.write_text(DESLOC)
        return subprocess.Popen(
            [sys.executable, script, tiny, "run", "quickstart", *arguments],
            cwd=self.cwd,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, tiny, *arguments):
        """Return exit code, output and errors; the app's folder is as it was."""
        before = contents(tiny)
        with self.start(tiny, *arguments) as process, ended(process):
            output, errors = process.communicate(timeout=600)
        assert contents(tiny) == before
        assert self.left() == []
        return process.returncode, output, errors

    def left(self):
        """Return the processes and the temporary folders that are still there."""
        return [*processes_with("PLACE", str(self.temp)), *self.temp.iterdir()]


@contextmanager
def ended(process):
    """Let no failure of a test wait for a process."""
    try:
        yield
    finally:
        process.kill()


def contents(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture
def place(tmp_path) -> Iterator[Place]:
    """Return a place where everything is set for the wrong code to run on the wrong SuperLink."""
    cwd = tmp_path / "decoy"
    for package in ("client_app", "server_app", "flower_desloc"):
        write(cwd / package / "__init__.py", "raise RuntimeError('the decoy runs')\n")
    write(
        cwd / "config.toml",
        '[superlink]\ndefault = "local"\n[superlink.local]\naddress = "127.0.0.1:9"\n'
        "insecure = true\n",
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as temp:
        environment = os.environ | {
            "PLACE": temp,
            "TMPDIR": temp,
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),  # PyTorch makes it when it is imported
            "PYTHONPATH": str(cwd),
            "PYTHONWARNINGS": "",
            "FLWR_HOME": str(cwd),
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": "9",
            "RAY_ADDRESS": "127.0.0.1:9",
            "http_proxy": "http://127.0.0.1:9",
        }
        yield Place(cwd, environment, Path(temp))


@pytest.mark.soak
def test_a_run_that_completes_exits_with_0_and_runs_the_submitted_code(tiny, place):
    code, output, errors = place.run(
        tiny, "simulation.num_clients=2", "--workers", "1", "--output-dir", "my runs"
    )
    assert (code, errors) == (0, ""), output
    _takes, command, _submitted, *said = output.splitlines()
    config = shlex.split(command)[shlex.split(command).index("--run-config") + 1]
    assert said[0] == f"server: run config {parse_config_args([config])}"
    assert parse_config_args([config])["output-dir"] == str(place.cwd / "my runs")
    imported = [line.split() for line in said if "imported" in line]
    assert [who for who, *_ in imported] == ["server:", "client:", "client:"]
    for _, _, app_file, package_file in imported:
        # The copy in the private folder, for both: not the decoy, and not the installed package.
        assert Path(app_file).is_relative_to(place.temp)
        assert Path(package_file).parents[1] == Path(app_file).parents[1]
    assert "decoy runs" not in output
    assert "INFO" not in output


@pytest.mark.soak
def test_a_run_that_fails_exits_with_1_and_prints_the_error(tiny, place):
    code, output, errors = place.run(tiny, "run.name=raises")
    assert code == 1, output + errors
    assert "server: imported" in output
    assert "ValueError: the app has had enough" in output
    assert "finished:failed" in errors
    assert "the app has had enough" in errors


@pytest.mark.soak
def test_an_app_that_cannot_be_built_exits_with_1_and_prints_the_error(tiny, place):
    (tiny / "LICENSE").unlink()
    code, output, errors = place.run(tiny)
    assert code == 1, output + errors
    assert errors.startswith("error: ")
    assert "LICENSE" in errors


@pytest.mark.soak
@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGINT, "run "),  # while Flower starts the simulation
        (signal.SIGKILL, "client: "),  # while Ray's actors are there
    ],
)
def test_an_interrupted_run_leaves_nothing_behind(tiny, place, number, said):
    words = ["run.name=waits", "simulation.num_clients=2", "--workers", "1"]
    with place.start(tiny, *words) as process, ended(process):
        lines: list[str] = []
        while not (lines and lines[-1].startswith(said)):
            lines.append(process.stdout.readline())
            assert lines[-1], ["".join(lines), process.stderr.read()]
        assert place.left() != []
        process.send_signal(number)
        _, errors = process.communicate(timeout=600)
    if number == signal.SIGKILL:  # the command cannot wait for its supervisor then
        assert process.returncode == -number, errors
        wait_until(lambda: place.left() == [], place.left)
    else:
        assert process.returncode == 128 + number, errors
        assert f"stopped by {signal.Signals(number).name}" in errors
    assert place.left() == []
