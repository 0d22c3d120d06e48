"""A real SuperLink with real SuperNodes: authentication, what a run leaves behind, restarts."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.common.config import parse_config_args
from flwr.proto.runtime_pb2 import AcquireTaskResponse
from flwr.proto.task_pb2 import Task
from light_task import WITH_LIGHT
from processes import command_line, environment_of, has_ended, output_of, processes_with, wait_until
from safetensors.torch import load_file
from tiny import TINY, summary
from typer.testing import CliRunner

from flower_desloc.app.cli import app
from flower_desloc.app.cli.federate import with_data_address
from flower_desloc.app.cli.run_arguments import RunArguments
from flower_desloc.app.engines.superlink import private_superlink
from flower_desloc.app.runs.folder import read_lines
from flower_desloc.app.sites.deployment.credentials import make_certificates, make_key
from flower_desloc.app.sites.deployment.environment import (
    as_argument,
    flower_environment,
    free_port,
    private_home,
    program,
)
from flower_desloc.app.sites.deployment.node import (
    PollInterval,
    answers_when,
    has_arrived,
    has_task,
)
from flower_desloc.app.sites.deployment.superexec import once_for_all, popen_by_fork
from flower_desloc.app.sites.deployment.supernode import KEY, SuperNode, supernode
from flower_desloc.app.sites.supervisor import ProcessError, Supervised, supervised

BIN = Path(sys.executable).parent
SMALL = [
    "run.eval_every=0",
    "sync.params=2",
    "sync.exp_avg=4",
    "sync.exp_avg_sq=4",
    *TINY,
    "evaluation.federated=false",
]
LIGHT = ["task=light_task:Light", "task_options.seconds=0.02"]
FAST_HEARTBEATS = """\
import flwr.common.constant
flwr.common.constant.HEARTBEAT_DEFAULT_INTERVAL = flwr.common.constant.HEARTBEAT_MIN_INTERVAL
"""


# --- Keys and certificates ---------------------------------------------------------------------


def test_a_key_is_a_p384_pair_readable_by_its_owner_only_and_never_overwritten(tmp_path):
    public = make_key(tmp_path / "key")
    key = load_ssh_public_key(public.read_bytes())
    assert isinstance(key, EllipticCurvePublicKey)
    assert key.curve.name == "secp384r1"
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    derived = output_of(["ssh-keygen", "-y", "-f", tmp_path / "key"])
    assert derived.split()[:2] == public.read_text().split()[:2]
    with pytest.raises(FileExistsError):
        make_key(tmp_path / "key")


def test_openssl_accepts_the_certificate_for_its_hosts_only(tmp_path):
    made = make_certificates(tmp_path, ["fed.example.org", "10.0.0.7"])

    def verified(*host):
        command = ["openssl", "verify", "-x509_strict", "-CAfile", made.ca, *host, made.certificate]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    assert verified("-verify_hostname", "fed.example.org")
    assert verified("-verify_ip", "10.0.0.7")
    assert not verified("-verify_hostname", "localhost")
    assert stat.S_IMODE(made.key.stat().st_mode) == 0o600


def test_flower_parses_a_node_config_back_to_the_same_values():
    node_config: dict[str, str | int] = {
        "partition-id": 1,
        "data-path": 'C:\\a "b"/=c',
        "device": "cuda:1",
    }
    assert parse_config_args([as_argument(node_config)]) == node_config


# --- Polling of a SuperNode ----------------------------------------------------------------------


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.mark.parametrize("after", [0.0, 0.05, 1.0, 20.0, 100.0, 5000.0])
def test_polling_delays_a_message_by_five_percent_of_the_time_since_the_last_one(after):
    clock = Clock()
    interval = PollInterval(clock)
    interval.message_received()
    received = clock.now
    while clock.now - received < after:
        interval.sleep(3)
    delay = clock.now - received - after
    assert delay <= max(0.1, min(3.0, 0.05 * after)) + 1e-9


@pytest.mark.parametrize("asked", [3.0, 0.5])
def test_a_supernode_without_messages_sleeps_as_long_as_flowers(asked):
    clock = Clock()
    PollInterval(clock).sleep(asked)
    assert clock.now == 1000.0 + asked


@pytest.mark.parametrize(
    ("found", "arrives", "answered", "available"),
    [(True, 0, 0, True), (True, 2, 2, True), (True, 60, 5, False), (False, 9, 0, False)],
)
def test_a_supernode_answers_when_the_object_has_arrived(found, arrives, answered, available):
    clock = Clock()

    def pull(*_):
        there = found and clock.now >= 1000.0 + arrives
        return SimpleNamespace(object_found=found, object_available=there)

    handler = answers_when(has_arrived, pull, clock)
    assert handler("request", "state", "task").object_available == available
    assert clock.now - 1000.0 == pytest.approx(answered, abs=0.06)


@pytest.mark.parametrize(("comes", "answered"), [(0, 0), (2, 2), (60, 5)])
def test_a_supernode_answers_its_superexec_when_there_is_a_task(comes, answered):
    clock = Clock()

    def acquire(*_):
        task = Task(task_id=1) if clock.now >= 1000.0 + comes else None
        return AcquireTaskResponse(task=task)

    answer = answers_when(has_task, acquire, clock)("request", "state")
    assert answer.HasField("task") == (comes == answered)
    assert clock.now - 1000.0 == pytest.approx(answered, abs=0.06)


def test_a_process_is_forked_for_every_line_and_has_its_command_line():
    code = """
import os, signal, sys
from flower_desloc.app.sites.deployment.superexec import forked_for
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if forked_for(os.fdopen(0)):
    said = [*sys.argv, str(signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL)]
else:
    said = ["end"]
os.write(1, " ".join([*said, "\\n"]).encode())  # at once: the others write here too
"""
    lines = '["flwr-clientapp", "--token", "one"]\n["flwr-clientapp", "two words"]\n'
    output = output_of([sys.executable, "-c", code], input=lines)
    assert sorted(output.splitlines()) == [
        "end ", "flwr-clientapp --token one True ", "flwr-clientapp two words True ",
    ]  # fmt: skip


def test_an_app_is_unpacked_once_for_all_forked_processes(tmp_path):
    calls = tmp_path / "calls"

    def install(fab: bytes, **options: object) -> Path:
        with calls.open("ab") as file:
            file.write(fab)
        (tmp_path / fab.decode()).mkdir(exist_ok=True)
        return tmp_path / fab.decode()

    install_once = once_for_all(install)
    for fab in (b"a", b"a", b"b", b"b", b"a"):
        if (pid := os.fork()) == 0:
            os._exit(install_once(fab, skip_prompt=True) != tmp_path / fab.decode())
        assert os.waitpid(pid, 0)[1] == 0
    assert calls.read_bytes() == b"aba"
    (tmp_path / "a").rmdir()  # gone since
    install_once(b"a", skip_prompt=True)
    assert calls.read_bytes() == b"abaa"


def test_only_clientapps_are_forked():
    reader, writer = os.pipe()
    start = popen_by_fork(writer)
    start(["flwr-clientapp", "--token", "it's"])
    with os.fdopen(reader) as lines:
        assert json.loads(next(lines)) == ["flwr-clientapp", "--token", "it's"]
    assert start([sys.executable, "-c", "exit(3)"]).wait() == 3
    os.close(writer)


ENDS = """\
import os, signal, subprocess, sys, time
from flower_desloc.app.sites.deployment import node, superexec
superexec.COMMAND = ("sh", "-c", "kill -9 $$")
node._LONGEST_END = 0.5
"""
SAVES = """\
import pathlib, signal, sys, time
def save(*_):
    time.sleep(1)
    pathlib.Path(sys.argv[3]).write_text("whole")
    sys.exit()
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(30)
"""
MAIN = f"""
command = [sys.executable, "-c", {SAVES!r}, "--saves-state", str(os.getpid()), sys.argv[1]]
trainer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
trainer.stdout.readline()
sys.argv[1:] = ["--insecure", "--superlink", "127.0.0.1:9", "--port", sys.argv[2]]
node.main()
"""
HUNG = """
node.SAVE_TIMEOUT = 0
signal.signal(signal.SIGTERM, lambda *_: time.sleep(60))
node.start_superexec(["flower-superexec"])
time.sleep(60)
"""
ASKED = """
node.start_superexec(["flower-superexec"])
node._leaving.set()
time.sleep(1)
"""


def ends(code, *arguments):
    command = [sys.executable, "-c", ENDS + code, *map(str, arguments)]
    environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_a_supernode_ends_as_flowers_when_its_superexec_ends_and_waits_for_states(tmp_path):
    done = ends(MAIN, tmp_path / "state", free_port())
    assert done.returncode == 1, done.stderr
    assert "The SuperExec was ended by SIGKILL" in done.stderr
    assert "SuperNode terminated gracefully" in done.stdout + done.stderr
    assert (tmp_path / "state").read_text() == "whole"


def test_a_supernode_ends_even_if_flowers_way_out_hangs():
    done = ends(HUNG)
    assert done.returncode == 1, done.stderr
    assert "The SuperExec was ended by SIGKILL" in done.stderr


def test_a_supernode_that_is_ending_does_not_report_the_end_of_its_superexec():
    done = ends(ASKED)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_forked_has_no_thread_and_nothing_of_the_app():
    code = """
import os, sys, threading
from flower_desloc.app.sites.deployment import superexec
def show(lines):
    own = [name for name in sys.modules if name.split(".")[0] in ("flower_desloc", "torch")]
    expected = {"flwr.supernode.runtime.run_clientapp", "httpcore"}
    print(threading.active_count(), own, expected <= {*sys.modules})
superexec.forked_for, os.fork = show, lambda: 1
superexec.main()
"""
    assert output_of([sys.executable, "-c", code]) == "1 [] True\n"


# --- Invalid command lines -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quickstart", "simulation.num_clients=4"], "--nodes"),
        (["quickstart", "federation.min_clients=4", "--nodes", "2"], "federation.min_clients=4"),
        (["digits", "privacy.secure_aggregation=true", "--nodes", "2"], "--nodes=2: privacy.s"),
        (["quickstart", "--nodes", "2", "--data-path", "."], "--data-path is given 1 times"),
        (["quickstart", "--device", "cpu", "--device", "cpu"], "--device is given 2 times"),
        (["quickstart", "--device", "quantum"], "--device quantum: "),
        (["quickstart", "run.resume=nowhere://models/a"], "run.resume=nowhere://models/a: Prot"),
        (["quickstart", "model.hidden_size=65536"], "the server and 3 sites: needed are "),
    ],
)
def test_an_invalid_command_line_is_exit_code_2_and_starts_nothing(monkeypatch, arguments, message):
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **_: pytest.fail(f"started {args}"))
    result = CliRunner().invoke(app, ["federate", *arguments], catch_exceptions=False)
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_sites_on_this_machine_exchange_tensors_at_a_free_port_unless_it_is_stated():
    stated = RunArguments.parse("quickstart", [], 2)
    here = with_data_address(stated)
    assert here.overrides[:-1] == stated.overrides
    assert re.fullmatch(r"federation\.data_address=127\.0\.0\.1:\d+", here.overrides[-1])
    for address in ("null", "fed.example.org:8443"):
        given = RunArguments.parse("quickstart", [f"federation.data_address={address}"], 2)
        assert with_data_address(given) is given


# --- Authentication ------------------------------------------------------------------------------


@pytest.mark.soak
def test_only_a_supernode_with_a_registered_key_and_tls_is_accepted():
    with private_superlink(simulation=False) as superlink, ExitStack() as stack:
        assert superlink.certificates is not None
        ca = superlink.certificates.ca

        def ours(*, registered: bool) -> SuperNode:
            home = stack.enter_context(private_home())
            key = make_key(home / KEY)
            if registered:
                superlink.register(key)
            node = supernode(home, superlink.address, ca, {"partition-id": 0}, threads=1)
            return stack.enter_context(node)

        def flowers(*flags: object) -> Supervised:
            home = stack.enter_context(private_home())
            environment = flower_environment(home)
            address = ["--superlink", superlink.address, "--port", str(free_port())]
            command = [program("flower-supernode", environment), *address, *map(str, flags)]
            return stack.enter_context(supervised(home, command, environment))

        accepted, refused = ours(registered=True), ours(registered=False)
        without_tls = flowers("--insecure")
        without_key = flowers("--root-certificates", ca)

        accepted.wait_until_online()
        with pytest.raises(ProcessError, match=r"2004\] Failed to activate SuperNode"):
            refused.wait_until_online()

        def says(node: Supervised, words: str) -> bool:
            return words in node.log()

        for node, words in [
            # It logs nothing else, and retries without end.
            (without_tls, "Connection attempt failed, retrying"),
            (without_key, "2001] SuperNode authentication is enabled"),
        ]:
            wait_until(partial(says, node, words), node.log)
        # It is restarted, and refused again.
        retried = "Failed to activate SuperNode"
        wait_until(lambda: refused.log().count(retried) > 1, refused.log)
        command = ["flwr", "supernode", "list", "--format", "json"]
        known = json.loads(output_of(command, env=superlink.environment))["nodes"]
        assert [node["status"] for node in known] == ["online"]
        assert not accepted.has_errors
        assert refused.has_errors


def the_one(found: list[psutil.Process], *words: str) -> psutil.Process:
    """The process with those words in its command line, which its supervisor's has as well."""
    lines = {p: command_line(p) for p in found}
    (one,) = [
        p
        for p, line in lines.items()
        if all(word in line for word in words) and "supervisor.py" not in line
    ]
    return one


@pytest.mark.slow
def test_a_killed_superlink_is_reported_as_gone():
    with private_superlink() as superlink:
        found = processes_with("FLWR_HOME", str(superlink.home))
        the_one(found, "/flower-superlink ").kill()
        # Asked at once, while the supervisor is still ending everything, `flwr` included.
        with pytest.raises(ProcessError, match="the SuperLink is gone"):
            superlink.status("1")


# --- A run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Federation:
    """A run of `desloc federate` with a folder for its output and one that it must leave empty."""

    output: Path
    temp: Path

    def start(self, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        place = {"TMPDIR": str(self.temp), "FEDERATION": str(self.temp)}
        return subprocess.Popen(
            [BIN / "desloc", "federate", "quickstart", *arguments, "--output-dir", self.output],
            env=os.environ | place | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def processes(self) -> list[psutil.Process]:
        return processes_with("FEDERATION", str(self.temp))

    def left(self) -> list[object]:
        return [*self.processes(), *self.temp.glob("desloc-*")]

    def find(self, *words: str, home: str = "") -> psutil.Process:
        here = [p for p in self.processes() if home in environment_of(p).get("FLWR_HOME", "")]
        return the_one(here, *words)

    def windows(self) -> list[dict[str, Any]]:
        return list(read_lines(self.output / "quickstart" / "metrics.jsonl"))


@pytest.fixture
def federation(tmp_path) -> Iterator[Federation]:
    with tempfile.TemporaryDirectory(dir="/tmp") as temp:
        yield Federation(tmp_path / "runs", Path(temp))


@pytest.mark.slow
def test_a_failed_run_shows_the_log_of_the_node_that_failed(federation):
    failing = [*SMALL, *LIGHT, "task_options.seconds=-1", "run.steps=4"]
    with federation.start(*failing, "--nodes", "1", **WITH_LIGHT) as process:
        output, _ = process.communicate()
    assert process.returncode == 1, output
    before, _, log = output.partition("the log of SuperNode 0 ends with\n")
    assert "client-0" in before or "node " in before
    assert "sleep length must be non-negative" in log
    assert federation.left() == []


@pytest.mark.soak
def test_no_process_or_file_is_left_after_a_federation_is_killed(federation):
    with federation.start(*SMALL, "run.steps=4", "--nodes", "1") as process:
        assert process.stdout is not None
        lines: list[str] = []
        while not (lines and "SuperNodes online" in lines[-1]):
            lines.append(process.stdout.readline())
            assert lines[-1], "".join(lines)
        assert len(federation.left()) > 4
        process.kill()
    wait_until(lambda: federation.left() == [], lambda: str(federation.left()))


RECEIVED, ONLINE = "Receiving: train message", "SuperNode ID: "


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_killed_supernodes_rejoin_the_run_with_or_without_their_state(federation, tmp_path):
    """Client 1 keeps its state file; client 2 loses it, and is sent the averages it lacks."""
    # A killed SuperNode is refused for two of its heartbeats, 60 s by default.
    (tmp_path / "sitecustomize.py").write_text(FAST_HEARTBEATS)
    path = os.pathsep.join([str(tmp_path), WITH_LIGHT["PYTHONPATH"]])
    tolerant = ["federation.on_failure=continue", "federation.min_clients=1"]
    clocks = ["sync.params=20", "sync.exp_avg=never", "sync.exp_avg_sq=never"]
    arguments = [
        *SMALL,
        *LIGHT,
        *clocks,
        "sync_once_at=[20]",
        "run.steps=160",
        *tolerant,
        "--nodes",
        "3",
    ]
    number = 0
    with federation.start(*arguments, "--nodes", "3", PYTHONPATH=path) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "window 2/8" in line:  # the averages of step 20 have arrived
                number = kill_two_nodes_and_restart_them(federation, lambda: "".join(lines))
    assert process.returncode == 0, "".join(lines)
    everybody = ["client-0", "client-1", "client-2"]
    _before, *windows = federation.windows()
    clients = [sorted(window["clients"]) for window in windows]
    killed = windows[number - 1]
    alone = clients.count(["client-0"])
    assert alone >= 2  # the window in which they were killed, and one that began without them
    assert clients[: number - 1] == [everybody] * (number - 1)
    assert clients[number - 1 : number - 1 + alone] == [["client-0"]] * alone
    assert clients[number - 1 + alone :] == [everybody] * (9 - number - alone) != []
    assert sorted(killed["left_out"]) == ["client-1", "client-2"]
    assert windows[-1]["left_out"] == {}
    assert all("Node Unavailable" in reason for reason in killed["left_out"].values())
    events = [event for window in federation.windows() for event in window["events"]]
    assert [e["client"] for e in events if e["kind"] == "state lost"] == ["client-2"]
    assert summary(federation.output / "quickstart")["status"] == "completed"
    assert load_file(federation.output / "quickstart" / "final" / "model.safetensors")
    assert federation.left() == []


def kill_two_nodes_and_restart_them(federation: Federation, log: Callable[[], str]) -> int:
    """Kill SuperNodes 1 and 2 in a window, and restart them in the next; return the window."""
    nodes = [federation.find("deployment.node ", f"partition-id={n} ") for n in range(3)]
    homes = [environment_of(node)["FLWR_HOME"] for node in nodes]
    stopped = []
    for home in homes[1:]:  # each as soon as it is found; without clients 1 and 2 no window ends
        stopped.append(federation.find("sites.warm.trainer", home=home))
        stopped[-1].suspend()
    trainers = [federation.find("sites.warm.trainer", home=homes[0]), *stopped]

    def count(number: int, words: str) -> int:
        return (Path(homes[number]) / "log").read_text(errors="replace").count(words)

    def all_have_the_last_request() -> bool:
        received = {count(number, RECEIVED) for number in range(3)}
        return received == {len(federation.windows())}

    def is_stalled() -> bool:
        if not all_have_the_last_request():
            return False
        time.sleep(1)  # a reply of before may be on its way
        return all_have_the_last_request()

    wait_until(is_stalled, log)
    window = len(federation.windows())
    supervisors = [node.parent() for node in nodes]
    for number in (1, 2):
        supervisors[number].suspend()
        nodes[number].kill()
        trainers[number].resume()
    wait_until(lambda: has_ended(trainers[2]), log)  # it may be writing the file
    (state,) = (federation.output / ".clients").rglob("client-2")
    shutil.rmtree(state)
    wait_until(lambda: count(0, RECEIVED) > window, log)
    trainers[0].suspend()
    for number in (1, 2):
        supervisors[number].resume()
    wait_until(lambda: count(1, ONLINE) == count(2, ONLINE) == 2, log)
    trainers[0].resume()
    return window
