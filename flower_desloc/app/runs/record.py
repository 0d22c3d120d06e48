"""The record of a run: its configuration, windows and summary, read from its folder."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flower_desloc.app.config import ConfigError, parse
from flower_desloc.app.config.units import count_text, schedule_text
from flower_desloc.app.config.yaml12 import YAMLError, read, values
from flower_desloc.app.runs.folder import Line, RunFolder, read_lines
from flower_desloc.app.runs.summary import build, known_from, schedule_of
from flower_desloc.core.kinds import Kinds
from flower_desloc.core.schedule import PARAMS, Period, SyncSchedule
from flower_desloc.optim import OPTIMIZERS


class NoRunError(ValueError):
    """A path without a run, or a run whose files cannot be read."""


@dataclass(frozen=True)
class RunRecord:
    """Everything that figures, report and terminal show of a run."""

    path: Path
    config: Mapping[str, Any]
    """``config.yaml``, as plain values."""
    lines: Sequence[Line]
    """``metrics.jsonl``."""
    summary: Mapping[str, Any]
    """``summary.json``; of an unfinished run, its summary up to the last complete line."""

    @property
    def name(self) -> str:
        """The run's name; two runs may have the same."""
        return str(self.summary["config"]["name"])

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.summary["config"]["seed"])

    @property
    def status(self) -> str:
        """``completed``, ``failed``, or ``unfinished``: still running, or killed."""
        return str(self.summary["status"])

    @property
    def task(self) -> str:
        """The task."""
        return str(self.summary["config"]["task"])

    @property
    def num_steps(self) -> int:
        """The number of steps completed."""
        return int(self.summary["steps"])

    @cached_property
    def schedule(self) -> SyncSchedule:
        """The schedule."""
        return schedule_of(self.summary)

    @property
    def kinds(self) -> Kinds:
        """Kinds of the optimizers' states; none of one that is named by its import path."""
        section = self.config.get("optimizer", {})
        named = [each.get("name") for each in (section, *section.get("groups", []))]
        known = (OPTIMIZERS[name] for name in named if name in OPTIMIZERS)
        return {state.name: state.kind for each in known for state in each.all_states}

    @property
    def periods(self) -> Mapping[str, Period]:
        """The sync period of each stream."""
        return self.schedule.periods

    @property
    def averaged(self) -> str:
        """The schedule of each stream in words."""
        delay = self.summary["config"]["sync_delay"]
        return f"averaged: {schedule_text(self.schedule, delay)}"

    @property
    def optimizer_and_clients(self) -> str:
        """The optimizer, Flower's strategy if it is one of its own, and the number of clients."""
        strategy = self.config.get("strategy", "desloc")
        by = "" if strategy == "desloc" else f", Flower's own {strategy},"
        clients = count_text(self.summary["clients"], "client")
        return f"{self.summary['config']['optimizer']}{by} on {clients}"

    @cached_property
    def windows(self) -> list[Line]:
        """The lines of training; round 0 is before it."""
        return [line for line in self.lines if line["round"] > 0]

    @cached_property
    def streams(self) -> list[str]:
        """Every stream, also those never sent, in the order of the configuration."""
        seen = (stream for line in self.lines for stream in line["streams"])
        return list(dict.fromkeys([*self.periods, *seen]))

    @cached_property
    def clients(self) -> list[str]:
        """Every client that took part in a window or was left out of one, in natural order."""
        seen = {name for line in self.windows for name in (*line["clients"], *line["left_out"])}
        return sorted(seen | set(self.client_data), key=natural)

    @property
    def client_data(self) -> Mapping[str, Mapping[str, int]]:
        """Client -> domain or label -> size, for the clients that reported it."""
        data: Mapping[str, Mapping[str, int]] = self.summary.get("client_data") or {}
        return {name: data[name] for name in sorted(data, key=natural)}

    @property
    def where(self) -> str:
        """Place where the averaged model was evaluated: ``central``, otherwise ``federated``."""
        return "federated" if self.summary["evaluation"].keys() == {"federated"} else "central"

    def final(self, metric: str) -> float | None:
        """Return a held-out metric of the last evaluation; None without one, or not finite."""
        value = self.summary["evaluation"].get(self.where, {}).get(metric, {}).get("final")
        return None if value is None else float(value)


def find(paths: Iterable[str | Path]) -> list[Path]:
    """Return the folders of the runs at and below ``paths``, each once, in natural order.

    Raises ``NoRunError`` for a path without a run.
    """
    found: dict[Path, None] = {}
    for given in paths:
        path = Path(given).expanduser().resolve()
        if not path.exists():
            raise NoRunError(f"{given}: no such folder; name a run's folder, or a folder of runs")
        config = RunFolder(path).config
        runs = [path] if config.is_file() else {file.parent for file in path.rglob(config.name)}
        if not runs:
            raise NoRunError(
                f"{given}: neither a run's folder (it has no config.yaml) nor a folder of runs"
            )
        found |= dict.fromkeys(sorted(runs, key=lambda run: natural(str(run))))
    return list(found)


def load(path: Path) -> RunRecord:
    """Return the record of a run, finished or not.

    Raises ``NoRunError``, naming the file, when one of its files cannot be read.
    """
    folder = RunFolder(path)
    with _reading(folder.config, "not a configuration"):
        text = folder.config.read_text(encoding="utf-8")
        config = yaml_mapping(text)
    with _reading(folder.metrics, "not one JSON object a line"):
        lines = list(read_lines(folder.metrics))
    if not folder.summary.exists():
        try:
            settings = parse(text)
        except ConfigError as error:
            raise NoRunError(f"{folder.config}: {error}") from error
        with _reading(folder.metrics, "not the windows of a run"):
            steps, sizes = settings.run.steps, _sizes(lines)
            run = known_from(settings, steps, sizes)
            summary = build(lines, config=settings, run=run, status="unfinished")
            return RunRecord(path, config, lines, summary)
    with _reading(folder.summary, "not the summary of a run"):
        summary = json.loads(folder.summary.read_text(encoding="utf-8"))
        if missing := {"status", "config", "bytes"} - {*summary}:
            raise ValueError(f"it has no {', '.join(sorted(missing))}")
    return RunRecord(path, config, lines, summary)


@contextmanager
def _reading(path: Path, otherwise: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, YAMLError) as error:
        raise NoRunError(f"{path}: {otherwise}: {error}") from error


def yaml_mapping(text: str) -> dict[str, Any]:
    """Return a configuration's YAML as plain values.

    Raises ``TypeError`` when it is not a mapping.
    """
    config = values(read(text))
    if not isinstance(config, dict):
        raise TypeError(f"expected a mapping, got a {type(config).__name__}")
    return {str(key): value for key, value in config.items()}


def natural(text: str) -> list[Any]:
    """Return a sort key that compares numbers in names by value.

    >>> sorted(["client-10", "client-9"], key=natural)
    ['client-9', 'client-10']
    """
    parts = re.split(r"(\d+)", text)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]


def _sizes(lines: Iterable[Line]) -> dict[str, int]:
    """Return the size of each stream that was sent."""
    sizes: dict[str, int] = {}
    for line in lines:
        for stream, count in line["bytes_up"].items():
            # Bytes of clients that were left out are counted too, so the smallest quotient is it.
            size = count // max(1, len(line["clients"]))
            sizes[stream] = min(size, sizes.get(stream, size))
    return {PARAMS: sizes.get("gradients", 0), **sizes}
