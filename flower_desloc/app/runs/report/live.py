"""The report of runs that go on, on a server of its own."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from flower_desloc.app.plan.wall_clock import Link
from flower_desloc.app.runs.folder import RunFolder
from flower_desloc.app.runs.record import NoRunError, find, load
from flower_desloc.app.runs.report.page import html_of


class LiveReport:
    """The page of the runs at and below ``paths``, drawn anew when they have changed."""

    def __init__(self, paths: Sequence[str | Path], link: Link) -> None:
        self._paths, self._link = paths, link
        self._lock = threading.Lock()
        self._drawn = ("", "")  # the version, never empty, and the page

    def version(self) -> str:
        """Return what changes with every window; raises ``NoRunError`` if there is no run."""
        runs = [RunFolder(path) for path in find(self._paths)]
        files = [file for run in runs for file in (run.metrics, run.summary) if file.exists()]
        return " ".join(map(str, [len(runs), *(file.stat().st_mtime_ns for file in files)]))

    def page(self) -> str:
        """Return the page; raises ``NoRunError`` if there is no run."""
        with self._lock:  # Matplotlib draws in one thread
            if (version := self.version()) != self._drawn[0]:
                runs = [load(path) for path in find(self._paths)]
                self._drawn = version, html_of(runs, self._link, version)[0]
            return self._drawn[1]


@contextmanager
def serving(paths: Sequence[str | Path], port: int, link: Link) -> Iterator[str]:
    """Serve the report at ``port`` of this machine; return its address.

    Raises ``NoRunError`` when there is no run, and ``OSError`` when the port is taken.
    """
    report = LiveReport(paths, link)
    report.version()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                answer = report.version() if self.path == "/version" else report.page()
                status = HTTPStatus.OK
            except NoRunError as error:
                answer = f'<meta http-equiv="refresh" content="2">{escape(str(error))}'
                status = HTTPStatus.SERVICE_UNAVAILABLE
            data = answer.encode()
            with suppress(ConnectionError):  # a page that is closed while it is drawn
                self.send_response(status)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()
