"""Runs of a small language model on four domains of text, kept in a file and compared in pairs.

For the studies of docs/beyond.md: 41,120 parameters, four clients in one process, the final loss on
held-out text in nats a byte. A run that is in the file is not repeated.
"""

import argparse
import json
import math
import os
import platform
import shutil
import statistics
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from scipy import stats

from flower_desloc.flower.policy import FederationError
from flower_desloc.runs.folder import read_lines
from flower_desloc.tools.engines.in_process import run_in_process

ROOT = Path(__file__).resolve().parents[1]
CLIENTS = 4
COMMON = (
    "run.eval_every=0", "run.checkpoint_every=0",
    "model.hidden_size=32", "model.intermediate_size=128", "model.num_hidden_layers=2",
    "model.num_attention_heads=2", "data.domains=[wiki,python,math,french]",
    "data.max_bytes=4000000", "data.seq_len=32", "evaluation.sequences=512",
    "evaluation.federated=false",
)  # fmt: skip


def run(preset: str, overrides: Iterable[str], data: Path, folder: Path) -> dict[str, Any]:
    """Return the summary of one run, with its metrics as ``lines``; ``folder`` holds it meanwhile.

    A run whose weights are no longer finite returns an empty summary.
    """
    shutil.rmtree(folder, ignore_errors=True)
    config = {
        "config": preset,
        "overrides": " ".join((*COMMON, f"data.source={data}", *overrides)),
        "output-dir": str(folder),
    }
    try:
        run_in_process(config, CLIENTS)
    except FederationError as error:
        if "diverged" not in str(error):
            raise
        return {}
    (path,) = folder.glob("*/summary.json")
    summary: dict[str, Any] = json.loads(path.read_text())
    summary["lines"] = [*read_lines(path.with_name("metrics.jsonl"))]
    shutil.rmtree(folder)
    return summary


def final_loss(summary: Mapping[str, Any]) -> float:
    """Return a run's last held-out loss, or NaN for a run that diverged."""
    if not summary:
        return math.nan
    loss: float = summary["evaluation"]["central"]["loss"]["final"]
    return loss


def kept(path: Path) -> list[dict[str, Any]]:
    """Return the runs of a file of results, none if there is no such file."""
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    return runs


def keep(path: Path, runs: list[dict[str, Any]]) -> None:
    """Write a file of results, a line for each run."""
    about = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "flwr")},
        "common": COMMON,
    }
    head = json.dumps(about, indent=1)[:-2]
    lines = ",\n".join(f"  {json.dumps(run)}" for run in runs)
    path.write_text(f'{head},\n "runs": [\n{lines}\n ]\n}}\n')


class Gap(NamedTuple):
    """Paired differences of losses in per cent: their mean and the 95 % t-interval's reach."""

    mean: float
    reach: float

    @classmethod
    def of(cls, losses: Mapping[int, float], place: Mapping[int, float]) -> "Gap":
        """Compare losses by seed with those of the same seeds in ``place``."""
        both = losses.keys() & place.keys()
        ratios = [100 * (losses[seed] / place[seed] - 1) for seed in sorted(both)]
        if len(ratios) < 2:
            return cls(ratios[0] if ratios else math.nan, math.nan)
        t = float(stats.t.ppf(0.975, len(ratios) - 1))
        reach = t * statistics.stdev(ratios) / math.sqrt(len(ratios))
        return cls(statistics.fmean(ratios), reach)

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ± {self.reach:.2f}"


def command_line(doc: str, measure: Callable[[Path, Path], None], draw: Callable[[], None]) -> None:
    """Run a study's ``measure(data, work)`` or ``draw()``, as the command line says."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("command", choices=("measure", "draw"))
    parser.add_argument("--data", type=Path, help="folder of texts by domain")
    parser.add_argument("--work", type=Path, default=Path("runs/small"), help="for runs under way")
    arguments = parser.parse_args()
    if arguments.command == "draw":
        draw()
    elif arguments.data is None:
        parser.error("measure needs --data FOLDER")
    else:
        measure(arguments.data.resolve(), arguments.work)
