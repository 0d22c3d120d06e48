"""The report of a run that goes on."""

import socket
import struct
import threading
import urllib.request
from urllib.parse import urlsplit

import pytest
from command import refused
from tiny import TINY, train

from flower_desloc.app.plan.wall_clock import REPORTED
from flower_desloc.app.runs import RunFolder
from flower_desloc.app.runs.record import NoRunError
from flower_desloc.app.runs.report import live
from flower_desloc.app.runs.report.live import serving


def got(url: str) -> str:
    with urllib.request.urlopen(url) as answer:
        text: str = answer.read().decode()
        return text


def test_the_page_follows_the_run(tmp_path, monkeypatch):
    """The run is cut to its first lines, and goes on. Figures are drawn by another test."""

    def drawn(runs, _link, version):
        return f"{version} {runs[0].status}", {}

    monkeypatch.setattr(live, "html_of", drawn)
    path = train(tmp_path, *TINY, "run.steps=4", "run.eval_every=2", "sync.params=2")
    folder = RunFolder(path)
    summary, lines = folder.summary.read_text(), folder.metrics.read_text().splitlines(True)
    folder.summary.unlink()
    folder.metrics.write_text("".join(lines[:-1]))
    with serving([path], 0, REPORTED) as url:
        before = got(url)
        version = got(f"{url}version")
        assert version in before
        assert got(url) is not before
        assert got(url) == before
        assert "unfinished" in before
        folder.metrics.write_text("".join(lines))
        folder.summary.write_text(summary)
        assert got(f"{url}version") != version
        after = got(url)
    assert "completed" in after


def test_a_run_that_has_recorded_nothing_yet_has_a_page_that_asks_again(tmp_path):
    path = train(tmp_path, *TINY, "run.steps=2", "run.eval_every=0")
    folder = RunFolder(path)
    folder.summary.unlink()
    folder.metrics.unlink()
    with serving([path], 0, REPORTED) as url:
        assert f'!== "{got(f"{url}version")}"' in got(url)


def test_a_page_that_is_closed_while_it_is_drawn_is_no_error(tmp_path, capfd, monkeypatch):
    path = train(tmp_path, *TINY, "run.steps=2", "run.eval_every=0")
    capfd.readouterr()
    monkeypatch.setattr(live, "html_of", lambda *_: ("drawn " * 100_000,))
    with serving([path], 0, REPORTED) as url:
        before = threading.active_count()
        with socket.create_connection(("127.0.0.1", urlsplit(url).port or 0)) as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            reader.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert "drawn" in got(url)
        while threading.active_count() > before:
            pass
    assert capfd.readouterr().err == ""


def test_a_folder_without_a_run_is_refused(tmp_path):
    with (
        pytest.raises(NoRunError, match="nor a folder of runs"),
        serving([tmp_path], 0, REPORTED),
    ):
        pass


def test_a_file_is_not_asked_for_as_well(tmp_path):
    assert "--live writes no file" in refused("report", tmp_path, "--live", "--output", "page.html")
