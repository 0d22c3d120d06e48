"""A run in the terminal: a progress bar on a terminal, one line per window everywhere else.

Most users see the lines: under Flower the output of the server app goes to a log.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import StringIO
from math import isnan
from pathlib import Path
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from flower_desloc.app.config import Config, units
from flower_desloc.app.config.errors import one_line
from flower_desloc.app.config.metric import DIRECTIONS, OF_LOSS, metric_text, ordered
from flower_desloc.app.runs.folder import Line
from flower_desloc.app.runs.record import RunRecord
from flower_desloc.app.runs.summary import OTHER_METHODS
from flower_desloc.core.client_info import ClientInfo
from flower_desloc.core.formats import EXACT
from flower_desloc.core.traffic import Uploads
from flower_desloc.flower.observer import RunInfo

FOLDER = "folder: "
"""What precedes the run's folder in a line of its own."""
_MAX_WINDOW_LINES = 200
_MAX_NAMED_CLIENTS = 16


class TerminalView:
    """View that prints to ``stream``, or to the standard output."""

    def __init__(self, config: Config, folder: Path, stream: TextIO | None) -> None:
        self._config = config
        self._folder = folder
        self._stream = stream or sys.stdout
        self._bar: Progress | None = None
        self._print(f"run {config.run.name}: waiting for its clients to start and load their data")

    def started(self, run: RunInfo) -> None:
        """Print what will run, and show the progress bar if there can be one."""
        self._run = run
        compressed = run.compressed_bytes or run.stream_bytes
        self._uploads = Uploads(self._run.schedule, run.stream_bytes, compressed, run.num_steps)
        self._sent_up = 0
        self._elapsed = 0.0  # of all lines so far, as in the summary
        self._steps, self._seconds = 0, 0.0  # of the windows so far
        for text in self._opening():
            self._print(text)
        # Flower copies what is printed into the run's log by replacing `write` on the stream;
        # a progress bar would fill that log with every redraw.
        copied = "write" in getattr(self._stream, "__dict__", {})
        if self._stream.isatty() and not copied:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.completed}/{task.total}  {task.fields[state]}", markup=False),
                console=Console(file=self._stream),
                refresh_per_second=4,
            )
            self._bar.add_task(self._config.run.name, total=run.num_steps, state="")
            self._bar.start()

    def joined(self, client: str, info: ClientInfo) -> None:
        """Print who joined."""
        self._print(f"joined: {client}{_info(info)}")

    def replay(self, line: Line) -> None:
        """Count a window that was printed before the run was resumed."""
        self._sent_up += sum(line["bytes_up"].values())
        self._elapsed += line["seconds"]
        if line["round"] > 0:
            self._uploads.add(line["start"], line["step"], len(line["clients"]))
            self._steps += line["step"] - line["start"]
            self._seconds += line["seconds"]

    def window(self, line: Line) -> None:
        """Print the window, what was not planned in it, and its evaluation."""
        self.replay(line)
        step = f"step {line['step']:{len(str(self._run.num_steps))}}/{self._run.num_steps}"
        for event in line["events"]:
            if event["kind"] != "joined":  # printed when it happens
                who = f"{event['client']}: " if event["client"] else ""
                who += "evaluation: " if event["evaluation"] else ""
                # A client's error may contain its traceback.
                self._print(f"{step}  {event['kind']}: {who}{one_line(event['what'])}")
        # A client whose loss is not finite fails, so NaN is that of a client that hides it.
        loss = line["train_loss"]
        loss = "hidden" if loss is not None and isnan(loss) else units.loss_text(loss)
        left = self._times(line["step"])
        if self._bar:
            state = f"loss {loss}  up {self._traffic()}  {left}"
            self._bar.update(self._bar.task_ids[0], completed=line["step"], state=state)
        # Data parallelism has a window per step, too many to print.
        elif line["round"] and line["round"] % -(-self._run.num_windows // _MAX_WINDOW_LINES) == 0:
            number = f"{line['round']:{len(str(self._run.num_windows))}}/{self._run.num_windows}"
            synced = f"{' '.join(line['streams']):{len(' '.join(self._run.schedule.periods))}}"
            self._print(
                f"{step}  window {number}  synced {synced}  loss {loss:>6}"
                f"  up {self._traffic()}  {left}"
            )
        if held_out := _held_out(line["evaluation"]):
            self._print(f"{step}  held-out loss {held_out}")

    def finish(self, record: RunRecord) -> None:
        """Remove the progress bar and print the closing table."""
        if self._bar:
            self._bar.stop()
            self._bar = None
        self._print("\n" + closing(record))

    def _opening(self) -> Iterator[str]:
        run = self._run
        sizes = ", ".join(f"{s} {units.bytes_text(size)}" for s, size in run.stream_bytes.items())
        yield (
            f"run {self._config.run.name}: {units.count_text(run.num_steps, 'step')} in "
            f"{units.count_text(run.num_windows, 'window')}, "
            f"{units.count_text(len(run.clients), 'client')}, {self._config.optimizer.name}"
        )
        averaged = units.schedule_text(self._run.schedule, self._config.sync_delay)
        yield f"averaged: {averaged}"
        yield f"size: {sizes}"
        if formats := {s: f for s, f in self._config.compression.items() if f != EXACT}:
            sizes = ", ".join(
                f"{s} {f} {units.bytes_text(run.compressed_bytes[s])}" for s, f in formats.items()
            )
            yield f"compressed: {sizes}"
        for client, info in [*run.clients.items()][:_MAX_NAMED_CLIENTS]:
            yield f"client {client}{_info(info)}"
        if len(run.clients) > _MAX_NAMED_CLIENTS:
            yield f"and {len(run.clients) - _MAX_NAMED_CLIENTS} more clients"
        yield f"{FOLDER}{self._folder}"

    def _traffic(self) -> str:
        others = {"Local Adam": sum(self._uploads.local_adam.values()), "DDP": self._uploads.ddp}
        listed = ", ".join(
            f"{name} {units.bytes_text(count)}" for name, count in others.items() if count
        )
        return f"{units.bytes_text(self._sent_up):>7} ({listed})"

    def _times(self, step: int) -> str:
        elapsed = units.duration_text(self._elapsed)
        if not self._steps:
            return elapsed
        left = self._seconds / self._steps * (self._run.num_steps - step)
        return f"{elapsed}, {units.duration_text(left)} left"

    def _print(self, text: str) -> None:
        if self._bar:
            # Names and reasons come from clients and may contain rich's [markup].
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write(text + "\n")  # in one call, as others write to the same log
            self._stream.flush()


def number_table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> Table:
    """Return a table whose first ``words`` columns are text and the others numbers."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, heading in enumerate(head):
        table.add_column(heading, justify="left" if index < words else "right")
    for row in rows:
        table.add_row(*row)
    return table


def closing(run: RunRecord) -> str:
    """Return what is printed at the end of a run: bytes by stream, results, and the folder."""
    summary, counts = run.summary, run.summary["bytes"]
    columns = {
        "sent up": counts["measured"]["up"],
        "by formula": counts["analytic"]["up"],
        "Local Adam": counts["local_adam"]["up"],
    }
    if not counts["local_adam"]["up"]["total"]:  # undefined for data parallelism
        del columns["Local Adam"]
    by_stream = {
        stream: (run.schedule.period_text(stream), str(summary["syncs"][stream]))
        for stream in run.periods
    }
    rows = [
        [stream, *cells, *(units.bytes_text(column.get(stream, 0)) for column in columns.values())]
        for stream, cells in {**by_stream, "total": ("", "")}.items()
    ]
    page = StringIO()
    table = number_table(["stream", "averaged", "times", *columns], rows)
    Console(file=page, width=100, color_system=None, force_terminal=False).print(table)
    lines = [page.getvalue().rstrip(), *_events(run), *_results(summary), f"{FOLDER}{run.path}"]
    return "\n".join(lines)


def _events(run: RunRecord) -> Iterator[str]:
    events = Counter(event["kind"] for line in run.lines for event in line["events"])
    if events:
        counts = ", ".join(f"{kind} {number}" for kind, number in events.items())
        yield f"events: {counts}; each is in report.html"


def _results(summary: Mapping[str, Any]) -> Iterator[str]:
    counts, ratio = summary["bytes"], summary["ratio"]
    others = [
        f"{name} {units.bytes_text(counts[method]['up']['total'])}, "
        f"{units.figures(ratio[method])} times as much"
        for method, name in OTHER_METHODS.items()
        if ratio[method] is not None
    ]
    if others:
        yield f"sent up {units.bytes_text(counts['measured']['up']['total'])}; {'; '.join(others)}"
    for where, name in (("central", "held-out loss"), ("federated", "held-out loss on clients")):
        course = summary["evaluation"].get(where, {})
        if "loss" in course:
            metrics = [m for m in ordered(course) if m not in ("loss", *OF_LOSS[1:])]
            more = [f"{metric} {_from_to(course[metric], metric)}" for metric in metrics]
            yield "; ".join([f"{name}: {_from_to(course['loss'], 'loss')}", *more])
    yield from _by_client(summary.get("fairness"))
    for resumed in summary.get("resumed", []):
        again = units.count_text(resumed["windows_again"], "window")
        ended = f"; before, {resumed['ended']}" if resumed.get("ended") else ""
        yield (
            f"resumed after step {resumed['step']} at {resumed['time']}, {again} repeated{ended}"
        )
    error = f": {summary['error']}" if summary["error"] else ""
    took = units.duration_text(summary["seconds"].get("total", 0.0))
    yield f"{summary['status']} after {summary['steps']} steps in {took}{error}"


def _by_client(fairness: Mapping[str, Any] | None) -> Iterator[str]:
    if fairness is None or fairness["clients"] < 2:
        return
    name = "accuracy" if "accuracy" in fairness["std"] else "loss"
    if name not in fairness["std"]:
        return  # not all clients have it
    ends = (
        f"{fairness[end]['client']} {metric_text(fairness[end][name], name)}"
        for end in ("best", "worst")
    )
    middle, spread = (metric_text(fairness[key][name], name) for key in ("median", "std"))
    yield f"{name} by client: {' to '.join(ends)}; median {middle}, standard deviation {spread}"


def _from_to(course: Mapping[str, Any], metric: str) -> str:
    first, final, best = (metric_text(course[key], metric) for key in ("first", "final", "best"))
    if course.get("final_step") == 0:
        return f"{first} before training"
    if course["best"] in (None, course["final"]):
        return f"{first} to {final}"
    return f"{first} to {final} (best {best} at step {course['best_step']})"


def _held_out(evaluation: Mapping[str, Any]) -> str:
    texts = []
    for where, name in (("central", ""), ("federated", "on clients ")):
        if where in evaluation:
            overall = evaluation[where]["overall"]
            text = name + units.loss_text(overall.get("loss"))
            if "perplexity" in overall:
                text += f" (ppl {units.figures(overall['perplexity'])})"
            if "accuracy" in overall:
                text += f" ({units.percent_text(overall['accuracy'])} right)"
            own = [name for name in ordered(overall) if name not in DIRECTIONS]
            text += "".join(f", {name} {metric_text(overall[name], name)}" for name in own)
            texts.append(text)
    return ", ".join(texts)


def _info(info: ClientInfo) -> str:
    stated = {
        key: units.bytes_text(int(value)) if key.startswith("memory") else value
        for key, value in info.stated().items()
        if key != "data-version"
    }
    if info.data:
        stated["data"] = ", ".join(f"{name} {size}" for name, size in info.data.items())
    shown = ", ".join(f"{key} {value}" for key, value in stated.items())
    return f": {shown}" if shown else ""
