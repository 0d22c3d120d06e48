"""Shared by the benchmarks: statistics and results. Needs no Flower.

A benchmark is `typer.run(main)`: the arguments of `main` are its options. `--json FILE` stores the
result that is printed.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import numpy as np
import psutil
import torch
import typer
import yaml

Overrides = Annotated[list[str] | None, typer.Argument(help="settings of the runs, KEY=VALUE")]
Times = dict[str, list[float]]
DESLOC = str(Path(sys.executable).with_name("desloc"))


def desloc(
    code: Path, arguments: Iterable[str], python: str | Path = sys.executable
) -> "subprocess.CompletedProcess[str]":
    """Run `desloc` with the code of a checkout, which asks no hub; return how it ended."""
    command = [str(python), "-c", "from flower_desloc.app.cli import app; app()", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(code), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=code, env=environment, capture_output=True, text=True)


def commit_of(folder: Path) -> str:
    """Return the commit of the code that a folder belongs to; "" outside git."""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def spread(values: Iterable[float]) -> dict[str, float]:
    """Return the median, and the 10th and 90th percentile."""
    values = list(values)
    tenths = statistics.quantiles(values, n=10)
    return {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[-1]}


def extremes(values: list[float]) -> dict[str, float]:
    """Return the median, the least and the most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def ratios(values: list[float], to: list[float]) -> list[float]:
    """Return the quotients of values that were measured in turns, pair by pair."""
    return [a / b for a, b in zip(values, to, strict=True)]


def slope(points: list[tuple[int, int]]) -> float:
    """Return the least-squares slope of y over x, where x is beyond half of the last one."""
    x, y = np.array([(x, y) for x, y in points if x > points[-1][0] / 2]).T
    return float(np.polyfit(x, y, 1)[0])


def take_turns(arms: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, Times]:
    """Return wall-clock and CPU seconds of each arm, ``repeats`` times after one warm-up turn."""
    times: dict[str, Times] = {clock: {name: [] for name in arms} for clock in ("wall", "cpu")}
    order = list(arms)
    for turn in range(1 + repeats):
        for name in order:
            began, busy = time.perf_counter(), time.process_time()
            result = arms[name]()
            took, worked = time.perf_counter() - began, time.process_time() - busy
            del result
            if turn > 0:
                times["wall"][name].append(took)
                times["cpu"][name].append(worked)
        order.append(order.pop(0))
    return times


def spreads(seconds: Mapping[str, Times]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the spread of what ``take_turns`` measured, by clock and arm."""
    return {
        clock: {name: spread(values) for name, values in times.items()}
        for clock, times in seconds.items()
    }


def about(device: torch.device | None = None) -> dict[str, Any]:
    """Return date, machine and versions; the machine is the GPU if ``device`` is one."""
    memory = psutil.virtual_memory().total / 1e9
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GB"
    if device is not None and device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    return {
        "date": date.today().isoformat(),
        "machine": machine,
        "versions": versions(),
        "threads": torch.get_num_threads(),
    }


def versions() -> dict[str, str]:
    """Return the versions of those of the main libraries that are installed."""
    found = {}
    for name in ("flwr", "ray", "torch", "transformers"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def report(result: dict[str, Any], path: Path | None, device: torch.device | None = None) -> None:
    """Print a result, its numbers rounded; write it to ``path``, if given, with the machine."""
    text = yaml.safe_dump(
        _rounded(result), sort_keys=False, default_flow_style=None, width=110, allow_unicode=True
    )
    print(text, flush=True)
    if path is not None:
        path.write_text(json.dumps(about(device) | result, indent=2) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
