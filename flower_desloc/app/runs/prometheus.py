"""What Prometheus reads of a run while it goes on."""

import time
from collections.abc import Collection

from flower_desloc.app.runs.folder import Line
from flower_desloc.app.runs.record import RunRecord
from flower_desloc.app.runs.scalars import number
from flower_desloc.core.client_info import ClientInfo
from flower_desloc.flower.observer import EventKind, RunInfo

_LEFT_OUT: Collection[EventKind] = ("failed", "late", "refused", "outlier")
"""What a client is left out for; the text is in ``metrics.jsonl``, the report and the log."""


class PrometheusView:
    """View that serves the numbers of a run at ``http://127.0.0.1:PORT/metrics``.

    What is counted, counts from the start of the run, also after it was resumed.

    Raises ``OSError`` when the port is taken.
    """

    def __init__(self, port: int) -> None:
        # Imported here: it is an extra.
        from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

        registry = CollectorRegistry()

        def gauge(name: str, says: str, *labels: str) -> Gauge:
            return Gauge(f"desloc_{name}", says, labels, registry=registry)

        def counter(name: str, says: str, *labels: str) -> Counter:
            return Counter(f"desloc_{name}", says, labels, registry=registry)

        self._step = gauge("step", "local steps of each client")
        self._windows = counter("windows", "windows that have ended")
        self._ended = gauge("window_end_seconds", "when the last one ended, in seconds since 1970")
        self._seconds = gauge("window_seconds", "seconds of the last window", "phase")
        self._clients = gauge("clients", "clients whose work is in the last window")
        self._left_out = counter("left_out", "windows without a client", "client", "reason")
        self._events = counter("events", "joins, leaves and failures", "client", "kind")
        self._bytes = counter("bytes", "bytes of streams, of all clients", "stream", "direction")
        self._loss = gauge("train_loss", "mean training loss of the last window")
        self._heldout = gauge("heldout", "the last evaluation", "metric", "where")
        self._ended.set(time.time())  # a run that never ends a window is late too
        self._server, self._thread = start_http_server(port, "127.0.0.1", registry)

    def started(self, run: RunInfo) -> None:
        """Begin the counters of the clients."""
        for client, info in run.clients.items():
            self.joined(client, info)

    def joined(self, client: str, info: ClientInfo) -> None:  # noqa: ARG002
        """Begin the counters of a client: Prometheus' ``increase`` does not see a first 1."""
        for reason in _LEFT_OUT:
            self._left_out.labels(client, reason)

    def replay(self, line: Line) -> None:
        """Count a window that was recorded before the run was resumed."""
        self.window(line)

    def window(self, line: Line) -> None:
        """Take the numbers of a window."""
        self._step.set(line["step"])
        self._windows.inc(line["round"] > 0)  # the first line is the model before training
        self._ended.set(time.time())
        for phase, seconds in line["seconds_split"].items():
            self._seconds.labels(phase).set(seconds)
        self._clients.set(len(line["clients"]))
        events = (e for e in line["events"] if e["kind"] in _LEFT_OUT and not e["evaluation"])
        why = {event["client"]: event["kind"] for event in events}
        for client in line["left_out"]:
            self._left_out.labels(client, why.get(client, "")).inc()
        for event in line["events"]:
            self._events.labels(event["client"], event["kind"]).inc()
        for direction in ("up", "down"):
            for stream, count in line[f"bytes_{direction}"].items():
                self._bytes.labels(stream, direction).inc(count)
        self._loss.set(number(line["train_loss"]))
        for where, evaluation in line["evaluation"].items():
            for metric, value in evaluation["overall"].items():
                self._heldout.labels(metric, where).set(number(value))

    def finish(self, record: RunRecord) -> None:  # noqa: ARG002
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
