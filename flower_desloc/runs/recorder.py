"""The one observer of a run: everything that is written, drawn and said comes from here."""

import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from flower_desloc.config import Config, dump
from flower_desloc.flower.checkpoint import Checkpoint
from flower_desloc.runs.folder import RunFolder
from flower_desloc.runs.metrics import read_lines, to_line
from flower_desloc.runs.progress import Progress
from flower_desloc.runs.replay import from_line
from flower_desloc.runs.summary import Status, build
from flower_desloc.runs.tensorboard import TensorBoard
from flower_desloc.runs.versions import versions
from flower_desloc.flower.observer import Observer, Plan, WindowRecord, client_data
from flower_desloc.core.schedule import SyncSchedule

_log = logging.getLogger(__name__)


class View(Observer, Protocol):
    """An output the run can do without."""

    def replay(self, record: WindowRecord) -> None:
        """Called after ``started``, for each window before the one a run is gone on with."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Called once, after the last window."""


class RunRecorder(Observer):
    """Observer that fills the run's folder and tells the terminal.

    ``metrics.jsonl`` and ``summary.json`` are the record: when they cannot be written, ``OSError``
    ends the run. TensorBoard, the terminal, the pictures and the report are views: one that fails
    is reported and closed, and the run goes on.

    As a context manager it sees to it that a run ended by an exception or Ctrl-C has a summary::

        with RunRecorder(config, schedule, folder) as recorder:
            strategy.start(..., observer=recorder)
            recorder.finish("completed", weights_sha256)
    """

    def __init__(
        self,
        config: Config,
        schedule: SyncSchedule,
        folder: RunFolder,
        *,
        resumed: Checkpoint | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self._config = config
        self._schedule = schedule
        self._folder = folder
        self._plan: Plan | None = None
        self._finished = False
        self._views: dict[str, View] = {}
        resumed_at = resumed.step if resumed else None
        folder.write_config(resumed.settings if resumed else dump(config))
        self._open("TensorBoard", lambda: TensorBoard(folder.tensorboard, resumed_at))
        self._open("the picture", lambda: _AtEnd(lambda: _draw(folder)))
        self._open("the partition's picture", lambda: _Partition(config, folder))
        self._open("the report", lambda: _AtEnd(lambda: _report_on(folder)))
        self._open("progress", lambda: Progress(config, schedule, folder.path, stream=stream))

    def started(self, plan: Plan) -> None:
        """Take note of the plan."""
        self._plan = plan
        self._tell(lambda view: view.started(plan))
        for line in read_lines(self._folder.metrics):  # of a run that is gone on with
            record = from_line(line)
            self._tell(lambda view: view.replay(record))  # noqa: B023 - called at once

    def joined(self, client: str, about: Mapping[str, str]) -> None:
        """Pass it on."""
        self._tell(lambda view: view.joined(client, about))

    def window(self, record: WindowRecord) -> None:
        """Record the window; raises ``OSError`` when ``metrics.jsonl`` cannot be written."""
        self._folder.append_metrics(to_line(record))
        self._tell(lambda view: view.window(record))

    def finish(
        self, status: Status, weights_sha256: str | None = None, error: str | None = None
    ) -> None:
        """Write the summary, close and draw what is open, and print the closing table.

        Only the first call counts.
        """
        if self._finished:
            return
        self._finished = True
        # From the file, not from memory: the losses of every step of every client are in it.
        summary = build(
            read_lines(self._folder.metrics),
            config=self._config,
            schedule=self._schedule,
            plan=self._plan,
            status=status,
            error=error,
            weights_sha256=weights_sha256,
        ) | {"versions": versions(), "resumed": list(read_lines(self._folder.resumes))}
        try:
            self._folder.write_summary(summary)
        finally:
            self._tell(lambda view: view.finish(summary))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish("failed", error="the run ended without a result")
            return
        try:
            self.finish("failed", error=_why(error))
        except OSError as second:
            # The first error is the one to see.
            _log.warning("the summary of the failed run was not written: %s", second)

    def _open(self, name: str, view: Callable[[], View]) -> None:
        try:
            self._views[name] = view()
        except Exception as error:
            _report(name, error)

    def _tell(self, news: Callable[[View], None]) -> None:
        for name, view in list(self._views.items()):
            try:
                news(view)
            except Exception as error:
                del self._views[name]
                _report(name, error)


def _why(error: BaseException) -> str:
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return "the run was stopped"
    return ": ".join(filter(None, [type(error).__name__, str(error)]))


class _AtEnd:
    """A view that is written when all is over."""

    def __init__(self, write: Callable[[], object]) -> None:
        self._write = write

    def started(self, plan: Plan) -> None: ...

    def joined(self, client: str, about: Mapping[str, str]) -> None: ...

    def replay(self, record: WindowRecord) -> None: ...

    def window(self, record: WindowRecord) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None:  # noqa: ARG002
        self._write()


def _draw(folder: RunFolder) -> None:
    # Imported when wanted: matplotlib takes a second.
    from flower_desloc.runs.figures.overview import draw

    draw(folder.path)


def _report_on(folder: RunFolder) -> None:
    # Imported when wanted, as above.
    from flower_desloc.runs.report import write_report

    write_report([folder.path], folder.report, pngs=False)


class _Partition:
    """The view that draws at the start who holds what, as far as the clients say."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self._config = config
        self._folder = folder

    def started(self, plan: Plan) -> None:
        # Imported when wanted, as above.
        from flower_desloc.runs.figures.partition import draw_partition, title

        if data := client_data(plan):
            path = self._folder.path / "partition.png"
            draw_partition(data, path, task=self._config.task, title=title(self._config))

    def joined(self, client: str, about: Mapping[str, str]) -> None: ...

    def replay(self, record: WindowRecord) -> None: ...

    def window(self, record: WindowRecord) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...


def _report(name: str, error: Exception) -> None:
    _log.warning("%s failed and is left out; the run is not touched: %r", name, error)
