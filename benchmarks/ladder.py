"""The ladder: the gap of each method to Local by gradient noise, model size and horizon.

    python benchmarks/ladder.py collect runs/ladder_noise ...   # finished runs into results/
    python benchmarks/ladder.py missing studies/ladder_noise.yaml --seed 0 > rest.yaml
    python benchmarks/ladder.py draw                            # docs/ladder.md and ladder.png

`collect` adds the finished runs of a study's folder to benchmarks/results/STUDY.json and keeps the
runs that are already there. `missing` prints a study of the cells that have no result for a seed
yet; --only TEXT keeps the cells whose labels contain all words of TEXT, separated by `;`, and can
be repeated. `draw` writes the page's tables and the gaps that `desloc plan` shows: the difference
to Local with the same seed, partition, optimizer, size, batch and horizon, in per cent, as mean
over the seeds with the 95 % t-interval.
The last column is the smaller of two margins of the loss, 0.5 and 1 %, that is above the interval.
Seeds from 100 on tune learning rates and are not included.
"""

import argparse
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from matplotlib.figure import Figure
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "ladder.md"
LOCAL = "Local"
MEASURED = ROOT / "flower_desloc" / "plan" / "measured.json"
MIN_SEEDS = 3
CHECKS = ("ladder_check",)  # other text
MARGINS = (0.5, 1.0)
TUNING = 100
OTHER_PERIODS = {
    "DES-LOC, half the periods": {"params": 8, "exp_avg": 24, "exp_avg_sq": 48},
    "Local, twice the period": {"params": 32, "exp_avg": 32, "exp_avg_sq": 32},
}
"""Methods at other periods than 16, with which they are compared: the first sends what Local
sends, the second what DES-LOC sends."""
COLOURS = {
    "DES-LOC": "#0072B2",
    "FAVG+OPT": "#D55E00",
    "early average": "#009E73",
    "u as often as x": "#56B4E9",
    "v as often as u": "#999999",
    "DES-LOC, half the periods": "#F0E442",
    "DES-LOC, half the periods, lean": "#8B5A2B",
    "Local, twice the period": "#000000",
    "u never": "#CC79A7",
    "v never": "#E69F00",
}
"""Method -> colour, in the order of tables and legends."""

Run = dict[str, Any]


class Rung(NamedTuple):
    """What a comparison holds fixed, besides the seed."""

    study: str
    partition: str
    optimizer: str
    params: int
    tokens: int
    steps: int
    period: int


class Gap(NamedTuple):
    """Paired differences in per cent: their mean, and the 95 % t-interval."""

    mean: float
    low: float
    high: float
    seeds: int

    @classmethod
    def of(cls, ratios: list[float]) -> "Gap":
        values = [100 * (ratio - 1) for ratio in ratios]
        mean, n = statistics.fmean(values), len(values)
        reach = math.inf
        if n > 1:
            reach = float(stats.t.ppf(0.975, n - 1)) * statistics.stdev(values) / math.sqrt(n)
        return cls(mean, mean - reach, mean + reach, n)

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{self.mean:+.2f}"
        return f"{self.mean:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


def method(config: Run) -> str:
    """Return the method's name, derived from the periods and the formats."""
    return periods_name(config) + (", lean" if config["wire"] else "")


def periods_name(config: Run) -> str:
    """Return the name of a method that sends fp32."""
    sync = config["sync"]
    if "gradients" in sync:
        return "DDP"
    first, second = sync["exp_avg"], sync["exp_avg_sq"]
    for name, periods in OTHER_PERIODS.items():
        if sync == periods:
            return name
    if config["sync_once_at"]:
        return "early average"
    if "reset" in (first, second):
        return "FAVG-OPT"
    if (first, second) == (sync["params"],) * 2:
        return LOCAL
    if first == sync["params"]:
        return "u as often as x"
    if first == second != "never":
        return "v as often as u"
    names = {(True, True): "FAVG+OPT", (True, False): "u never", (False, True): "v never"}
    return names.get((first == "never", second == "never"), "DES-LOC")


def read_run(folder: Path) -> Run | None:
    """Return the record of a finished run; None if the folder holds none."""
    try:
        outcome = json.loads((folder / "outcome.json").read_text())
    except OSError:
        return None
    config = yaml.safe_load(outcome["config"])
    name = method(config)
    record: Run = {
        "cell": slug(folder.parent.name),
        "seed": config["run"]["seed"],
        "optimizer": config["optimizer"]["name"],
        "betas": config["optimizer"]["betas"],
        "method": name,
        "partition": config["data"]["partition"],
        "domains": config["data"]["domains"],
        "clients": config["federation"]["num_clients"],
        "tokens": config["data"]["batch_size"] * config["data"]["seq_len"],
        "steps": config["run"]["steps"],
        "period": 16 if periods_name(config) in OTHER_PERIODS else config["sync"].get("params", 1),
        "sync": config["sync"],
        "sync_once_at": config["sync_once_at"],
        "rate": config["optimizer"]["lr"],
        "status": outcome["status"],
        "seconds": round(outcome["seconds"], 1),
        "date": date.fromtimestamp((folder / "outcome.json").stat().st_mtime).isoformat(),
    }
    if outcome["status"] != "completed":
        return record
    summary = json.loads((folder / "summary.json").read_text())
    windows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    parts = windows[-1]["evaluation"]["central"]["parts"]
    return record | {
        "params": summary["stream_bytes"]["params"] // 4,
        "loss": summary["evaluation"]["central"]["loss"]["final"],
        "perplexity": summary["evaluation"]["central"]["perplexity"]["final"],
        "loss_by_domain": {name: part["loss"] for name, part in parts.items()},
        "momentum_drift": momentum_drift(windows),
        "bytes_sent_by_a_client": summary["bytes"]["measured"]["up"]["total"] // summary["clients"],
        "versions": summary["versions"],
    }


def momentum_drift(windows: list[dict[str, Any]]) -> float | None:
    """Return the median relative drift of exp_avg over its averages in the second half of a run."""
    half = windows[-1]["step"] / 2
    drifts = [w["drift"].get("exp_avg") for w in windows if w["step"] > half]
    ratios = [d["spread"] / d["norm"] for d in drifts if d]
    return statistics.median(ratios) if ratios else None


def slug(labels: str) -> str:
    """Return a cell's labels as in the name of its folder, with one kind of dash."""
    return re.sub(r"[^a-z0-9.]+", "-", labels.lower().replace("+", "-plus-")).strip("-.")


def identity(run: Run) -> str:
    """Return a key that is equal for repetitions of the same run."""
    keys = ("cell", "optimizer", "method", "partition", "tokens", "steps", "period", "rate", "seed")
    return json.dumps([run[key] for key in keys])


def collect(folders: Iterable[Path]) -> None:
    """Add the finished runs of studies to the results."""
    for folder in folders:
        where = RESULTS / f"{folder.name}.json"
        kept = json.loads(where.read_text()) if where.exists() else {"code": [], "runs": []}
        found = {identity(run): run for run in kept["runs"]}
        commit = subprocess.run(
            ["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for place in sorted(folder.glob("[!.]*/*/")):
            run = read_run(place)
            if run is None or identity(run) in found:
                continue
            code = {
                "commit": commit,
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "versions": run.pop("versions", None),
            }
            if code not in kept["code"]:
                kept["code"].append(code)
            found[identity(run)] = run | {"code": kept["code"].index(code)}
        runs = sorted(found.values(), key=identity)
        lines = ",\n".join(f"    {json.dumps(run)}" for run in runs)
        code_lines = ",\n".join(f"    {json.dumps(code)}" for code in kept["code"])
        where.write_text(f'{{\n  "code": [\n{code_lines}\n  ],\n  "runs": [\n{lines}\n  ]\n}}\n')
        print(f"{where}: {len(runs)} runs")


def missing(study: Path, seed: int, only: list[str]) -> None:
    """Print a study of the cells without a result for ``seed``."""
    values = yaml.safe_load(study.read_text())
    results = RESULTS / f"{study.stem}.json"
    runs = json.loads(results.read_text())["runs"] if results.exists() else []
    done = {(run["cell"], run["rate"]) for run in runs if run["seed"] == seed}
    cells: dict[str, Any] = {}
    for labels in product(*values["axes"].values()):
        name = " / ".join(labels)
        if only and not any(all(word in name for word in text.split(";")) for text in only):
            continue
        parts = [
            values["axes"][axis][label] for axis, label in zip(values["axes"], labels, strict=True)
        ]
        parts = [part if isinstance(part, dict) else {"overrides": part} for part in parts]
        cell: dict[str, Any] = {}
        cell["overrides"] = [text for part in parts for text in part.get("overrides", [])]
        cell["config"] = next((part["config"] for part in parts if "config" in part), "quickstart")
        rate = [
            text.partition("=")[2] for text in cell["overrides"] if text.startswith("optimizer.lr=")
        ]
        if (slug(name), float(rate[-1])) not in done:
            cells[name] = cell
    if not cells:
        sys.exit("nothing is missing")
    values |= {"name": study.stem, "axes": {"cell": cells}, "seeds": [seed]}
    yaml.safe_dump(values, sys.stdout, sort_keys=False)


def results() -> list[Run]:
    """Return all collected runs, each with the name of its study."""
    return [
        run | {"study": path.stem}
        for path in sorted(RESULTS.glob("ladder_*.json"))
        for run in json.loads(path.read_text()).get("runs", [])
    ]


def gaps(runs: list[Run]) -> dict[Rung, dict[str, tuple[Gap, Gap]]]:
    """Return the gaps in loss and in perplexity of each method, where Local has the same seeds."""
    found: dict[Rung, dict[str, dict[int, Run]]] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        if run["status"] == "completed" and run["seed"] < TUNING:
            found[Rung(*(run[key] for key in Rung._fields))][run["method"]][run["seed"]] = run
    table: dict[Rung, dict[str, tuple[Gap, Gap]]] = {}
    for rung in sorted(found):
        local = found[rung].pop(LOCAL, {})
        for name in sorted(found[rung], key=[*COLOURS, *found[rung]].index):
            pairs = [(run, local[s]) for s, run in found[rung][name].items() if s in local]
            if pairs:
                table.setdefault(rung, {})[name] = (
                    Gap.of([run["loss"] / other["loss"] for run, other in pairs]),
                    Gap.of([run["perplexity"] / other["perplexity"] for run, other in pairs]),
                )
    return table


def below(gap: Gap) -> str:
    return next((f"{margin} %" for margin in MARGINS if gap.high < margin), "")


def tables(rows: dict[Rung, dict[str, tuple[Gap, Gap]]]) -> Iterator[str]:
    """Yield a table for each study."""
    heads = ["partition", "optimizer", "parameters", "tokens", "steps", "K", "method", "seeds"]
    heads += ["loss, %", "perplexity, %", "below"]
    for study in dict.fromkeys(rung.study for rung in rows):
        lines = [heads, ["---"] * len(heads)]
        for rung, methods in rows.items():
            for name, (loss, perplexity) in methods.items() if rung.study == study else ():
                cells = [*rung[1:], name, loss.seeds, loss, perplexity, below(loss)]
                lines.append([str(cell).replace("by_domain", "by domain") for cell in cells])
        yield f"`{study}`:\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def picture(rows: dict[Rung, dict[str, tuple[Gap, Gap]]]) -> Figure:
    """Draw the gap against the tokens of a worker and step, from the study of the noise."""
    noise = {rung: methods for rung, methods in rows.items() if rung.study == "ladder_noise"}
    optimizers = sorted({rung.optimizer for rung in noise})
    names = {"iid": "IID", "by_domain": "by domain"}
    names = {key: name for key, name in names.items() if any(r.partition == key for r in noise)}
    size = (4.5 * len(names), 3.4 * len(optimizers))
    made = Figure(figsize=size, layout="constrained")
    axes = made.subplots(len(optimizers), len(names), sharex=True, sharey=True, squeeze=False)
    for row, optimizer in zip(axes, optimizers, strict=True):
        for panel, partition in zip(row, names, strict=True):
            panel.axhspan(-MARGINS[0], MARGINS[0], color="#EDEDED", zorder=0)
            panel.axhline(0, color="#777777", lw=0.8)
            panel.set_title(f"{names[partition]}, {optimizer}", loc="left", fontsize=10)
            panel.set_xscale("log", base=2)
            here = {r.tokens: m for r, m in noise.items() if r[1:3] == (partition, optimizer)}
            for index, (name, colour) in enumerate(COLOURS.items()):
                points = [(t, m[name][0]) for t, m in sorted(here.items()) if name in m]
                if not points:
                    continue
                shift = 1.05 ** (index - 2)
                x = [tokens * shift for tokens, _ in points]
                y = [gap.mean for _, gap in points]
                reach = [gap.high - gap.mean if gap.seeds > 1 else 0.0 for _, gap in points]
                panel.errorbar(x, y, reach, fmt="o-", color=colour, ms=4, capsize=3, label=name)
            panel.set_xticks(sorted({rung.tokens for rung in noise}))
            panel.xaxis.set_major_formatter("{x:.0f}")
        row[0].set_ylabel("held-out loss above Local, %")
    for panel in axes[-1]:
        panel.set_xlabel("tokens a worker and step")
    axes[0][0].legend(frameon=False, fontsize=8)
    return made


def package_data(rows: dict[Rung, dict[str, tuple[Gap, Gap]]]) -> str:
    """Return DES-LOC's gaps as the JSON that `desloc plan` reads."""
    names = ("partition", "optimizer", "params", "tokens", "steps")
    gaps = [
        {name: getattr(rung, name) for name in names}
        | {"seeds": gap.seeds, "loss": gap.mean, "low": gap.low, "high": gap.high}
        for rung, methods in rows.items()
        for gap, _ in [methods.get("DES-LOC", (None, None))]
        if gap is not None and gap.seeds >= MIN_SEEDS and rung.study not in CHECKS
    ]
    lines = (
        json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in gap.items()})
        for gap in gaps
    )
    return "[\n" + ",\n".join(f"  {line}" for line in lines) + "\n]\n"


def draw() -> None:
    """Write the page's tables between its markers, the plan's gaps and the picture."""
    rows = gaps(results())
    text = "\n\n".join(tables(rows))
    before, _, rest = DOCUMENT.read_text().partition("<!-- tables -->\n")
    after = rest.partition("\n<!-- /tables -->")[2]
    DOCUMENT.write_text(f"{before}<!-- tables -->\n{text}\n<!-- /tables -->{after}")
    MEASURED.write_text(package_data(rows))
    picture(rows).savefig(DOCUMENT.with_suffix(".png"), dpi=130)
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("collect").add_argument("folders", type=Path, nargs="+")
    rest = commands.add_parser("missing")
    rest.add_argument("study", type=Path)
    rest.add_argument("--seed", type=int, required=True)
    rest.add_argument("--only", action="append", default=[], help="words; joined by `;`")
    commands.add_parser("draw")
    args = parser.parse_args()
    if args.command == "collect":
        collect(args.folders)
    elif args.command == "missing":
        missing(args.study, args.seed, args.only)
    else:
        draw()


if __name__ == "__main__":
    main()
