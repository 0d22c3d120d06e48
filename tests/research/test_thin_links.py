"""The benchmark of thin links: its relay, a miniature of it, and what it leaves behind."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from processes import DEFAULT_SIGNALS, wait_until
from scripts import RESEARCH, load_script
from tiny import TINY

sys.path.append(str(RESEARCH / "thin_links"))  # its files import each other
network = load_script("thin_links/network")
report = load_script("thin_links/report")
MINIATURE = {
    "sites": 2,
    "round_trip_ms": 50,
    "step_seconds": 0.05,
    "rates": [10],
    "seeds": [0],
    "targets": [9.0],
    "overrides": ["run.steps=6", "run.eval_every=2", *TINY, "evaluation.federated=false"],
    "methods": {"DES-LOC": ["desloc_adam", "sync.params=2", "sync.exp_avg=4", "sync.exp_avg_sq=4"]},
}


def not_allowed() -> str:
    try:
        network.require_allowed()
    except network.NotAllowedError as error:
        return str(error)
    return ""


REASON = not_allowed()
needs_namespaces = pytest.mark.skipif(bool(REASON), reason=REASON)


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is an address on Linux only")
def test_the_relay_delays_both_directions_and_changes_no_byte():
    data = os.urandom(1 << 16)
    with socket.create_server(("127.0.0.2", 0)) as server:
        port = server.getsockname()[1]
        with (
            network.tool((), "relay", "127.0.0.1", "127.0.0.2", 0.05, port),
            socket.create_connection(("127.0.0.1", port)) as here,
            server.accept()[0] as there,
            there.makefile("rb") as received,
        ):
            here.sendall(data)
            here.shutdown(socket.SHUT_WR)
            assert received.read() == data
    found: dict[str, float] = {}

    def measured_as_fast_as_the_delay_allows() -> bool:
        with (
            network.tool((), "serve", "127.0.0.2", port),
            network.tool((), "relay", "127.0.0.1", "127.0.0.2", 0.05, port),
            network.tool((), "measure", "127.0.0.1", port, 3 << 20, 3 << 20, 0) as process,
        ):
            assert process.stdout is not None
            found.update(json.loads(process.stdout.readline()))
        assert found["round_trip"] >= 0.1
        return found["round_trip"] < 0.2 and found["ended"] - found["began"] < 2

    # A machine that is busy with something else is slower now and then, a relay always.
    wait_until(measured_as_fast_as_the_delay_allows, lambda: found, 200)


def start(*words: object, before: str = "") -> "subprocess.Popen[str]":
    run = f"import runpy\nrunpy.run_path({str(RESEARCH / 'thin_links')!r}, run_name='__main__')"
    return subprocess.Popen(
        [sys.executable, "-c", f"{DEFAULT_SIGNALS}{before}{run}", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def left_by(pid: int) -> list[str]:
    return [name for name in network.namespaces() if name.split("-")[2] == str(pid)]


@pytest.fixture
def cells(tmp_path) -> Path:
    path: Path = tmp_path / "cells.yaml"
    path.write_text(yaml.safe_dump(MINIATURE))
    return path


@needs_namespaces
@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_miniature_is_measured_once_and_counts_what_the_interface_counts(cells, tmp_path):
    words = ("measure", "--cells", cells, "--results", tmp_path / "results")
    with start(*words) as process:
        output, _ = process.communicate()
    assert left_by(process.pid) == []
    if "does not count" in output:
        pytest.skip(f"this machine is too busy for the links: {output}")
    assert process.returncode == 0, output
    found = json.loads((tmp_path / "results" / "10mbit-des-loc-0.json").read_text())
    _zero, *windows = found["windows"]
    assert [w["step"] for w in windows] == [2, 4, 6]
    assert all(w["loss"] > 0 for w in windows)
    assert all(w["seconds"]["clients"] >= 2 * 0.05 for w in windows)
    assert found["bytes"]["up"]["total"] == sum(w["payload_up"] for w in windows)
    for way in ("up", "down"):
        wire = report.traffic(found, way)
        content = wire["interface"] - wire["headers"]
        # Besides messages there are polls and heartbeats, which a small payload does not hide.
        assert wire["ledger"] < content < 1.5 * wire["ledger"] + 500_000
    assert report.time_to(found, 9.0) == report.elapsed(found)[0]
    (row,) = report.times([found], [9.0], report.least_by_machine([found])).rows
    assert row[:3] == ["10", "DES-LOC", "1"]
    with start(*words) as process:  # nothing is missing
        assert process.communicate()[0] == ""
    assert process.returncode == 0


def a_run(*ends: tuple[float, float | None], rate: float = 10, boot: str = "a") -> dict[str, Any]:
    """Return a run with a window of one step until each of these seconds, and the loss then."""
    windows = [
        {"step": step, "loss": loss, "seconds": {"evaluation": 0.0}, "interface": {"time": at}}
        for step, (at, loss) in enumerate([(0.0, None), *ends])
    ]
    return {
        "windows": windows,
        "method": "DES-LOC",
        "rate_mbit": rate,
        "machine": {"boot": boot},
        "step_seconds": 1,
    }


def test_the_time_to_a_loss_is_on_the_line_between_two_evaluations():
    run = a_run((10, 3.0), (20, None), (30, 2.0), (40, 2.5), (50, 1.0))
    for loss, seconds in ((3.5, 10), (3.0, 10), (2.5, 20), (2.25, 25), (2.0, 30), (1.75, 45)):
        assert report.time_to(run, loss) == pytest.approx(seconds)
    assert report.time_to(run, 0.9) is None


def test_what_is_left_of_the_interface_is_without_headers_ledger_and_small_messages():
    sides = ("rx", "tx")

    def counted(packets: int, content: int, ledger: int) -> dict[str, Any]:
        windows = []
        for number in range(3):
            at = {f"{side}_packets": number * packets for side in sides}
            at |= {f"{side}_bytes": number * (66 * packets + content) for side in sides}
            framed = {f"framed_bytes_{way}": number and ledger for way in ("up", "down")}
            windows.append({**framed, "interface": at})
        return {"method": "lean", "windows": windows}

    idle, run = counted(10, 900, 400), counted(100, 8_500, 7_600)
    assert report.rest(idle, "up") == 500
    share = 100 * 400 / (6_600 + 8_500)
    for way in ("up", "down"):
        assert report.unexplained([run], idle, way) == [pytest.approx(share)]


def test_a_machine_without_fast_links_has_the_window_seconds_of_the_others():
    fast = [a_run((3, None), (6, None), rate=1000, boot=boot) for boot in "ab"]
    fast[1]["windows"][2]["interface"]["time"] = 8.0
    slow = [a_run((9, None), (99, None), boot=boot) for boot in "bc"]
    assert report.least_by_machine([*fast, *slow]) == {"a": 2, "b": 4, "c": 3}
    fast[0]["method"] = "lean"
    assert report.least_by_machine([*fast, *slow], "lean") == {"a": 2, "b": 2, "c": 2}


@needs_namespaces
@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(cells, tmp_path, number):
    with start("measure", "--cells", cells, "--results", tmp_path / "results") as process:
        wait_until(lambda: len(left_by(process.pid)) == 4, lambda: left_by(process.pid))
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        process.communicate()
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    wait_until(lambda: not any(p.is_running() for p in below), lambda: below)
    if number == signal.SIGKILL:
        with start("--clean") as cleaning:
            assert f"thin-links-{process.pid}-server" in cleaning.communicate()[0]
    assert left_by(process.pid) == []


@pytest.mark.soak
def test_without_root_it_says_so_and_exits_with_2(tmp_path):
    before = "import os\nos.geteuid = lambda: 1000\n"
    with start("calibrate", "--results", tmp_path, before=before) as process:
        output, _ = process.communicate()
    assert output == "thin_links cannot run here: it needs Linux and root\n"
    assert process.returncode == 2, output
