"""The ladder: the gap of each method to Local by gradient noise, model size and horizon.

    python benchmarks/ladder.py collect runs/ladder_noise ...   # finished runs into results/
    python benchmarks/ladder.py missing studies/ladder_noise.yaml --seed 0 > rest.yaml
    python benchmarks/ladder.py draw                            # docs/ladder.md and ladder.png
    python benchmarks/ladder.py compare DES-LOC                 # tables with another reference

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
MEASURED = ROOT / "flower_desloc" / "plan" / "measured.py"
MIN_SEEDS = 3
CHECKS = ("ladder_check", "ladder_check_fresh")  # other text
TUNED = "ladder_tuned"  # every method at a rate of its own
OTHER_BETAS = ("ladder_half_lives",)
MARGINS = (0.5, 1.0)
TUNING = 100
STEPS = 512
PERIOD = 16
NAMES = {"adam": "Adam", "adopt": "ADOPT"}
BY_BYTES = (
    (41_120, 256),
    (213_440, 1024),
    (1_082_496, 1024),
)  # parameters and tokens of the panels by bytes
LIMITS = (-1.6, 3.6)  # per cent, of the figure
OTHER_PERIODS = {
    "DES-LOC, half the periods": {"params": 8, "exp_avg": 24, "exp_avg_sq": 48},
    "Local, twice the period": {"params": 32, "exp_avg": 32, "exp_avg_sq": 32},
    "Local, K = 24": {"params": 24, "exp_avg": 24, "exp_avg_sq": 24},
    "u as often as x, K = 24": {"params": 24, "exp_avg": 24, "exp_avg_sq": 96},
    "u as often as x, K = 12": {"params": 12, "exp_avg": 12, "exp_avg_sq": 96},
    "K = 12/144/288": {"params": 12, "exp_avg": 144, "exp_avg_sq": 288},
    "K = 12/96, v never": {"params": 12, "exp_avg": 96, "exp_avg_sq": "never"},
    "K = 16/32, v never": {"params": 16, "exp_avg": 32, "exp_avg_sq": "never"},
    "u as often as x, K = 22, v never": {"params": 22, "exp_avg": 22, "exp_avg_sq": "never"},
}
"""Methods at other periods than 16, with which they are compared: the first sends what Local
sends, the second what DES-LOC sends."""
FORMATS = {
    ("int8", "int4", "int8"): "lean",
    ("int8", "int8", "int8"): "8 bits",
    ("int4", "int4", "int8"): "4 bits",
    ("int4", "int4"): "4 bits",
}
"""Formats of x, u and v -> their name."""
PACKAGE_HEAD = (
    '"""Measured gaps to Local, as `python benchmarks/ladder.py draw` writes them."""',
    "",
    "from typing import Final",
    "",
    "# ruff: noqa: E501",
    "# fmt: off",
    "# The fields of evidence.MeasuredGap.",
    "GAPS: Final = (",
)
ORDER = (
    "DES-LOC",
    "FAVG+OPT",
    "early average",
    "DES-LOC, bounded",
    "u as often as x",
    "u as often as x, bounded",
    "u as often as x, lean, bounded",
    "u as often as x, lean",
    "u as often as x, 8 bits, bounded",
    "u as often as x, v never, bounded",
    "u as often as x, v never, 4 bits, bounded",
    "u as often as x, K = 24, bounded",
    "u as often as x, K = 12, lean, bounded",
    "u as often as x, K = 22, v never, 4 bits, bounded",
    "K = 16/32, v never, 4 bits, bounded",
    "K = 12/96, v never, 4 bits, bounded",
    "K = 12/144/288, 4 bits, bounded",
    "v as often as u",
    "DES-LOC, half the periods",
    "DES-LOC, half the periods, lean",
    "DES-LOC, lean",
    "Local, lean",
    "Local, twice the period",
    "Local, K = 24, lean",
    "u never",
    "v never",
)
"""Methods in the order of the tables."""
SHOWN = {
    "u as often as x, lean, bounded": ("lean: 16/16/96, coded", "#117733", "o"),
    "u as often as x, lean": ("lean: 16/16/96, coded", "#117733", "o"),
    "DES-LOC": ("DES-LOC: 16/48/96", "#0072B2", "s"),
    "FAVG+OPT": ("FAVG+OPT: 16/never/never", "#D55E00", "^"),
    "u as often as x, v never, 4 bits, bounded": ("16/16/never, 4 bits", "#CCBB44", "v"),
    "K = 12/144/288, 4 bits, bounded": ("12/144/288, 4 bits", "#AA4499", "P"),
    "Local, lean": ("Local: 16, coded", "#999999", "D"),
    "Local, twice the period": ("Local: 32", "#000000", "D"),
    "DES-LOC, half the periods": ("DES-LOC: 8/24/48", "#56B4E9", "s"),
    "DES-LOC, half the periods, lean": ("DES-LOC: 8/24/48, coded", "#882255", "s"),
}
"""Methods of the figure: their label, colour and marker. The tables have all."""
PRESETS_SHOWN = tuple(SHOWN)[:4]
"""Those of the panel by setting."""

FIRST_TABLE = {
    "u as often as x, lean, bounded": "**`lean`: 16/16/96, bounded, lossy formats**",
    "u as often as x, bounded": "16/16/96, bounded, fp32",
    "u as often as x": "the same without the bound",
    "DES-LOC": "DES-LOC as in the paper, 16/48/96",
    "u as often as x, K = 24, bounded": "24/24/96, bounded",
    "Local, twice the period": "Local, 32",
    "FAVG+OPT": "FAVG+OPT, 16",
    "DES-LOC, half the periods": "DES-LOC, 8/24/48",
    "DES-LOC, half the periods, lean": "8/24/48, the formats of `lean`",
    "Local, lean": "Local, 16, the formats of `lean`",
    "Local, K = 24, lean": "Local, 24, the formats of `lean`",
    "DES-LOC, lean": "16/48/96, the formats of `lean`",
}
"""Methods of the table in docs/paper.md."""
FIRST_COLUMNS = {
    ("ladder_tuned", 41_120, 256): "41,120 parameters, 256 tokens, every method at its own rate",
    ("ladder_noise", 41_120, 256): "the same, at one rate",
    ("ladder_size", 213_440, 1024): "213,440, 1024",
    ("ladder_size", 1_082_496, 1024): "1,082,496, 1024",
}

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

    @property
    def reach(self) -> float:
        """Half the interval's width; 0 where one seed has none."""
        return self.high - self.mean if self.seeds > 1 else 0.0

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{self.mean:+.2f}"
        return f"{self.mean:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


class Row(NamedTuple):
    """A method compared with Local: its gaps, its bytes as a share of Local's, and its periods."""

    loss: Gap
    perplexity: Gap
    bytes: float
    sync: dict[str, Any]
    rate: str


def method(config: Run) -> str:
    """Return the method's name, derived from the periods, the formats and the bound."""
    formats = tuple((config["wire"] or {}).values())
    return (
        periods_name(config)
        + (f", {FORMATS[formats]}" if formats else "")
        + (", bounded" if config.get("sync_bound") else "")
    )


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
        return "u as often as x" + (", v never" if second == "never" else "")
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
        "period": PERIOD
        if periods_name(config) in OTHER_PERIODS
        else config["sync"].get("params", 1),
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
    return json.dumps([run[key] for key in (*keys, "domains")])


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
    title = values.get("name", study.stem)
    results = RESULTS / f"{title}.json"
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
    values |= {"name": title, "axes": {"cell": cells}, "seeds": [seed]}
    yaml.safe_dump(values, sys.stdout, sort_keys=False)


def results() -> list[Run]:
    """Return all collected runs, each with the name of its study."""
    return [
        run | {"study": path.stem}
        for path in sorted(RESULTS.glob("ladder_*.json"))
        for run in json.loads(path.read_text()).get("runs", [])
    ]


def gaps(runs: list[Run], reference: str = LOCAL) -> dict[Rung, dict[str, Row]]:
    """Return each method compared with the reference with the same seeds."""
    found: dict[Rung, dict[str, dict[int, Run]]] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        if run["status"] == "completed" and run["seed"] < TUNING:
            found[Rung(*(run[key] for key in Rung._fields))][run["method"]][run["seed"]] = run
    table: dict[Rung, dict[str, Row]] = {}
    for rung in sorted(found):
        local = found[rung].pop(reference, {})
        for name in sorted(found[rung], key=[*ORDER, *found[rung]].index):
            pairs = [(run, local[s]) for s, run in found[rung][name].items() if s in local]
            if pairs:
                loss, perplexity, sent = (
                    [run[key] / other[key] for run, other in pairs]
                    for key in ("loss", "perplexity", "bytes_sent_by_a_client")
                )
                table.setdefault(rung, {})[name] = Row(
                    Gap.of(loss),
                    Gap.of(perplexity),
                    statistics.fmean(sent),
                    pairs[0][0]["sync"],
                    rate_text(*(run["rate"] for run in pairs[0])),
                )
    return table


def rate_text(rate: float, local: float) -> str:
    return f"{rate:g}" if rate == local else f"{rate:g}, Local {local:g}"


def below(gap: Gap) -> str:
    return next((f"{margin} %" for margin in MARGINS if gap.high < margin), "")


def tables(rows: dict[Rung, dict[str, Row]]) -> Iterator[str]:
    """Yield a table for each study."""
    heads = [
        "partition",
        "optimizer",
        "parameters",
        "tokens",
        "steps",
        "K",
        "method",
        "rate",
        "bytes",
        "seeds",
    ]
    heads += ["loss, %", "perplexity, %", "below"]
    for study in dict.fromkeys(rung.study for rung in rows):
        lines = [heads, ["---"] * len(heads)]
        for rung, methods in rows.items():
            for name, row in methods.items() if rung.study == study else ():
                cells = [*rung[1:], name, row.rate, f"{row.bytes:.2f}", row.loss.seeds, *row[:2]]
                cells.append(below(row.loss))
                lines.append([str(cell).replace("by_domain", "by domain") for cell in cells])
        yield f"`{study}`:\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def first_table(rows: dict[Rung, dict[str, Row]]) -> str:
    """Return the table of docs/paper.md: IID, Adam, K_x = 16; in brackets interval and seeds."""
    columns = []
    for study, params, tokens in FIRST_COLUMNS:
        wanted = (study, "iid", "adam", params, tokens, STEPS, PERIOD)
        columns.append(next((methods for rung, methods in rows.items() if rung == wanted), {}))
    lines = [["", "bytes", *FIRST_COLUMNS.values()], ["---"] * (2 + len(columns))]
    for name, label in FIRST_TABLE.items():
        found = [methods.get(name) for methods in columns]
        sent = next(row.bytes for row in found if row)
        cells = [f"{row.loss} {row.loss.seeds}" if row else "" for row in found]
        lines.append([label, f"{sent:.2f}", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_between(page: Path, marker: str, text: str) -> None:
    """Replace what is between the two markers of a page."""
    before, after = re.split(
        rf"(?<=<!-- {marker} -->\n)(?:.*\n)?(?=<!-- /{marker} -->)", page.read_text(), flags=re.S
    )
    page.write_text(f"{before}{text}\n{after}")


def picture(rows: dict[Rung, dict[str, Row]]) -> Figure:
    """Draw the presets' gaps in every setting, and all methods' gaps against their bytes."""
    figure = Figure(figsize=(12.5, 6.4), layout="constrained")
    settings, *sent = figure.subplots(1, 1 + len(BY_BYTES), width_ratios=(1.5, 1, 1, 1))
    for panel in (settings, *sent):
        panel.grid(alpha=0.25)
    by_setting(settings, rows)
    for panel, (params, tokens) in zip(sent, BY_BYTES, strict=True):
        methods = next(
            m
            for rung, m in rows.items()
            if rung[1:6] == ("iid", "adam", params, tokens, STEPS) and rung.study not in CHECKS
        )
        panel.axhspan(-MARGINS[0], MARGINS[0], color="#EDEDED", zorder=0)
        panel.axhline(0, color="#777777", lw=0.8)
        for name in SHOWN:
            if name in methods:
                loss = methods[name].loss
                draw_point(panel, name, methods[name].bytes, loss.mean, yerr=loss.reach)
        panel.plot(1, 0, "D", color="#777777", ms=5)
        panel.annotate("Local", (1, 0), (0, 7), textcoords="offset points", ha="center", size=8)
        panel.set_ylim(*LIMITS)
        panel.set_xscale("log", base=2)
        panel.set_xlim(0.055, 1.4)
        panel.set_xticks([1 / 16, 1 / 8, 1 / 4, 1 / 2, 1], ["1/16", "1/8", "1/4", "1/2", "1"])
        panel.set_xlabel("bytes, Local = 1")
        panel.set_title(f"{params:,} parameters,\n{tokens} tokens, IID", loc="left", fontsize=9)
    sent[0].set_ylabel("loss above Local Adam's, %")
    entries = {
        label: handle
        for panel in sent
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        entries.values(), entries, frameon=False, fontsize=8, loc="outside lower right", ncols=3
    )
    return figure


def by_setting(panel: Any, rows: dict[Rung, dict[str, Row]]) -> None:
    """Draw one line for every setting, with the gaps that have ``MIN_SEEDS``."""
    panel.axvspan(-MARGINS[0], MARGINS[0], color="#EDEDED", zorder=0)
    panel.axvline(0, color="#777777", lw=0.8)
    found = {
        rung: shown
        for rung, methods in sorted(rows.items(), key=lambda item: in_figure(item[0]))
        if rung.period == PERIOD
        and rung.study not in OTHER_BETAS
        and (
            shown := {
                name: methods[name].loss
                for name in PRESETS_SHOWN
                if name in methods and methods[name].loss.seeds >= MIN_SEEDS
            }
        )
    }
    for line, shown in enumerate(found.values()):
        for shift, name in zip((0.22, 0.22, 0, -0.22), PRESETS_SHOWN, strict=True):
            if name in shown:
                gap = shown[name]
                draw_point(panel, name, gap.mean, line - shift, xerr=gap.reach)
    panel.set_yticks(range(len(found)), [setting(rung) for rung in found], fontsize=8)
    panel.set_ylim(len(found) - 0.4, -0.6)
    panel.set_xlim(*LIMITS)
    panel.set_xlabel("loss above Local's with the same optimizer, %")
    panel.set_title("By parameters, and tokens a worker and step", loc="left", fontsize=9)


def in_figure(rung: Rung) -> tuple[Any, ...]:
    """Return a key that sorts settings for the figure."""
    by_domain = rung.partition == "by_domain"
    return rung.optimizer, rung.study in CHECKS, by_domain, rung.params, rung.tokens, rung.steps


def setting(rung: Rung) -> str:
    """Return the figure's words for a setting."""
    words = [f"{rung.params:,}", f"{rung.tokens}"]
    words += ["by domain"] if rung.partition == "by_domain" else []
    words += [f"{rung.steps} steps"] if rung.steps != STEPS else []
    words += [NAMES[rung.optimizer]] if rung.optimizer != "adam" else []
    words += ["other text"] if rung.study in CHECKS else []
    return ", ".join(words)


def draw_point(panel: Any, method: str, x: float, y: float, **reach: float) -> None:
    """Draw a method's point with its interval."""
    label, colour, marker = SHOWN[method]
    panel.errorbar(x, y, label=label, color=colour, fmt=marker, ms=4.5, capsize=2, lw=1.2, **reach)


def package_data(rows: dict[Rung, dict[str, Row]]) -> str:
    """Return the gaps at Local's K_x as the Python file that `desloc plan` and reports read.

    A gap with tuned rates replaces one at Local's rate. Averages at single steps are left out.
    """
    found: dict[tuple[Any, ...], Gap] = {}
    for rung, methods in sorted(rows.items(), key=lambda item: item[0].study == TUNED):
        if rung.study in (*CHECKS, *OTHER_BETAS):
            continue
        for name, row in methods.items():
            few = row.loss.seeds < MIN_SEEDS
            if few or row.sync.get("params") != rung.period or name == "early average":
                continue
            periods = tuple(row.sync[stream] for stream in ("params", "exp_avg", "exp_avg_sq"))
            sent = sum(period != "never" for period in periods)
            words = name.split(", ")
            formats = next((f for f, w in FORMATS.items() if w in words and len(f) == sent), ())
            where = (rung.optimizer, rung.partition, rung.params, rung.tokens, rung.steps)
            found[(periods, formats, name.endswith("bounded"), *where)] = row.loss
    lines = [
        f"    ({', '.join(map(repr, key))}, ".replace("'", '"')
        + f"{gap.seeds}, {gap.mean:.3f}, {gap.low:.3f}, {gap.high:.3f}),"
        for key, gap in found.items()
    ]
    return "\n".join([*PACKAGE_HEAD, *lines, ")", ""])


def draw() -> None:
    """Write the page's tables between its markers, the plan's gaps and the picture."""
    rows = gaps(results())
    text = "\n\n".join(tables(rows))
    write_between(DOCUMENT, "tables", text)
    write_between(DOCUMENT.with_name("paper.md"), "gaps", first_table(rows))
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
    commands.add_parser("compare").add_argument("reference", help="a method of the tables")
    args = parser.parse_args()
    if args.command == "collect":
        collect(args.folders)
    elif args.command == "missing":
        missing(args.study, args.seed, args.only)
    elif args.command == "compare":
        print("\n\n".join(tables(gaps(results(), args.reference))))
    else:
        draw()


if __name__ == "__main__":
    main()
