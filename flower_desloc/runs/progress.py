"""A run in the terminal: a live view on a terminal, and lines everywhere else.

The lines are what most people see: under Flower the server app's output goes to a log.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from flower_desloc.config import Config
from flower_desloc.core.formats import EXACT
from flower_desloc.runs.methods import Uploads
from flower_desloc.runs.units import (
    bytes_text,
    duration_text,
    figures,
    loss_text,
    percent_text,
    period_text,
)
from flower_desloc.flower.observer import (
    DATA,
    MEMORY_FREE,
    MEMORY_TOTAL,
    EvaluationRecord,
    Plan,
    Traffic,
    WindowRecord,
    count,
    holdings,
)
from flower_desloc.core.schedule import SyncSchedule

_MANY_WINDOWS = 200
_MANY_CLIENTS = 16
"""So many are named at the start; the rest is a number."""


class Progress:
    """Observer that tells the person who waits; the text goes to ``stream``."""

    def __init__(
        self,
        config: Config,
        schedule: SyncSchedule,
        folder: Path,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._schedule = schedule
        self._folder = folder
        self._stream = stream or sys.stdout
        self._clock = clock
        self._begin = clock()
        self._live: Live | None = None

    def started(self, plan: Plan) -> None:
        """Say what is going to run, and begin the live view if there can be one."""
        self._plan = plan
        self._uploads = Uploads(
            self._schedule, plan.stream_bytes, plan.wire_bytes or plan.stream_bytes, plan.num_steps
        )
        self._traffic = Traffic()
        self._begin = self._clock()
        self._trained = (0, 0.0)  # steps, and the seconds they took
        self._last: WindowRecord | None = None
        self._held_out = ""
        for line in self._opening(plan):
            self._say(line)
        if _is_terminal(self._stream):
            self._live = Live(
                get_renderable=self._view, console=Console(file=self._stream), refresh_per_second=4
            )
            self._live.start()

    def joined(self, client: str, about: Mapping[str, str]) -> None:
        """Name the newcomer."""
        self._say(f"joined: {client}{_about(about)}")

    def replay(self, record: WindowRecord) -> None:
        """Count a window that has been told of already."""
        self._count(record)
        if held_out := _held_out(record):
            self._held_out = f"{held_out} at step {record.step}"

    def window(self, record: WindowRecord) -> None:
        """Say what the window brought."""
        for client, reason in record.left_out.items():
            self._say(f"{self._at(record.step)}  left out: {client}: {_one_line(reason)}")
        self._count(record)
        held_out = _held_out(record)
        if held_out:
            self._held_out = f"{held_out} at step {record.step}"
        if self._live:
            self._live.refresh()
            return
        # Data parallelism has a window a step: nobody reads a thousand lines.
        every = -(-self._plan.num_windows // _MANY_WINDOWS)
        if record.round > 0 and record.round % every == 0:
            self._say(f"{self._at(record.step)}  {self._window_line(record)}")
        if held_out:
            self._say(f"{self._at(record.step)}  held-out loss {held_out}")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """End the live view and print the closing table."""
        if self._live:
            self._live.refresh()
            self._live.stop()
            self._live = None
        self._write("\n" + closing(summary, self._folder) + "\n")

    def _coded(self, plan: Plan) -> Iterator[str]:
        wire = {s: f for s, f in self._config.wire.items() if f != EXACT}
        if wire:
            sizes = (f"{s} {f} {bytes_text(plan.wire_bytes[s])}" for s, f in wire.items())
            yield f"on the wire: {', '.join(sizes)}"

    def _opening(self, plan: Plan) -> list[str]:
        periods = ", ".join(f"{s} {period_text(p)}" for s, p in self._schedule.periods.items())
        sizes = ", ".join(f"{s} {bytes_text(size)}" for s, size in plan.stream_bytes.items())
        coins = self._schedule.coin_seed is not None
        names = list(plan.clients)
        lines = [
            f"run {self._config.run.name}: {plan.num_steps} steps in {plan.num_windows} windows, "
            f"{len(names)} clients, {self._config.optimizer.name}",
            f"averaged: {periods} steps{' on average, by coin' if coins else ''}",
            f"size: {sizes}",
            *self._coded(plan),
            *(f"client {name}{_about(plan.clients[name])}" for name in names[:_MANY_CLIENTS]),
            f"folder: {self._folder}",
        ]
        if len(names) > _MANY_CLIENTS:
            lines.insert(-1, f"and {len(names) - _MANY_CLIENTS} clients more")
        return lines

    def _count(self, record: WindowRecord) -> None:
        self._traffic += record.traffic
        self._last = record
        if record.round > 0:
            self._uploads.add(record.start, record.step, len(record.clients))
            steps, seconds = self._trained
            self._trained = (
                steps + record.step - record.start,
                seconds + record.seconds.get("total", 0.0),
            )

    def _at(self, step: int) -> str:
        width = len(str(self._plan.num_steps))
        return f"step {step:{width}}/{self._plan.num_steps}"

    def _window_line(self, record: WindowRecord) -> str:
        windows = len(str(self._plan.num_windows))
        synced = " ".join(record.streams)
        widest = len(" ".join(self._schedule.periods))
        return (
            f"window {record.round:{windows}}/{self._plan.num_windows}"
            f"  synced {synced:{widest}}"
            f"  loss {loss_text(record.train_loss):>6}"
            f"  up {self._sent('{:>7} ({})')}"
            f"  {self._times()}"
        )

    def _sent(self, form: str) -> str:
        others = {
            "Local Adam": sum(self._uploads.local_adam.values()),
            "DDP": self._uploads.ddp,
        }
        listed = ", ".join(f"{name} {bytes_text(count)}" for name, count in others.items() if count)
        return form.format(bytes_text(sum(self._traffic.up.values())), listed)

    def _times(self) -> str:
        text = duration_text(self._clock() - self._begin)
        steps, seconds = self._trained
        if not steps or self._last is None:
            return text
        left = seconds / steps * (self._plan.num_steps - self._last.step)
        return f"{text}, {duration_text(left)} left"

    def _view(self) -> RenderableType:
        done = self._last.step if self._last else 0
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row("step", f"{done}/{self._plan.num_steps}")
        table.add_row("", ProgressBar(total=self._plan.num_steps, completed=done, width=60))
        if self._last and self._last.round > 0:
            table.add_row("window", f"{self._last.round}/{self._plan.num_windows}")
            table.add_row("synced", " ".join(self._last.streams))
            table.add_row("loss", loss_text(self._last.train_loss))
            table.add_row("sent", self._sent("{}; {}"))
        if self._held_out:
            table.add_row("held-out", self._held_out)
        table.add_row("time", self._times())
        return Panel(table, title=self._config.run.name, title_align="left", width=84)

    def _say(self, line: str) -> None:
        if self._live:
            # Names and reasons are not ours, and may hold rich's [markup].
            self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            self._write(line + "\n")

    def _write(self, text: str) -> None:
        # In one piece: others write to the same log.
        self._stream.write(text)
        self._stream.flush()


def closing(summary: Mapping[str, Any], folder: Path) -> str:
    """Return what is printed at the end of a run: a table, what was saved, and where it all is."""
    counts = summary["bytes"]
    columns = {
        "sent up": counts["measured"]["up"],
        "by formula": counts["analytic"]["up"],
        "Local Adam": counts["local_adam"]["up"],
    }
    if not counts["local_adam"]["up"]["total"]:  # data parallelism has no such counterpart
        del columns["Local Adam"]
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("stream")
    for heading in ("averaged", "times", *columns):
        table.add_column(heading, justify="right")
    for stream, period in summary["config"]["periods"].items():
        sent = (bytes_text(column.get(stream, 0)) for column in columns.values())
        table.add_row(stream, period_text(period), str(summary["syncs"][stream]), *sent)
    table.add_row("total", "", "", *(bytes_text(column["total"]) for column in columns.values()))

    return "\n".join([_rendered(table), *_verdict(summary), f"folder: {folder}"])


def _verdict(summary: Mapping[str, Any]) -> list[str]:
    counts, ratio = summary["bytes"], summary["ratio"]
    others = []
    for method, name in (("local_adam", "Local Adam"), ("ddp", "DDP")):
        if ratio[method] is not None:
            others.append(
                f"{name} {bytes_text(counts[method]['up']['total'])}, "
                f"{figures(ratio[method])} times as much"
            )
    sent = bytes_text(counts["measured"]["up"]["total"])
    lines = [f"sent up {sent}; {'; '.join(others)}"] if others else []
    for where, name in (("central", "held-out loss"), ("federated", "held-out loss on clients")):
        course = summary["evaluation"].get(where, {})
        if "loss" in course:
            lines.append(f"{name}: {_from_to(course['loss'], loss_text)}")
        if "perplexity" in course:
            lines[-1] += f"; perplexity {_from_to(course['perplexity'], figures)}"
        if "accuracy" in course:
            lines[-1] += f"; accuracy {_from_to(course['accuracy'], percent_text)}"
    lines += _by_client(summary.get("fairness"))
    for resumed in summary.get("resumed", []):
        again, ended = resumed["windows_again"], resumed.get("ended")
        lines.append(
            f"gone on with after step {resumed['step']} at {resumed['time']}; {again} "
            f"window{'' if again == 1 else 's'} once more{f'; before, {ended}' if ended else ''}"
        )
    error = f": {summary['error']}" if summary["error"] else ""
    took = duration_text(summary["seconds"].get("total", 0.0))
    lines.append(f"{summary['status']} after {summary['steps']} steps in {took}{error}")
    return lines


def _by_client(fairness: Mapping[str, Any] | None) -> list[str]:
    if fairness is None or fairness["clients"] < 2:
        return []
    name, text = (
        ("accuracy", percent_text) if "accuracy" in fairness["std"] else ("loss", loss_text)
    )
    ends = (f"{fairness[end]['client']} {text(fairness[end][name])}" for end in ("best", "worst"))
    return [
        f"{name} by client: {' to '.join(ends)}; standard deviation {text(fairness['std'][name])}"
    ]


def _from_to(course: Mapping[str, Any], text: Callable[[float | None], str]) -> str:
    best = course["best"]
    better = best is not None and best != course["final"]
    note = f" (best {text(best)} at step {course['best_step']})" if better else ""
    if course.get("final_step") == 0:
        return f"{text(course['first'])} before training"
    return f"{text(course['first'])} to {text(course['final'])}{note}"


def _rendered(table: Table) -> str:
    page = StringIO()
    Console(file=page, width=100, color_system=None, force_terminal=False).print(table)
    return page.getvalue().rstrip()


def _held_out(record: WindowRecord) -> str:
    parts = []
    if record.central:
        parts.append(_loss_and_more(record.central))
    if record.federated:
        parts.append(f"on clients {_loss_and_more(record.federated)}")
    return ", ".join(parts)


def _loss_and_more(evaluation: EvaluationRecord) -> str:
    perplexity = evaluation.overall.get("perplexity")
    accuracy = evaluation.overall.get("accuracy")
    behind = "" if perplexity is None else f" (ppl {figures(perplexity)})"
    behind += "" if accuracy is None else f" ({percent_text(accuracy)} right)"
    return f"{loss_text(evaluation.overall.get('loss'))}{behind}"


def _about(about: Mapping[str, str]) -> str:
    data = ", ".join(f"{name} {size}" for name, size in holdings(about).items())
    told: dict[str, str] = {}
    for key, value in about.items():
        if key.startswith(DATA) and data:
            told["data"] = data
        elif key in (MEMORY_TOTAL, MEMORY_FREE) and (size := count(value)) is not None:
            told[key] = bytes_text(size)
        else:
            told[key] = value
    return f": {', '.join(f'{key} {value}' for key, value in told.items())}" if told else ""


def _one_line(text: str) -> str:
    return " ".join(text.split())  # a client's error may bring its traceback


def _is_terminal(stream: TextIO) -> bool:
    # Flower copies what is printed into the run's log by replacing `write` on the stream itself;
    # a live view would fill that log with every redraw.
    return stream.isatty() and "write" not in getattr(stream, "__dict__", {})
