"""A real SuperLink and real SuperNodes: who gets in, what a run leaves, and who comes back."""

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.common.config import parse_config_args
from safetensors.torch import load_file
from typer.testing import CliRunner

from flower_desloc.cli import app
from flower_desloc.sites.deployment.arguments import as_argument
from flower_desloc.sites.deployment.certificates import make_certificates
from flower_desloc.sites.deployment.keys import make_key
from flower_desloc.sites.deployment.processes import (
    ProcessError,
    flower_environment,
    free_port,
    guarded,
    log_of,
    private_home,
    program,
)
from flower_desloc.sites.deployment.supernode import KEY, SuperNode, supernode
from flower_desloc.tools.engines.superlink import SuperLink, private_superlink

BIN = Path(sys.executable).parent
SMALL = [
    "run.eval_every=0",
    "sync.params=2",
    "sync.exp_avg=4",
    "sync.exp_avg_sq=4",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_hidden_layers=1",
    "data.max_bytes=60000",
    "data.seq_len=32",
    "data.batch_size=2",
    "evaluation.sequences=4",
    "evaluation.federated=false",
]


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- Keys and certificates ---------------------------------------------------------------------


def test_a_key_is_a_pair_on_p_384_that_its_owner_alone_may_read(tmp_path):
    public = make_key(tmp_path / "key")
    assert load_ssh_public_key(public.read_bytes()).curve.name == "secp384r1"
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    derived = subprocess.run(
        ["ssh-keygen", "-y", "-f", tmp_path / "key"], capture_output=True, text=True, check=True
    )
    assert derived.stdout.split()[:2] == public.read_text().split()[:2]


def test_a_key_is_never_written_over(tmp_path):
    make_key(tmp_path / "key")
    with pytest.raises(FileExistsError):
        make_key(tmp_path / "key")


def test_openssl_finds_the_certificate_good_for_its_hosts_and_no_others(tmp_path):
    made = make_certificates(tmp_path, ["fed.example.org", "10.0.0.7"])

    def verified(*host):
        command = ["openssl", "verify", "-x509_strict", "-CAfile", made.ca, *host, made.certificate]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    assert verified("-verify_hostname", "fed.example.org")
    assert verified("-verify_ip", "10.0.0.7")
    assert not verified("-verify_hostname", "localhost")
    assert stat.S_IMODE(made.key.stat().st_mode) == 0o600
    root = x509.load_pem_x509_certificate(made.ca.read_bytes())
    constraints = root.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert constraints.value.ca


def test_flower_reads_a_node_config_as_it_was_meant():
    meant = {"partition-id": 1, "data-path": 'C:\\a "b"/=c', "device": "cuda:1"}
    assert parse_config_args([as_argument(meant)]) == meant


# --- What is refused before anything starts -------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "which preset?"),
        (["quickstrat"], "did you mean quickstart?"),
        (["quickstart", "federation.num_clients=4"], "--nodes"),
        (["quickstart", "federation.min_clients=4", "--nodes", "2"], "federation.min_clients=4"),
        (["quickstart", "--nodes", "2", "--data-path", "."], "--data-path is given 1 times"),
        (["quickstart", "--device", "cpu", "--device", "cpu"], "--device is given 2 times"),
    ],
)
def test_what_makes_no_federation_is_exit_code_2(monkeypatch, arguments, said):
    def refuse(*args, **kwargs):
        raise AssertionError(f"started {args}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    result = CliRunner().invoke(app, ["federate", *arguments], catch_exceptions=False)
    assert result.exit_code == 2
    assert said in result.stderr


# --- Who gets in ---------------------------------------------------------------------------------


def known(superlink: SuperLink) -> list[str]:
    """The state of every SuperNode that the SuperLink knows."""
    done = subprocess.run(
        ["flwr", "supernode", "list", "--format", "json"],
        env=superlink.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [node["status"] for node in json.loads(done.stdout)["nodes"]]


@pytest.mark.slow
def test_a_supernode_is_let_in_by_its_key_over_tls_and_by_nothing_else(tmp_path):
    with private_superlink(simulation=False) as superlink, ExitStack() as stack:
        assert superlink.certificates is not None
        ca = superlink.certificates.ca
        others = make_certificates(tmp_path, ["127.0.0.1"]).ca

        def home() -> Path:
            return stack.enter_context(private_home())

        def kept(home: Path) -> SuperNode:
            make = supernode(home, superlink.address, ca, {"partition-id": 0}, threads=1)
            return stack.enter_context(make)

        def started(*flags: object) -> Path:
            here = home()
            environment = flower_environment(here)
            address = ["--superlink", superlink.address, "--port", str(free_port())]
            command = [program("flower-supernode", environment), *address, *map(str, flags)]
            stack.enter_context(guarded(here, command, environment))
            return here

        friends, strangers = home(), home()
        superlink.register(make_key(friends / KEY))
        make_key(strangers / KEY)
        friend, stranger = kept(friends), kept(strangers)
        without_tls = started("--insecure")
        without_a_key = started("--root-certificates", ca)
        of_another_authority = started("--root-certificates", others)

        friend.wait_until_online()
        with pytest.raises(ProcessError, match=r"2004\] Failed to activate SuperNode"):
            stranger.wait_until_online()
        for place, seen in [
            # It says no more, and does so for ever.
            (without_tls, "Connection attempt failed, retrying"),
            (without_a_key, "2001] SuperNode authentication is enabled"),
            (of_another_authority, "CERTIFICATE_VERIFY_FAILED"),
        ]:
            wait_until(lambda place=place, seen=seen: seen in log_of(place), 60)
        # It is started again, in vain.
        wait_until(lambda: log_of(strangers).count("Failed to activate SuperNode") > 1, 60)
        assert known(superlink) == ["online"]
        assert not friend.has_complained
        assert stranger.has_complained


@pytest.mark.slow
@pytest.mark.parametrize("simulation", [True, False])
def test_a_superlink_that_is_killed_is_said_to_be_gone(simulation):
    """Asked at once, while its guard is still ending everything, `flwr` included."""
    with private_superlink(simulation=simulation) as superlink:
        (process,) = [
            seen
            for seen in processes()
            if "/flower-superlink " in seen.command
            and "guard.py" not in seen.command
            and seen.home == superlink.home
        ]
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ProcessError, match="the SuperLink is gone"):
            superlink.status("1")


# --- A run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """A process, as /proc shows it."""

    pid: int
    command: str
    environment: frozenset[str]

    @property
    def home(self) -> Path:
        (home,) = [v for v in self.environment if v.startswith("FLWR_HOME=")] or ["FLWR_HOME="]
        return Path(home.removeprefix("FLWR_HOME="))


def processes() -> Iterator[Seen]:
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command, environment = (
                (entry / name).read_bytes().decode(errors="replace").split("\0")
                for name in ("cmdline", "environ")
            )
            yield Seen(int(entry.name), " ".join(command), frozenset(environment))


@dataclass(frozen=True)
class Place:
    """A folder for the run, and one for all that must be gone after it."""

    output: Path
    temp: Path

    def federate(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [BIN / "desloc", "federate", "quickstart", *arguments, "--output-dir", self.output],
            env=os.environ | {"TMPDIR": str(self.temp), "PLACE": str(self.temp)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ours(self) -> list[Seen]:
        return [p for p in processes() if f"PLACE={self.temp}" in p.environment]

    def left(self) -> list[object]:
        return [*self.ours(), *self.temp.glob("desloc-*")]

    def node(self, number: int) -> Seen:
        """The SuperNode of a partition; its guard has all of its command too."""
        (node,) = [
            process
            for process in self.ours()
            if "flower_desloc.sites.deployment.node " in process.command
            and "guard.py" not in process.command
            and f"partition-id={number} " in process.command
        ]
        return node

    def has_begun(self, number: int, window: int) -> bool:
        """Whether the SuperNode of a partition has taken the request of a window."""
        return log_of(self.node(number).home).count("Receiving: train message") == window

    def windows(self) -> list[dict[str, Any]]:
        lines = (self.output / "quickstart" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            (self.output / "quickstart" / "summary.json").read_text()
        )
        return found


@pytest.fixture
def place(tmp_path) -> Iterator[Place]:
    with tempfile.TemporaryDirectory(dir="/tmp") as temp:
        yield Place(tmp_path / "runs", Path(temp))


@pytest.mark.slow
def test_a_run_that_fails_shows_the_log_of_the_node_that_failed_it(place):
    too_long = [*SMALL, "data.max_bytes=300", "data.seq_len=2048"]
    with place.federate(*too_long, "run.steps=4", "--nodes", "1") as process:
        output, _ = process.communicate()
    assert process.returncode == 1, output
    told, _, log = output.partition("the log of SuperNode 0 ends with\n")
    assert "client-0" in told or "node " in told
    assert "data.seq_len" in log
    assert place.left() == []


@pytest.mark.slow
def test_killed_nothing_is_left_of_a_federation(place):
    with place.federate(*SMALL, "run.steps=4", "--nodes", "1") as process:
        assert process.stdout is not None
        assert any("SuperNodes online" in line for line in process.stdout)
        assert len(place.left()) > 4
        process.kill()
    wait_until(lambda: place.left() == [], 20)


@pytest.mark.slow
@pytest.mark.timeout(900)  # a minute of it is waiting, whatever the machine
def test_supernodes_that_are_killed_come_back_with_and_without_their_state(place):
    """Client 1 keeps its file; client 2 loses it, and is sent what was averaged long ago."""
    careless = ["federation.on_failure=continue", "federation.min_clients=1"]
    clocks = ["sync.params=50", "sync.exp_avg=never", "sync.exp_avg_sq=never", "sync_once_at=[50]"]
    arguments = [*SMALL, *clocks, "run.steps=350", *careless, "--nodes", "3"]
    with place.federate(*arguments) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if "window 2/7" in line:
                waiting = {1, 2}
                while waiting:  # each at once: they ask for work at different moments
                    for number in [n for n in waiting if place.has_begun(n, window=3)]:
                        os.kill(place.node(number).pid, signal.SIGKILL)
                        waiting.remove(number)
                (file,) = (place.output / ".clients").rglob("client-2.safetensors")
                file.unlink()
    assert process.returncode == 0, "".join(said)
    everybody = ["client-0", "client-1", "client-2"]
    _before, *windows, killed, _alone, _, _, last = place.windows()
    assert [sorted(window["clients"]) for window in windows] == [everybody] * 2
    assert sorted(killed["clients"]) == ["client-0"]
    assert sorted(killed["left_out"]) == ["client-1", "client-2"]
    # Flower's word while it is away, and ours if it was back before its turn to be listened to.
    said_so = ("Node Unavailable", "its node answers, but has lost the request")
    for reason in killed["left_out"].values():
        assert any(words in reason for words in said_so), reason
    assert sorted(last["clients"]) == everybody
    assert last["left_out"] == {}
    lost = [e["client"] for w in place.windows() for e in w["events"] if e["kind"] == "state lost"]
    assert lost == ["client-2"]
    assert place.summary()["status"] == "completed"
    assert load_file(place.output / "quickstart" / "final" / "model.safetensors")
    assert place.left() == []
