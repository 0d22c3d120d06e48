"""A study in the terminal: a live view on a terminal, one line a run everywhere else."""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from flower_desloc.runs.units import duration_text
from flower_desloc.tools.study.cell import Run
from flower_desloc.tools.study.plan import Plan
from flower_desloc.tools.study.spec import Study
from flower_desloc.tools.study.store import Done, Store

_TAIL = 65536
_STEP = re.compile(rb'"step": (\d+)')


class Progress:
    """View of a study; as a context manager, or a live view would stay on the screen."""

    def __init__(self, study: Study, store: Store, jobs: int, console: Console) -> None:
        self._study = study
        self._store = store
        self._jobs = jobs
        self._console = console
        self._began = time.monotonic()
        self._starts: dict[str, float] = {}
        self._seconds: list[float] = []
        self._plans: Mapping[str, Plan] = {}
        self._running: list[Run] = []
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._view, console=self._console, refresh_per_second=2
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def started(self, run: Run) -> None:
        """Take the time."""
        self._starts[run.title] = time.monotonic()

    def finished(self, run: Run, done: Done, plans: Mapping[str, Plan]) -> None:
        """Say what the run brought."""
        self._plans = plans
        self._seconds.append(done.outcome["seconds"])
        number, total = _counts(plans)
        score = done.score(self._study.score)
        brought = "diverged" if done.diverged else f"{self._study.score.metric} {score:.4f}"
        took = duration_text(done.outcome["seconds"])
        self._say(f"{number}/{total}  {run.title}: {brought} in {took}{self._left(number, total)}")

    def said(self, text: str) -> None:
        """Say it."""
        self._say(" ".join(text.split()))

    def tick(self, plans: Mapping[str, Plan], running: list[Run]) -> None:
        """Take note of what goes on."""
        self._plans, self._running = plans, running

    def _left(self, number: int, total: int) -> str:
        if not self._seconds or number == total:
            return ""
        mean = sum(self._seconds) / len(self._seconds)
        return f", about {duration_text(mean * (total - number) / self._jobs)} left"

    def _say(self, line: str) -> None:
        # Labels are not ours, and may hold rich's [markup].
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _view(self) -> RenderableType:
        number, total = _counts(self._plans)
        runs = Table.grid(padding=(0, 2))
        for run in self._running:
            step, steps = (
                _step(self._store.scratch(run) / run.config.run.name),
                run.config.run.steps,
            )
            took = duration_text(time.monotonic() - self._starts[run.title])
            bar = ProgressBar(total=steps, completed=step, width=24)
            runs.add_row(run.title, bar, f"{step}/{steps}", took)
        head = Table.grid(padding=(0, 2))
        head.add_row(
            self._study.name,
            ProgressBar(total=max(total, 1), completed=number, width=40),
            f"{number}/{total} runs{self._left(number, total)}, "
            f"{duration_text(time.monotonic() - self._began)} so far",
        )
        return Group(head, runs)


def _counts(plans: Mapping[str, Plan]) -> tuple[int, int]:
    """Return how many runs are done, and how many there are as far as is known."""
    done = len(set[str]().union(*(plan.done for plan in plans.values())))
    return done, done + sum(len(plan.missing) + plan.later for plan in plans.values())


def _step(folder: Path) -> int:
    """Return the step that a run has reached, from the end of its metrics."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            steps = _STEP.findall(file.read())
    except OSError:
        return 0
    return int(steps[-1]) if steps else 0
