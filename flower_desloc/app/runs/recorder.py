"""The observer that writes everything about a run: files, curves, terminal output, figures."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Self, TextIO

from flower_desloc.app.config import Config, dump
from flower_desloc.app.config.schema import AUTO
from flower_desloc.app.runs.copy import CopyView
from flower_desloc.app.runs.folder import Line, RunFolder, read_lines
from flower_desloc.app.runs.prometheus import PrometheusView
from flower_desloc.app.runs.record import RunRecord, yaml_mapping
from flower_desloc.app.runs.summary import Status, build, versions
from flower_desloc.app.runs.tensorboard import TensorBoard
from flower_desloc.app.runs.terminal import TerminalView
from flower_desloc.app.runs.tracking import TrackerView
from flower_desloc.core.client_info import ClientInfo
from flower_desloc.flower.checkpoint import Checkpoint
from flower_desloc.flower.observer import Observer, RunInfo, WindowRecord

_log = logging.getLogger(__name__)
_View = TensorBoard | TerminalView | PrometheusView | TrackerView | CopyView


class RunRecorder(Observer):
    """Observer that writes the folder of a run and prints its progress.

    ``metrics.jsonl`` and ``summary.json`` are the record: when they cannot be written, ``OSError``
    ends the run. TensorBoard, terminal, Prometheus, trackers, figures and report are views: one
    that fails is logged and closed, and the run continues.

    Used as a context manager, it writes a summary also for a run that an exception or Ctrl-C ends::

        with RunRecorder(config, folder) as recorder:
            strategy.start(..., observer=recorder)
            recorder.finish("completed", weights_sha256)
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        *,
        resumed: Checkpoint | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self._config = config
        self._folder = folder
        self._run: RunInfo | None = None
        self._finished = False
        self._views: list[_View] = []
        folder.write_config(resumed.settings if resumed else dump(config))
        with _optional("TensorBoard"):
            self._views.append(TensorBoard(folder.tensorboard, resumed.step if resumed else None))
        with _optional("TerminalView"):
            self._views.append(TerminalView(config, folder.path, stream))
        if config.run.metrics_port is not None:
            with _optional(f"run.metrics_port={config.run.metrics_port}"):
                self._views.append(PrometheusView(config.run.metrics_port))
        for name in dict.fromkeys(config.run.trackers):
            self._views.append(TrackerView(name, folder, with_model=config.run.track_model))
        if url := config.run.copy_to:  # the last: it copies what the others write
            self._views.append(CopyView(folder, url, anew=config.run.resume == AUTO))

    def started(self, run: RunInfo) -> None:
        """Keep what is known of the run."""
        self._run = run
        self._for_views(lambda view: view.started(run))
        for line in read_lines(self._folder.metrics):  # of a run that resumes
            self._for_views(lambda view: view.replay(line))  # noqa: B023 - called at once

    def joined(self, client: str, info: ClientInfo) -> None:
        """Print who joined."""
        self._for_views(lambda view: view.joined(client, info))

    def window(self, record: WindowRecord) -> None:
        """Record the window; raises ``OSError`` when ``metrics.jsonl`` cannot be written."""
        line = to_line(record)
        self._folder.append_metrics(line)
        self._for_views(lambda view: view.window(line))

    def finish(
        self, status: Status, weights_sha256: str | None = None, error: str | None = None
    ) -> None:
        """Write the summary, draw the figures, and print the closing table.

        Only the first call has an effect.
        """
        if self._finished:
            return
        self._finished = True
        # Read from the file: not kept in memory, as it has the loss of every step and client.
        lines = list(read_lines(self._folder.metrics))
        summary = build(
            lines,
            config=self._config,
            run=self._run,
            status=status,
            error=error,
            weights_sha256=weights_sha256,
        ) | {"versions": versions(), "resumed": list(read_lines(self._folder.resumes))}
        record = RunRecord(self._folder.path, yaml_mapping(dump(self._config)), lines, summary)
        if self._folder.final.is_dir():
            with _optional("final/README.md"):
                from flower_desloc.app.runs.card import card

                text = card(self._config, summary)
                (self._folder.final / "README.md").write_text(text, encoding="utf-8")
        try:
            self._folder.write_summary(summary)
        finally:
            self._draw(record)
            self._for_views(lambda view: view.finish(record))

    def _draw(self, record: RunRecord) -> None:
        """Draw the figures and the page; at the end, as Matplotlib takes seconds to import."""
        if data := record.client_data:
            with _optional("partition.png"):
                from flower_desloc.app.runs.figures.partition import draw_partition, title

                headline = title(self._config)
                draw_partition(data, self._folder.partition, task=record.task, title=headline)
        with _optional("overview.png"):
            from flower_desloc.app.runs.figures.overview import draw

            draw(record, self._folder.picture)
        with _optional("report.html"):
            from flower_desloc.app.runs.report import write_page

            write_page([record], self._folder.report)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.finish("failed", error="the run ended without a result")
            return
        try:
            self.finish("failed", error=_reason(error))
        except OSError as second:
            # Not raised: the first error is the one to see.
            _log.warning("the summary of the failed run was not written: %s", second)

    def _for_views(self, call: Callable[[_View], None]) -> None:
        for view in list(self._views):
            with _optional(type(view).__name__):
                call(view)
                continue
            self._views.remove(view)


def to_line(record: WindowRecord) -> Line:
    """Return the window as a line of ``metrics.jsonl``; ``evaluation`` is empty without one."""
    evaluations = {"central": record.central, "federated": record.federated}
    return {
        "round": record.round,
        "start": record.start,
        "step": record.step,
        "streams": list(record.streams),
        "bytes_up": dict(record.traffic.up),
        "bytes_down": dict(record.traffic.down),
        "framed_bytes_up": record.traffic.framed_up,
        "framed_bytes_down": record.traffic.framed_down,
        "train_loss": record.train_loss,
        "seconds": record.seconds.get("total", 0.0),
        "seconds_split": _split(record.seconds),
        "clients": {name: asdict(client) for name, client in record.clients.items()},
        "left_out": dict(record.left_out),
        "events": [asdict(event) for event in record.events],
        "drift": {stream: asdict(drift) for stream, drift in record.drift.items()},
        "evaluation": {where: asdict(e) for where, e in evaluations.items() if e},
    }


def _split(seconds: Mapping[str, float]) -> dict[str, float]:
    total = seconds.get("total", 0.0)
    known = {part: seconds.get(part, 0.0) for part in ("clients", "averaging", "evaluation")}
    known["clients"] = min(known["clients"], total)  # clients measure with clocks of their own
    return {"total": total, **known, "exchange": max(0.0, total - sum(known.values()))}


def _reason(error: BaseException) -> str:
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return "the run was stopped"
    return ": ".join(filter(None, [type(error).__name__, str(error)]))


@contextmanager
def _optional(name: str) -> Iterator[None]:
    """Log an error of an output that the run can do without."""
    try:
        yield
    except Exception as error:
        _log.warning("%s failed and is left out; the run is not affected: %r", name, error)
