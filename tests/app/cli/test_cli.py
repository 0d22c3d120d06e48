"""`desloc run`: errors, output, exit codes, and that no process or file is left behind."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import typer
from command import accepted, desloc
from configurations import with_values
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import parse_config_args
from hypothesis import given
from hypothesis import strategies as st
from processes import DEFAULT_SIGNALS, command_line, processes_with, wait_until
from scripts import ROOT

import flower_desloc
from flower_desloc.app.cli import run, run_arguments
from flower_desloc.app.config import Config, app_folder, load, load_run_config, parse
from flower_desloc.app.config.run_config import app_run_config
from flower_desloc.app.engines import simulation, superlink
from flower_desloc.app.engines.simulation import federation_config, flwr_run, without_flower
from flower_desloc.app.runs import RunFolder
from flower_desloc.app.runs.resume import cut_off_since
from flower_desloc.app.sites.deployment import environment as flower
from flower_desloc.app.sites.supervisor import ProcessError, Supervised


def slow(test):
    return pytest.mark.slow(pytest.mark.timeout(900)(test))


@pytest.fixture
def nothing_starts(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError(f"started {args}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(run, "run_in_process", refuse)


# --- The configuration comes first -------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["quickstrat"], "did you mean quickstart?"),
        (["quickstart", "run.steps=0"], "run.steps=0: must be at least 1"),
        (["quickstart", "run.name=two words"], "run.name=two words: must have 1 to 80"),
        (["quickstart", "data.source=./no where"], "data.source=./no where: there is no such file"),
        (["quickstart", "run.init_from=../nowhere"], "run.init_from=../nowhere: there is no such"),
        (["quickstart", "federation.min_clients=9"], "larger than simulation.num_clients=4"),
        (["quickstart", "federation.attendance.8=9"], "at most simulation.num_clients=4"),
        (["desloc_sgdm", "sync.exp_avg=3"], "its streams are params, momentum_buffer"),
        (["quickstart", "--engine", "inprocess", "--workers", "2"], "--workers is for --engine"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_exit_code_2(nothing_starts, arguments, said):
    result = desloc("run", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert said in line


def test_the_quorum_of_a_deployment_is_at_most_its_nodes(capsys):
    words = ["federation.min_clients=6"]
    assert (
        run_arguments.RunArguments.parse("quickstart", words, 6).config.federation.min_clients == 6
    )
    with pytest.raises(typer.Exit):
        run_arguments.RunArguments.parse("quickstart", words, 3)
    assert (
        "federation.min_clients=6: the quorum is larger than --nodes=3" in capsys.readouterr().err
    )


def test_without_a_preset_the_presets_are_listed(nothing_starts):
    result = desloc("run")
    assert result.exit_code == 2, result.output
    for preset in (ROOT / "configs").glob("*.yaml"):
        assert re.search(rf"^  {preset.stem} +\w", result.stderr, re.MULTILINE)


def test_the_version_is_ours_and_flowers():
    ours = re.escape(flower_desloc.__version__)
    assert re.fullmatch(rf"desloc {ours} \(Flower 1\.\d+\.\d+\)\n", accepted("--version"))


def test_a_dry_run_prints_configuration_command_and_the_papers_ratios_and_starts_nothing(
    nothing_starts,
):
    words = "run.steps=1536 sync.params=256 sync.exp_avg=768 sync.exp_avg_sq=1536"
    said = accepted("run", "quickstart", words, "--output-dir", "/o", "--dry-run")
    yaml, _, rest = said.partition("flwr run")
    assert parse(yaml) == load("quickstart", words)
    command = f"flwr run{rest.splitlines()[0]}"
    assert shlex.split(command)[:4] == ["flwr", "run", str(ROOT), "local"]
    assert f'config="quickstart" overrides="{words}" output-dir="/o"' in command
    assert "2.00 times as much" in rest
    assert "170.67 times as much" in rest
    assert re.search(r"exp_avg +2 times 4.3 MB .*\n +exp_avg_sq +1 time 4.3 MB ", rest)


def test_lists_and_dictionaries_with_blanks_reach_the_app(nothing_starts):
    words = ["data.domains=[a b, 007]", "federation.attendance={0: 4, 96: 3}", "run.seed=010"]
    said = accepted("run", "quickstart", *words, "--dry-run")
    yaml, _, rest = said.partition("flwr run")
    command = shlex.split(rest.splitlines()[0])
    run_config = parse_config_args([command[command.index("--run-config") + 1]])
    config = load_run_config({**app_run_config(), **run_config})
    assert config == parse(yaml)
    assert (config.data.domains, config.run.seed) == (["a b", "007"], 10)
    assert config.federation.attendance == {0: 4, 96: 3}


# --- The command ------------------------------------------------------------------------------

LINES = st.text(st.characters(exclude_categories=["Cc", "Cs"], include_characters="\n\t"))


@given(LINES, LINES)
def test_what_flower_reads_from_the_printed_command_is_what_was_meant(overrides, output_dir):
    meant = {"config": "quickstart", "overrides": overrides, "output-dir": output_dir}
    printed = shlex.join(flwr_run(Path("/an app"), meant, {"num-supernodes": 3}))
    command = shlex.split(printed)
    assert command[2] == "/an app"
    assert parse_config_args([command[command.index("--run-config") + 1]]) == meant
    assert parse_config_args([command[command.index("--federation-config") + 1]]) == {
        "num-supernodes": 3
    }


@pytest.mark.parametrize(
    ("arguments", "source"),
    [
        (["quickstart"], "builtin"),  # a name of ours, whatever else is called so
        (["quickstart", "data.source=two words", "run.steps=7 run.seed=8"], "two words"),
        (["quickstart", "data.source=."], "."),
        (["mine.yaml"], "two words"),
    ],
)
def test_relative_paths_with_blanks_reach_the_app_as_absolute_paths(
    nothing_starts, tmp_path, monkeypatch, arguments, source
):
    here = tmp_path / "my own folder\u00a0"
    for name in ("two words", "builtin"):
        (here / name).mkdir(parents=True)
    write(here / "mine.yaml", "extends: quickstart\ndata: {source: two words}\n")
    monkeypatch.chdir(here)
    lines = accepted("run", *arguments, "--dry-run").splitlines()
    (command,) = [shlex.split(line) for line in lines if line.startswith("flwr run")]
    told = parse_config_args([command[command.index("--run-config") + 1]])
    meant = source if source == "builtin" else str((here / source).resolve())
    assert load(told["config"], told["overrides"]).data.source == meant
    assert told["config"] in ("quickstart", str(here / "mine.yaml"))
    assert told["output-dir"] == str(here / "runs")


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("end", [typer.Exit(1), SystemExit(143)], ids=["failed", "SIGTERM"])
def test_a_command_that_ends_early_prints_how_to_resume_its_own_run(tmp_path, capsys, end):
    here = tmp_path / "my own folder"

    def ended(*names):
        def work():
            time.sleep(0.05)  # a file's clock ticks less often
            for name in names:
                write(here / name / "checkpoints" / "step-1.safetensors", "")
            raise end

        with pytest.raises(type(end)), run.resume_hint(["desloc"], Config(), here):
            work()
        return capsys.readouterr().err

    assert ended() == ""
    what, _, command = ended("desloc").strip().partition(": ")
    assert what == "resume from its last checkpoint"
    go, where, then, _, resume, _, folder = shlex.split(command)
    assert (go, Path(where), then) == ("cd", Path.cwd(), "&&")  # what is imported from there
    assert load("quickstart", resume).run.resume == str(here / "desloc")
    assert folder == str(here)
    assert ended() == ""  # that one was another command's


def test_the_run_of_another_command_is_not_offered_while_it_runs(tmp_path):
    for name in ("desloc", "desloc-2"):
        write(tmp_path / name / "checkpoints" / "step-1.safetensors", "")
    with RunFolder(tmp_path / "desloc-2").claimed():
        assert cut_off_since(Config(), tmp_path, 0.0) == tmp_path / "desloc"
    assert cut_off_since(Config(), tmp_path, 0.0) == tmp_path / "desloc-2"
    # One that was gone on with is the one that was named, whatever its folder is called.
    other = (tmp_path / "desloc").rename(tmp_path / "other")
    for began in (0.0, time.time() + 60):  # though it has written no checkpoint of its own yet
        config = load("quickstart", f"run.resume={other}")
        assert cut_off_since(config, tmp_path, began) == other


@pytest.mark.parametrize(
    ("clients", "cpus", "workers", "cores", "ray_cpus"),
    [
        (4, 1, None, 2, None),  # Ray's own choice: an actor for every core
        (4, 1, None, 64, 4),  # not sixty actors for nobody
        (4, 2, None, 64, 8),
        (4, 8, None, 2, 8),  # a client wants more cores than there are: one at a time
        (4, 2, 3, 2, 6),
    ],
)
def test_ray_starts_no_more_workers_than_clients_need(clients, cpus, workers, cores, ray_cpus):
    config = Config()
    config = with_values(
        config, {"simulation.num_clients": clients, "simulation.client_cpus": cpus}
    )
    settings = federation_config(config, workers=workers, cores=cores)
    assert settings.pop("init-args-num-cpus", None) == ray_cpus
    assert settings == {
        "num-supernodes": clients,
        "client-resources-num-cpus": cpus,
        "client-resources-num-gpus": 0.0,
    }


# --- The app folder ----------------------------------------------------------------------------


def test_the_app_is_imported_before_what_the_user_has_of_that_name(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/mine", "/installed"])
    app_folder.make_importable()
    app_folder.make_importable()
    assert sys.path == [str(ROOT), "/mine", "/installed"]


# --- The environment ----------------------------------------------------------------------------


def test_flower_gets_our_environment_without_variables_that_would_misdirect_it(monkeypatch):
    for name in ("FLWR_HOME", "FLWR_LOCAL_CONTROL_API_PORT", "FLWR_DATABASE", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "stale")
    monkeypatch.setenv("NO_PROXY", "intra.net")
    monkeypatch.setenv("HF_HOME", "/models")
    environment = flower.flower_environment(Path("/home/of/ours"))
    assert "stale" not in environment.values()
    assert environment["FLWR_HOME"] == "/home/of/ours"
    assert environment["FLWR_TELEMETRY_ENABLED"] == "0"
    assert environment["no_proxy"] == "intra.net,127.0.0.1,localhost"
    assert environment["HF_HOME"] == "/models"
    assert environment["PATH"].startswith(f"{Path(sys.executable).parent}:")


def test_the_home_of_flower_is_in_a_long_temporary_folder_by_a_path_that_rays_sockets_fit_in(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with flower.private_home() as home:
        assert len(str(home)) < 40
        assert home.resolve().parent == tmp_path
        assert (home / "cwd").is_dir()
    assert not any(tmp_path.iterdir())


# --- The supervisor -----------------------------------------------------------------------------


@pytest.fixture
def temp(monkeypatch):
    """Return the folder that temporary folders are made in."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_a_superlink_that_does_not_start_says_why_and_is_cleaned_up(temp, monkeypatch):
    broken = ["sh", "-c", "echo the port is taken; exit 3"]
    monkeypatch.setattr(superlink, "superlink_command", lambda *_: broken)
    with (
        pytest.raises(ProcessError, match="the port is taken"),
        superlink.private_superlink(),
    ):
        pass
    assert not any(temp.iterdir())


def test_a_process_that_ignores_sigterm_in_another_session_is_ended_too(temp, monkeypatch):
    deaf = ["sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"]
    parent = (
        "import subprocess, time\n"
        f"subprocess.Popen({deaf}, start_new_session=True)\n"  # as Flower starts its SuperExec
        "time.sleep(1000)\n"
    )
    command = [sys.executable, "-c", parent]
    monkeypatch.setattr(superlink, "superlink_command", lambda *_: command)
    monkeypatch.setattr(Supervised, "wait_for_log", lambda *_: None)

    def started():
        return [command_line(p) for p in processes_with("FLWR_HOME", str(link.home))]

    with superlink.private_superlink() as link:
        wait_until(lambda: any(name.startswith("sh -c trap") for name in started()), started)
        assert len(started()) >= 3  # the supervisor, the parent, the child
    assert started() == []
    assert not any(temp.iterdir())


# --- What is shown ------------------------------------------------------------------------------

LOG = """\
Using SuperLink: local (127.0.0.1:49291)
\x1b[92mINFO \x1b[0m:      Starting Flower Simulation
\x1b[93mWARNING \x1b[0m:   Since flwr 1.32, default simulated SuperNodes changed from 10 to 2.
\x1b[94mDEBUG 2026-11-21 09:12:22,791\x1b[0m:     Registered 2 nodes
Successfully installed tiny to /tmp/desloc-x/apps/tiny.
step 1/2
INFO: by a logger of the app's own
\x1b[36m(ClientAppActor pid=12)\x1b[0m \x1b[92mINFO \x1b[0m:      Flower in a client
\x1b[36m(ClientAppActor pid=12)\x1b[0m the client's print
\x1b[93mWARNING \x1b[0m:   a warning
\x1b[91mERROR \x1b[0m:     Simulation raised an exception
Traceback (most recent call last):
ValueError: boom
\x1b[91mERROR \x1b[0m:     Exit Code: 700

An unhandled exception occurred when running the simulation.
"""


def test_the_apps_lines_are_shown_and_flowers_warnings():
    shown = [re.sub(r"\x1b\[\d*m", "", line) for line in without_flower(LOG.splitlines())]
    assert shown == [
        "step 1/2",
        "INFO: by a logger of the app's own",
        "(ClientAppActor pid=12) the client's print",
        "WARNING :   a warning",
        "ERROR :     Simulation raised an exception",
        "Traceback (most recent call last):",
        "ValueError: boom",
    ]


def test_the_log_of_a_run_is_without_the_words_of_the_command_that_reads_it(tmp_path):
    (tmp_path / "cwd").mkdir()
    says = ("sh", "-c", "echo of the run; echo check your network connection >&2")
    process: Any = None
    link = superlink.SuperLink(tmp_path, os.environ, process, "127.0.0.1:1", None, enter=says)
    assert [*link.log("1")] == ["of the run"]


def test_a_log_that_breaks_off_is_continued_without_repetition():
    class BrokenOnce:
        logs = iter([["one", "two"], ["one", "two", "three"]])
        states = iter(["running", "finished:completed"])

        def log(self, run_id):
            yield from next(self.logs)

        def status(self, run_id):
            return superlink.RunStatus(next(self.states), "")

    said: list[str] = []
    link: Any = BrokenOnce()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.echo", said.append)
        assert simulation.follow(link, "1", verbose=False).completed
    assert said == ["one", "two", "three"]


# --- In this process ----------------------------------------------------------------------------


@pytest.fixture
def in_process(monkeypatch):
    calls = []
    monkeypatch.setattr(run, "run_in_process", lambda *args: calls.append(args))
    return calls


def test_a_run_config_changed_in_the_apps_pyproject_changes_every_run(in_process, monkeypatch):
    changed = {**app_run_config(), "seed": 7, "learning-rate": 0.25}
    for module in (run, run_arguments):
        monkeypatch.setattr(module, "app_run_config", lambda: changed)
    words = "optimizer.lr=0.5 simulation.num_clients=3"
    yaml = accepted("run", "quickstart", words, "--dry-run").partition("flwr run")[0]
    assert parse(yaml) == load("quickstart", f"run.seed=7 {words}")
    accepted("run", "quickstart", words, "--engine", "inprocess")
    told = {"config": "quickstart", "overrides": words, "output-dir": str(Path("runs").resolve())}
    assert in_process == [({**changed, **told}, 3)]
    assert load_run_config({**changed, **told}) == parse(yaml)


@pytest.mark.parametrize("flags", [[], ["--verbose"]])
@pytest.mark.usefixtures("in_process")
def test_the_inprocess_engine_fails_in_one_line_unless_asked_for_more(monkeypatch, flags):
    def fail(run_config, num_clients):
        raise RuntimeError("the quorum is gone")

    monkeypatch.setattr(run, "run_in_process", fail)
    result = desloc("run", "quickstart", "--engine", "inprocess", *flags)
    assert result.exit_code == 1, result.output
    assert ("Traceback" in result.stderr) == bool(flags)
    assert result.stderr.endswith("error: the run failed: RuntimeError: the quorum is gone\n")
    assert flags or len(result.stderr.splitlines()) == 1


# --- The real machinery, on a tiny app ----------------------------------------------------------

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
    while len(nodes := list(grid.get_node_ids())) < 2:  # they come up beside the ServerApp
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
    for folder in (ROOT, tiny):
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


@slow
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


@slow
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
    if number == signal.SIGKILL:  # then nobody waits for the supervisor
        assert process.returncode == -number, errors
        wait_until(lambda: place.left() == [], place.left)
    else:
        assert process.returncode == 128 + number, errors
        assert f"stopped by {signal.Signals(number).name}" in errors
    assert place.left() == []
