"""The held-out loss when averages arrive late (`sync_delay`), and are merged in one of three ways.

    python benchmarks/late_averages.py measure --data FOLDER --work runs/late
    python benchmarks/late_averages.py draw     # docs/late_averages.png, and the tables as text

FOLDER holds a text file for each of the domains wiki, python, math and french. A run that is in
benchmarks/results/late_averages.json is not repeated. *Corrected* is `flower_desloc.core.late`;
*overwritten* replaces every stream by its late average, as it came; *moments dropped* merges the
parameters alone. All arms have the learning rate that was tuned for the arm without delay.
"""

import argparse
import json
import math
import os
import platform
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from matplotlib.figure import Figure
from scipy import stats
from torch import Tensor

from flower_desloc.core import late
from flower_desloc.core.averaging import Stream
from flower_desloc.core.schedule import PARAMS
from flower_desloc.tools.engines.in_process import run_in_process

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "late_averages.json"
PICTURE = ROOT / "docs" / "late_averages.png"
SEEDS = (0, 1, 2)
CLIENTS = 4
COMMON = (
    "run.steps=512", "run.eval_every=0", "run.checkpoint_every=0",
    "model.hidden_size=32", "model.intermediate_size=128", "model.num_hidden_layers=2",
    "model.num_attention_heads=2", "data.domains=[wiki,python,math,french]",
    "data.max_bytes=4000000", "data.seq_len=32", "evaluation.sequences=512",
    "evaluation.federated=false",
)  # fmt: skip
RATES = {256: 0.00594, 1024: 0.0119}
"""Tokens of a worker and step -> the learning rate tuned for DES-LOC-Adam (docs/ladder.md)."""


class Arm(NamedTuple):
    """A cell of the study."""

    tokens: int
    period: int
    partition: str
    delay: int
    way: str = "corrected"

    @property
    def place(self) -> "Arm":
        """The same without delay, with which it is compared."""
        return self._replace(delay=0, way="corrected")


def arms() -> Iterator[Arm]:
    for partition in ("iid", "by_domain"):
        yield Arm(256, 16, partition, 0)
        for delay in (4, 8, 16):
            for way in WAYS:
                yield Arm(256, 16, partition, delay, way)
    for delay in (0, 2, 4, 8, 16):
        yield Arm(1024, 16, "iid", delay)
    for delay in (0, 8, 16, 32, 64):
        yield Arm(256, 64, "iid", delay)


def _overwritten(name: str, now: Stream, sent: Stream, average: Stream, **_: Any) -> Stream:
    del name, now, sent
    return dict(average)


def _params_alone(
    name: str, now: Stream, sent: Stream, average: Stream, **how: Any
) -> Mapping[str, Tensor]:
    return late.merged(name, now, sent, average, **how) if name == PARAMS else now


WAYS: dict[str, Callable[..., Any]] = {
    "corrected": late.merged,
    "overwritten": _overwritten,
    "moments dropped": _params_alone,
}


def measure(data: Path, work: Path) -> None:
    """Run what has no result yet."""
    kept = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []
    done = {(*(run[key] for key in Arm._fields), run["seed"]) for run in kept}
    for seed in SEEDS:
        for arm in arms():
            if (*arm, seed) in done:
                continue
            loss = held_out_loss(arm, seed, data, work)
            kept.append({**arm._asdict(), "seed": seed, "loss": loss})
            print(json.dumps(kept[-1]), flush=True)
            store(kept)


def held_out_loss(arm: Arm, seed: int, data: Path, work: Path) -> float:
    """Return the final loss in nats a byte."""
    overrides = (
        *COMMON,
        f"data.source={data}",
        f"data.partition={arm.partition}",
        f"data.batch_size={arm.tokens // 32}",
        f"optimizer.lr={RATES[arm.tokens]}",
        f"sync.params={arm.period}",
        f"sync.exp_avg={3 * arm.period}",
        f"sync.exp_avg_sq={6 * arm.period}",
        f"sync_delay={arm.delay}",
        f"run.seed={seed}",
    )
    folder = work / "-".join(map(str, (*arm, seed))).replace(" ", "_")
    shutil.rmtree(folder, ignore_errors=True)
    config = {
        "config": "desloc_adam",
        "overrides": " ".join(overrides),
        "output-dir": str(folder),
    }
    with mock.patch("flower_desloc.flower.client.merged", WAYS[arm.way]):
        run_in_process(config, CLIENTS)
    (summary,) = folder.glob("*/summary.json")
    loss: float = json.loads(summary.read_text())["evaluation"]["central"]["loss"]["final"]
    shutil.rmtree(folder)
    return loss


def store(runs: list[dict[str, Any]]) -> None:
    about = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "flwr")},
        "common": COMMON,
    }
    head = json.dumps(about, indent=1)[:-2]
    lines = ",\n".join(f"  {json.dumps(run)}" for run in runs)
    RESULTS.write_text(f'{head},\n "runs": [\n{lines}\n ]\n}}\n')


class Gap(NamedTuple):
    """Paired differences to the same seed without delay, in per cent: mean and 95 % t-interval."""

    mean: float
    reach: float

    @classmethod
    def of(cls, losses: Mapping[tuple[Arm, int], float], arm: Arm) -> "Gap":
        ratios = [
            100 * (loss / losses[arm.place, seed] - 1)
            for (other, seed), loss in losses.items()
            if other == arm and (arm.place, seed) in losses
        ]
        if len(ratios) < 2:
            return cls(math.nan, math.nan)
        t = float(stats.t.ppf(0.975, len(ratios) - 1))
        reach = t * statistics.stdev(ratios) / math.sqrt(len(ratios))
        return cls(statistics.fmean(ratios), reach)

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ± {self.reach:.2f}"


def draw() -> None:
    runs = json.loads(RESULTS.read_text())["runs"]
    losses = {(Arm(*(run[key] for key in Arm._fields)), run["seed"]): run["loss"] for run in runs}
    print("| tokens | K_x | data | delay | " + " | ".join(WAYS) + " |")
    print("|---|---|---|---|" + "---|" * len(WAYS))
    rows = dict.fromkeys(arm._replace(way="") for arm in arms() if arm.delay)
    for row in rows:
        gaps = [Gap.of(losses, row._replace(way=way)) for way in WAYS]
        cells = ["" if math.isnan(gap.mean) else str(gap) for gap in gaps]
        data = "IID" if row.partition == "iid" else "by domain"
        print(f"| {row.tokens} | {row.period} | {data} | {row.delay} | {' | '.join(cells)} |")
    picture(losses).savefig(PICTURE, dpi=100)


def picture(losses: Mapping[tuple[Arm, int], float]) -> Figure:
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    colours = dict(zip(WAYS, ("#0072B2", "#D55E00", "#999999"), strict=True))
    for panel, partition, title in (
        (left, "iid", "IID, K = 16/48/96, 256 tokens"),
        (middle, "by_domain", "by domain, K = 16/48/96, 256 tokens"),
    ):
        for way in WAYS:
            line(panel, losses, [Arm(256, 16, partition, d, way) for d in (4, 8, 16)], way,
                 colours[way])  # fmt: skip
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_yscale("symlog", linthresh=1)
    line(right, losses, [Arm(256, 16, "iid", d) for d in (4, 8, 16)], "K_x = 16, 256 tokens",
         "#0072B2")  # fmt: skip
    line(right, losses, [Arm(1024, 16, "iid", d) for d in (2, 4, 8, 16)], "K_x = 16, 1024 tokens",
         "#009E73")  # fmt: skip
    line(right, losses, [Arm(256, 64, "iid", d) for d in (8, 16, 32, 64)], "K_x = 64, 256 tokens",
         "#CC79A7")  # fmt: skip
    right.set_title("IID, corrected", loc="left", fontsize=10)
    for panel in (left, middle, right):
        panel.axhline(0, color="#777777", lw=0.8)
        panel.set_xlabel("delay, share of the window")
        panel.legend(frameon=False, fontsize=8)
    left.set_ylabel("held-out loss above no delay, %")
    return figure


def line(
    panel: Any, losses: Mapping[tuple[Arm, int], float], points: list[Arm], label: str, colour: str
) -> None:
    gaps = [Gap.of(losses, arm) for arm in points]
    panel.errorbar(
        [arm.delay / arm.period for arm in points],
        [gap.mean for gap in gaps],
        [gap.reach for gap in gaps],
        fmt="o-", ms=4, lw=1.2, capsize=3, color=colour, label=label,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("measure", "draw"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/late_averages"))
    arguments = parser.parse_args()
    if arguments.command == "draw":
        draw()
    elif arguments.data is None:
        parser.error("measure needs --data FOLDER")
    else:
        measure(arguments.data.resolve(), arguments.work)


if __name__ == "__main__":
    main()
