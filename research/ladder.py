"""The ladder: the gap of each method to Local by gradient noise, model size and horizon.

    python research/ladder.py collect runs/ladder_noise ...   # finished runs into results/
    python research/ladder.py missing research/studies/ladder_noise.yaml --seed 0 > rest.yaml
    python research/ladder.py draw                            # research/ladder.md and ladder.png
    python research/ladder.py compare DES-LOC                 # tables with another reference

`collect` adds the finished runs of a study's folder to research/results/STUDY.json and keeps the
runs that are already there. `missing` prints a study of the cells that have no result for a seed
yet; --only TEXT keeps the cells whose labels contain all words of TEXT, separated by `;`, and can
be repeated. `draw` writes the page's tables: the difference to Local with the same seed, partition,
optimizer, size, batch and horizon, in per cent, as mean over the seeds with the 95 % t-interval.
The last column is the smaller of two margins of the loss, 0.5 and 1 %, that is above the interval.
Seeds from 100 on tune learning rates and are not included.
"""

import json
import math
import os
import platform
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, NamedTuple

import typer
import yaml
from paired import GREY, RESEARCH, RESULTS, Estimate, commit_of, table, write_between

from flower_desloc.app.config import load
from flower_desloc.app.runs.figures import style
from flower_desloc.app.runs.folder import read_lines
from flower_desloc.app.study.study_file import read_study

DOCUMENT = RESEARCH / "ladder.md"
LOCAL = "Local"
MIN_SEEDS = 3
CHECKS = ("ladder_check", "ladder_check_fresh", "low_frequency_check")  # other text
TUNED = "ladder_tuned"  # every method at a rate of its own
PAPER = "paper_baselines"  # the paper's horizons, tuned too
LOW = "low_frequency"  # and its longer periods, tuned too
PARTS = ("low_frequency_parts", "which_moment")  # one rate; they ask which average costs
OWN_RATES = (TUNED, CHECKS[1], PAPER, LOW)
COLLECTED = ("ladder_*", PAPER, f"{LOW}*", PARTS[1])  # the files of all these
BETA_2 = {"adam": 0.95, "adamw": 0.95, "adopt": 0.9999}  # the paper's
MARGINS = (0.5, 1.0)
TUNING = 100
STEPS = 512
PERIOD = 16
NAMES = {"adam": "Adam", "adamw": "AdamW", "adopt": "ADOPT"}
BY_BYTES = ((41_120, 256), (213_440, 1024), (1_082_496, 1024))
"""Parameters and tokens of the panels by bytes."""
LIMITS = (-2.6, 4.3)  # per cent, of the figure
OTHER_PERIODS = {
    "DES-LOC, half the periods": (8, 24, 48),
    "Local, twice the period": (32, 32, 32),
    "Local, K = 24": (24, 24, 24),
    "u as often as x, K = 24": (24, 24, 96),
    "u as often as x, K = 12": (12, 12, 96),
    "K = 12/144/288": (12, 144, 288),
    "K = 12/96, v never": (12, 96, "never"),
    "K = 16/32, v never": (16, 32, "never"),
    "u as often as x, K = 22, v never": (22, 22, "never"),
}
"""Methods at other periods than 16, with which they are compared: the first sends what Local
sends, the second what DES-LOC sends."""
FLOWERS = {"fedavg": "FedAvg (Flower)", "fedadam": "FedAdam (Flower)"}
FORMATS = {
    ("int8", "int4", "int8"): "lean",
    ("int8", "int8", "int8"): "8 bits",
    ("int4", "int4", "int8"): "4 bits",
    ("int8", "int8"): "8 bits",
    ("int4", "int4"): "4 bits",
}
"""Formats of x, u and v -> their name."""
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
    "v as often as x",
    "v as often as x, lean",
    "v as often as x, lean, bounded",
    "v as often as x, u never",
    "v as often as x, u never, 8 bits",
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
    "u as often as x, lean, bounded": ("lean: 16/16/96, lossy", "#117733", "o"),
    "u as often as x, lean": ("lean: 16/16/96, lossy", "#117733", "o"),
    "DES-LOC": ("DES-LOC: 16/48/96", "#0072B2", "s"),
    "FAVG+OPT": ("FAVG+OPT: 16/never/never", "#D55E00", "^"),
    "u as often as x, v never, 4 bits, bounded": ("16/16/never, 4 bits", "#CCBB44", "v"),
    "K = 12/144/288, 4 bits, bounded": ("12/144/288, 4 bits", "#AA4499", "P"),
    "Local, lean": ("Local: 16, lossy", "#999999", "D"),
    "Local, twice the period": ("Local: 32", "#000000", "D"),
    "DES-LOC, half the periods": ("DES-LOC: 8/24/48", "#56B4E9", "s"),
    "DES-LOC, half the periods, lean": ("DES-LOC: 8/24/48, lossy", "#882255", "s"),
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
"""Methods of the table in research/paper.md."""
FIRST_COLUMNS = {
    ("ladder_tuned", 41_120, 256): "41,120 parameters, 256 tokens, every method at its own rate",
    ("ladder_noise", 41_120, 256): "the same, at one rate",
    ("ladder_size", 213_440, 1024): "213,440, 1024",
    ("ladder_size", 1_082_496, 1024): "1,082,496, 1024",
    ("ladder_size", 4_262_144, 1024): "4,262,144, 1024",
}

Run = dict[str, Any]
app = typer.Typer(help=__doc__, add_completion=False)


class Rung(NamedTuple):
    """What a comparison holds fixed, besides the seed."""

    study: str
    partition: str
    optimizer: str
    params: int
    tokens: int
    steps: int
    period: int
    beta_2: float

    @property
    def has_usual_beta(self) -> bool:
        return self.beta_2 == BETA_2[self.optimizer]


class Row(NamedTuple):
    """A method compared with Local: its gaps, its bytes as a share of Local's, and its periods."""

    loss: Estimate
    perplexity: Estimate
    bytes: float
    sync: dict[str, Any]
    rate: str


def method(config: Run) -> str:
    """Return the method's name, derived from the periods, the formats and the bound."""
    formats = tuple(form for form in (config["wire"] or {}).values() if form != "fp32")
    return (
        periods_name(config)
        + (f", {FORMATS[formats]}" if formats else "")
        + (", bounded" if _is_bounded(config) else "")
    )


def _is_bounded(config: Run) -> bool:
    """Whether the bound can change anything: Adam's moments, averaged at different steps."""
    is_adam = config["optimizer"]["name"] in ("adam", "adamw")
    moments = {config["sync"].get(name, "never") for name in ("exp_avg", "exp_avg_sq")}
    return bool(config.get("sync_bound")) and is_adam and len(moments) > 1


def periods_name(config: Run) -> str:
    """Return the name of a method that sends fp32."""
    sync = config["sync"]
    if config["strategy"] in FLOWERS:
        return FLOWERS[config["strategy"]]
    if config["outer"]["name"] != "none":
        return "DiLoCo"
    if "gradients" in sync:
        return "DDP"
    first, second = sync["exp_avg"], sync["exp_avg_sq"]
    for name, periods in OTHER_PERIODS.items():
        if sync == dict(zip(("params", "exp_avg", "exp_avg_sq"), periods, strict=True)):
            return name
    if config["sync_once_at"]:
        return "early average"
    if "reset" in (first, second):
        return "FAVG-OPT"
    if (first, second) == (sync["params"],) * 2:
        return LOCAL
    if first == sync["params"]:
        return "u as often as x" + (", v never" if second == "never" else "")
    if second == sync["params"]:
        return "v as often as x" + (", u never" if first == "never" else "")
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
    at_other_periods = name.startswith(tuple(OTHER_PERIODS))
    if at_other_periods and folder.parents[1].name in PARTS:
        # Their Local has K_x of every length.
        name, at_other_periods = LOCAL, False
    rate = config["fedadam" if config["strategy"] == "fedadam" else "optimizer"]["lr"]
    record: Run = {
        "cell": slug(folder.parent.name),
        "seed": config["run"]["seed"],
        "optimizer": config["optimizer"]["name"],
        "betas": config["optimizer"]["betas"],
        "method": name,
        "partition": config["data"]["partition"],
        "domains": config["data"]["domains"],
        "clients": config["simulation"]["num_clients"],
        "tokens": config["data"]["batch_size"] * config["data"]["seq_len"],
        "steps": config["run"]["steps"],
        "period": PERIOD if at_other_periods else config["sync"].get("params", PERIOD),
        "sync": config["sync"],
        "sync_once_at": config["sync_once_at"],
        "rate": rate,
        "status": outcome["status"],
        "seconds": round(outcome["seconds"], 1),
        "date": date.fromtimestamp((folder / "outcome.json").stat().st_mtime).isoformat(),
    }
    if outcome["status"] != "completed":
        return record
    summary = json.loads((folder / "summary.json").read_text())
    windows = list(read_lines(folder / "metrics.jsonl"))
    central = [w["evaluation"]["central"] for w in windows if "central" in w.get("evaluation", {})]
    parts = central[-1]["parts"]
    trained = windows[-1]["clients"].values()
    fairness = summary.get("fairness")
    return record | {
        "params": summary["stream_bytes"]["params"] // 4,
        "loss": summary["evaluation"]["central"]["loss"]["final"],
        "perplexity": summary["evaluation"]["central"]["perplexity"]["final"],
        "loss_by_domain": {name: part["loss"] for name, part in parts.items()},
        "worst_client": fairness["worst"]["loss"] if fairness else None,
        "param_norm": fmean(client["param_norm"] for client in trained),
        "activation_norm": max(one["overall"]["activation_norm"] for one in central[1:]),
        "momentum_drift": momentum_drift(windows),
        "bytes_sent_by_a_client": summary["bytes"]["measured"]["up"]["total"] // summary["clients"],
        "versions": summary["versions"],
    }


def momentum_drift(windows: list[dict[str, Any]]) -> float | None:
    """Return the median relative drift of exp_avg over its averages in the second half of a run."""
    half = windows[-1]["step"] / 2
    drifts = [w["drift"].get("exp_avg") for w in windows if w["step"] > half]
    ratios = [d["spread"] / d["norm"] for d in drifts if d]
    return median(ratios) if ratios else None


def slug(labels: str) -> str:
    """Return a cell's labels as in the name of its folder, with one kind of dash."""
    return re.sub(r"[^a-z0-9.]+", "-", labels.lower().replace("+", "-plus-")).strip("-.")


def identity(run: Run) -> str:
    """Return a key that is equal for repetitions of the same run."""
    keys = ("cell", "optimizer", "method", "partition", "tokens", "steps", "period", "rate", "seed")
    return json.dumps([run[key] for key in (*keys, "domains")])


def code_of(folder: Path) -> dict[str, str]:
    """Return the commit of a folder of runs, and the machine."""
    return {"commit": commit_of(folder), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}


@app.command()
def collect(folders: list[Path]) -> None:
    """Add the finished runs of studies to the results."""
    for folder in folders:
        where = RESULTS / f"{folder.name}.json"
        kept = json.loads(where.read_text()) if where.exists() else {"code": [], "runs": []}
        found = {identity(run): run for run in kept["runs"]}
        about = code_of(folder)
        for place in sorted(folder.glob("[!.]*/*/")):
            run = read_run(place)
            if run is None or identity(run) in found:
                continue
            code = {**about, "versions": run.pop("versions", None)}
            if code not in kept["code"]:
                kept["code"].append(code)
            found[identity(run)] = run | {"code": kept["code"].index(code)}
        runs = sorted(found.values(), key=identity)
        lines = ",\n".join(f"    {json.dumps(run)}" for run in runs)
        code_lines = ",\n".join(f"    {json.dumps(code)}" for code in kept["code"])
        where.write_text(f'{{\n  "code": [\n{code_lines}\n  ],\n  "runs": [\n{lines}\n  ]\n}}\n')
        print(f"{where}: {len(runs)} runs")


@app.command()
def missing(
    study: Path,
    seed: Annotated[int, typer.Option()],
    only: Annotated[list[str], typer.Option(help="words; joined by `;`")] = [],  # noqa: B006
) -> None:
    """Print a study of the cells without a result for ``seed``."""
    grid = read_study(study)
    runs = [run for run in results() if (run["study"], run["seed"]) == (grid.name, seed)]
    done = {(run["cell"], run["rate"]) for run in runs}
    cells: dict[str, Any] = {}
    for cell in grid.cells:
        name = " / ".join(cell.labels.values())
        if only and not any(all(word in name for word in text.split(";")) for text in only):
            continue
        if (slug(name), load(cell.config, cell.overrides).optimizer.lr) not in done:
            cells[name] = {"overrides": list(cell.overrides), "config": cell.config}
    if not cells:
        sys.exit("nothing is missing")
    values = yaml.safe_load(study.read_text()) | {"name": grid.name, "base": []}
    values |= {"axes": {"cell": cells}, "seeds": [seed]}
    yaml.safe_dump(values, sys.stdout, sort_keys=False)


def results() -> list[Run]:
    """Return all collected runs, each with the name of its study."""
    return [
        run | {"study": path.stem, "beta_2": run["betas"][1]}
        for path in sorted(p for name in COLLECTED for p in RESULTS.glob(f"{name}.json"))
        for run in json.loads(path.read_text()).get("runs", [])
    ]


def gaps(runs: list[Run], reference: str = LOCAL) -> dict[Rung, dict[str, Row]]:
    """Return each method compared with the reference with the same seeds."""
    found: dict[Rung, dict[str, dict[int, Run]]] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        if run["status"] == "completed" and run["seed"] < TUNING:
            found[Rung(*(run[key] for key in Rung._fields))][run["method"]][run["seed"]] = run
    rows: dict[Rung, dict[str, Row]] = {}
    for rung in sorted(found):
        local = found[rung].pop(reference, {})
        for name in sorted(found[rung], key=[*ORDER, *found[rung]].index):
            seeds = found[rung][name]
            if both := [seed for seed in seeds if seed in local]:
                first, theirs = seeds[both[0]], local[both[0]]
                rows.setdefault(rung, {})[name] = Row(
                    above(seeds, local, "loss"),
                    above(seeds, local, "perplexity"),
                    bytes_share(seeds, local),
                    first["sync"],
                    rate_text(first["rate"], theirs["rate"]),
                )
    return rows


def above(ours: dict[int, Run], theirs: dict[int, Run], key: str) -> Estimate:
    """Compare runs by seed with those of the same seeds, in per cent."""
    return Estimate.above(*({s: run[key] for s, run in runs.items()} for runs in (ours, theirs)))


def bytes_share(ours: dict[int, Run], theirs: dict[int, Run]) -> float:
    """Return the bytes that a client sent, as a share of those with the same seed; their mean."""
    key = "bytes_sent_by_a_client"
    return fmean(run[key] / theirs[seed][key] for seed, run in ours.items() if seed in theirs)


def rate_text(rate: float, local: float) -> str:
    same = math.isclose(rate, local, rel_tol=0.01)  # rates are rounded
    return f"{rate:g}" if same else f"{rate:g}, Local {local:g}"


def text(gap: Estimate) -> str:
    interval = f" ({gap.low:+.2f} to {gap.high:+.2f})" if math.isfinite(gap.reach) else ""
    return f"{gap.mean:+.2f}{interval}"


def tables(rows: dict[Rung, dict[str, Row]]) -> Iterator[str]:
    """Yield a table for each study."""
    heads = ["partition", "optimizer", "parameters", "tokens", "steps", "K", "method", "rate"]
    heads += ["bytes", "seeds", "loss, %", "perplexity, %", "below"]
    for study in dict.fromkeys(rung.study for rung in rows):
        lines = []
        for rung, methods in rows.items():
            for name, row in methods.items() if rung.study == study else ():
                below = next((f"{margin} %" for margin in MARGINS if row.loss.high < margin), "")
                cells = [*rung[1:-1], name, row.rate, f"{row.bytes:.2f}", row.loss.seeds]
                cells += [text(row.loss), text(row.perplexity)]
                lines.append([str(cell).replace("by_domain", "by domain") for cell in cells])
                lines[-1].append(below)
        yield f"`{study}`:\n\n{table(heads, lines)}"


def first_table(rows: dict[Rung, dict[str, Row]]) -> str:
    """Return the table of paper.md: IID, Adam, K_x = 16; in brackets interval and seeds."""
    columns = []
    for study, params, tokens in FIRST_COLUMNS:
        wanted = (study, "iid", "adam", params, tokens, STEPS, PERIOD)
        columns.append(next((methods for rung, methods in rows.items() if rung[:-1] == wanted), {}))
    lines = []
    for name, label in FIRST_TABLE.items():
        found = [methods.get(name) for methods in columns]
        sent = next(row.bytes for row in found if row)
        cells = [f"{text(row.loss)} {row.loss.seeds}" if row else "" for row in found]
        lines.append([label, f"{sent:.2f}", *cells])
    return table(["", "bytes", *FIRST_COLUMNS.values()], lines)


def cost(runs: list[Run]) -> str:
    """Return the least and the median milliseconds of a worker's step, by parameters and tokens."""
    found: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run["status"] == "completed" and run["method"] in (LOCAL, "DES-LOC"):
            step = run["seconds"] / run["steps"] / run["clients"]
            found[run["params"]][run["tokens"]].append(1000 * step)
    tokens = sorted({tokens for times in found.values() for tokens in times})
    rows = []
    for params, times in sorted(found.items()):
        cells = [f"{min(t):.0f}, {median(t):.0f}" if (t := times[n]) else "" for n in tokens]
        rows.append([f"{params:,}", *cells])
    return table(["parameters", *(f"{n} tokens" for n in tokens)], rows)


def picture(rows: dict[Rung, dict[str, Row]]) -> None:
    """Draw the presets' gaps in every setting, and all methods' gaps against their bytes."""
    made, (settings, *sent) = style.figure(1, 1 + len(BY_BYTES), 7.6, width_ratios=(1.5, 1, 1, 1))
    made.set_figwidth(14)
    by_setting(settings, rows)
    for panel, (params, tokens) in zip(sent, BY_BYTES, strict=True):
        wanted = ("iid", "adam", params, tokens, STEPS)
        methods = next(
            m for rung, m in rows.items() if rung[1:6] == wanted and rung.study not in CHECKS
        )
        panel.axhspan(-MARGINS[0], MARGINS[0], color="#EDEDED", zorder=0)
        panel.axhline(0, color=GREY, lw=0.8)
        for name in filter(methods.__contains__, SHOWN):
            draw_point(panel, name, methods[name].bytes, methods[name].loss)
        panel.plot(1, 0, "D", color=GREY, ms=5)
        panel.annotate("Local", (1, 0), (0, 7), textcoords="offset points", ha="center", size=8)
        panel.set_xscale("log", base=2)
        ticks = {1 / 16: "1/16", 1 / 8: "1/8", 1 / 4: "1/4", 1 / 2: "1/2", 1: "1"}
        panel.set_xticks(list(ticks), list(ticks.values()))
        panel.set(ylim=LIMITS, xlim=(0.055, 1.4), xlabel="bytes, Local = 1")
        style.title(panel, f"{params:,} parameters,\n{tokens} tokens, IID")
    sent[0].set_ylabel("loss above Local Adam's, %")
    found = [panel.get_legend_handles_labels() for panel in sent]
    named = {name: handle for both in found for handle, name in zip(*both, strict=True)}
    named = {name: named[name] for name, *_ in SHOWN.values() if name in named}
    made.legend(
        named.values(), named, frameon=False, fontsize=8, loc="outside lower right", ncols=3
    )
    made.savefig(DOCUMENT.with_suffix(".png"), dpi=130)


def by_setting(panel: Any, rows: dict[Rung, dict[str, Row]]) -> None:
    """Draw one line for every setting, with the gaps that have ``MIN_SEEDS``."""
    names = []
    for rung, methods in sorted(rows.items(), key=lambda item: in_figure(item[0])):
        shown = {
            name: methods[name].loss
            for name in PRESETS_SHOWN
            if name in methods and methods[name].loss.seeds >= MIN_SEEDS
        }
        twice = rung.study != PAPER and rung._replace(study=PAPER) in rows
        if not rung.has_usual_beta or rung.study in PARTS or twice or not shown:
            continue
        for shift, name in zip((0.22, 0.22, 0, -0.22), PRESETS_SHOWN, strict=True):
            if name in shown:
                draw_point(panel, name, len(names) - shift, shown[name], flat=True)
        names.append(setting(rung))
    style.rows_axis(panel, names)
    panel.set_yticks(range(len(names)), names, fontsize=7.5)  # every one, however many
    panel.axvspan(-MARGINS[0], MARGINS[0], color="#EDEDED", zorder=0)
    panel.axvline(0, color=GREY, lw=0.8)
    panel.set(xlim=LIMITS, xlabel="loss above Local's with the same optimizer, %")
    style.title(panel, "By setting", "parameters, and tokens a worker and step")


def in_figure(rung: Rung) -> tuple[Any, ...]:
    """Return a key that sorts settings for the figure."""
    by_domain = rung.partition == "by_domain"
    return rung.optimizer, rung.study in CHECKS, by_domain, rung.params, rung.tokens, rung.steps


def setting(rung: Rung) -> str:
    """Return the figure's words for a setting."""
    words = [f"{rung.params:,}", f"{rung.tokens}"]
    words += ["by domain"] if rung.partition == "by_domain" else []
    words += [f"{rung.steps} steps"] if rung.steps != STEPS else []
    words += [f"K = {rung.period}"] if rung.period != PERIOD else []
    words += [NAMES[rung.optimizer]] if rung.optimizer != "adam" else []
    words += ["other text"] if rung.study in CHECKS else []
    words += ["own rates"] if rung.study in OWN_RATES else []
    return ", ".join(words)


def draw_point(panel: Any, method: str, at: float, gap: Estimate, *, flat: bool = False) -> None:
    """Draw a method's point with its interval, which is horizontal if ``flat``."""
    name, colour, marker = SHOWN[method]
    reach = gap.reach if math.isfinite(gap.reach) else 0
    where = (gap.mean, at, None, reach) if flat else (at, gap.mean, reach, None)
    panel.errorbar(*where, label=name, color=colour, fmt=marker, ms=4.5, capsize=2, lw=1.2)


@app.command()
def compare(reference: str) -> None:
    """Print the tables with another method of them as the reference, for example DES-LOC."""
    print("\n\n".join(tables(gaps(results(), reference))))


@app.command()
def draw() -> None:
    """Write the page's tables between its markers, and the picture."""
    runs = results()
    rows = gaps(runs)
    text = "\n\n".join(tables(rows))
    write_between(DOCUMENT, "tables", text)
    write_between(DOCUMENT, "cost", cost(runs))
    write_between(DOCUMENT.with_name("paper.md"), "gaps", first_table(rows))
    picture(rows)
    print(text)


if __name__ == "__main__":
    app()
