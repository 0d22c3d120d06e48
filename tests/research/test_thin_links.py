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
def test_a_miniature_is_measured_once_and_counts_what_the_interface_counts(
    cells, tmp_path, monkeypatch
):
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
    found["method"] = report.BASELINE
    monkeypatch.setattr(report, "results", lambda *_: ({"targets": [0.5]}, [found], []))
    (row,) = report.times().rows
    assert row[:3] == ["10", report.BASELINE, "1"]
    halfway = report.time_to(found, report.target(found, 0.5))
    assert row[3] == f"{halfway:.0f}"
    with start(*words) as process:  # nothing is missing
        assert process.communicate()[0] == ""
    assert process.returncode == 0


def a_run(*ends: tuple[float, float | None], rate: float = 10) -> dict[str, Any]:
    """Return a run with a window of one step until each of these seconds, and the loss then."""
    windows = [
        {"step": step, "loss": loss, "seconds": {"evaluation": 0.0}, "interface": {"time": at}}
        for step, (at, loss) in enumerate([(0.0, None), *ends])
    ]
    return {
        "windows": windows,
        "method": "DES-LOC",
        "rate_mbit": rate,
        "step_seconds": 1,
    }


def test_the_time_to_a_loss_is_on_the_line_between_two_evaluations():
    run = a_run((10, 3.0), (20, None), (30, 2.0), (40, 2.5), (50, 1.0))
    for loss, seconds in ((3.5, 10), (3.0, 10), (2.5, 20), (2.25, 25), (2.0, 30), (1.75, 45)):
        assert report.time_to(run, loss) == pytest.approx(seconds)
    assert report.time_to(run, 0.9) is None


def test_a_target_is_on_the_baselines_own_curve_with_the_same_seed(monkeypatch):
    baseline = a_run((1, None), (2, 3.0), (3, None), (4, 2.0))
    baseline["windows"][0]["loss"] = 5.0
    baseline |= {"method": report.BASELINE, "seed": 1}
    other = baseline | {"seed": 0, "windows": []}
    monkeypatch.setattr(report, "results", lambda: ({}, [other, baseline], []))
    for share, loss in ((0.25, 4.0), (0.5, 3.0), (0.75, 2.5), (1, 2.0)):
        assert report.target({"seed": 1}, share) == loss


def test_the_least_seconds_of_a_window_are_those_of_the_fastest_links():
    fast = [a_run((3, None), (6, None), rate=1000), a_run((3, None), (8, None), rate=1000)]
    assert report.least_window([*fast, a_run((9, None), (99, None))]) == (2 + 4) / 2


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
