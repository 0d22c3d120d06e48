"""The tables of research/paper.md, docs/how-to/compress.md and two of thin-links.md.

    python research/paper_tables.py keep runs/coins   # a study's results into research/results
    python research/paper_tables.py draw

`keep` takes rates_of_change, sync_periods, budget_splits, coins and wire; the runs of
paper_baselines, low_frequency, its parts and half-lives, which_moment, norms and those of thin
links are collected by `ladder.py collect`. Differences are paired by seed; in brackets the 95 %
t-interval.
"""

import json
import math
import statistics
from collections import defaultdict
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import ladder
import typer
import yaml
from paired import RESEARCH, RESULTS, Estimate, published, table, write_between

from flower_desloc.app.runs.folder import read_lines

Line = dict[str, Any]
Cells = dict[tuple[str, ...], Line]
LABELS = {
    "u as often as x, lean, bounded": "`lean`",
    "v as often as x, lean, bounded": "`lean` with K_u = 6 K_x, K_v = K_x",
}
FORMATS = {
    "fp32": "fp32, fp32, fp32: loss",
    "bf16": "bf16, bf16, bf16: % above it",
    "int8": "int8, int8, int8",
    "int8, u int4": "**int8, int4, int8**, those of `lean`",
    "int4, moments int8": "int4, int8, int8",
    "int4, v int8": "int4, int4, int8",
}
MOMENTS = ("exp_avg", "exp_avg_sq")
SPLITS = {"Local": "1 and 1", "never": "never (FAVG+OPT)"}
PARTS = {
    "local": "128, 128, 128 (Local)",
    "local-formats-of-lean": "128, 128, 128, formats of `lean`",
    "local-bounded": "128, 128, 128, bounded",
    "u-every-384": "128, 384, 128",
    "v-every-768": "128, 128, 768",
    "v-every-768-bounded": "128, 128, 768, bounded",
    "u-every-384-v-every-768": "128, 384, 768 (DES-LOC)",
    "u-never": "128, never, 128",
    "u-every-384-formats-of-lean": "128, 384, 128, formats of `lean`",
    "u-every-768-formats-of-lean": "128, 768, 128, formats of `lean`",
    "u-every-384-bounded-formats-of-lean": "128, 384, 128, bounded, formats of `lean`",
    "u-never-formats-of-lean": "128, never, 128, formats of `lean`",
}
RARE = {
    "v as often as x": "K_u = 3 K_x",
    "u as often as x, bounded": "K_v = 6 K_x, bounded",
    "DES-LOC": "K_u = 3 K_x, K_v = 6 K_x",
}
"""Methods of the table that asks which moment may be averaged seldom: their columns."""
SHARES = {"Local": "1", "never": "1/3"}
HALF_LIVES = "low_frequency_half_lives"
THIN_LINKS = RESEARCH / "thin_links" / "cells.yaml"
app = typer.Typer(help=__doc__, add_completion=False)


@app.command()
def keep(
    study: Annotated[Path, typer.Argument(help="folder of a study, with results.json")],
) -> None:
    """Copy the results of a study into research/results, with machine, versions and date."""
    found = json.loads((study / "results.json").read_text())
    cells = []
    for cell in found["cells"]:
        # The axes come first, and their labels are all the strings but the tuned setting's name.
        labels = [value for key, value in cell.items() if isinstance(value, str) and key != "key"]
        # In the study's folder, which may have been moved since.
        runs = [study / Path(run).parent.name / Path(run).name for run in cell["runs"]]
        lines = [list(read_lines(run / "metrics.jsonl")) for run in runs]
        summaries = [json.loads((run / "summary.json").read_text()) for run in runs]
        cells.append(
            {
                "labels": labels,
                "seeds": [summary["config"]["seed"] for summary in summaries],
                "scores": cell["scores"],
                "bytes_sent_by_a_client": cell["bytes_up_per_client"],
                "rates_of_change": {
                    name: [rate for run in lines if (rate := rate_of_change(run, name)) is not None]
                    for name in MOMENTS
                },
            }
        )
    about = {
        "study": found["study"],
        **ladder.code_of(study),
        "versions": summaries[0]["versions"],
        "date": date.fromtimestamp((study / "results.json").stat().st_mtime).isoformat(),
    }
    where = RESULTS / f"paper_{found['study']}.json"
    where.write_text(json.dumps(about | {"cells": cells}, indent=1) + "\n")
    print(f"{where}: {len(cells)} cells")


def rate_of_change(lines: list[Line], stream: str) -> float | None:
    """Return a stream's median rate of change |s_t - s_{t-K}| / |s_{t-K}|, if it has one."""
    drifts = [line["drift"][stream] for line in lines if stream in line["drift"]]
    # The first average has no earlier one to compare with.
    changes = [now["moved"] / before["norm"] for before, now in pairwise(drifts)]
    return statistics.median(changes) if changes else None


def kept(study: str) -> Cells:
    """Return the cells of a study that was kept, by their labels."""
    found = json.loads((RESULTS / f"paper_{study}.json").read_text())["cells"]
    return {tuple(cell["labels"]): cell for cell in found}


def collected(study: str) -> list[Line]:
    """Return the runs of a study that `ladder.py collect` collected."""
    runs: list[Line] = json.loads((RESULTS / f"{study}.json").read_text())["runs"]
    return runs


def above(cell: Line, reference: Line) -> Estimate:
    """Return by how many per cent a cell's score exceeds another's."""
    ours, theirs = (dict(zip(c["seeds"], c["scores"], strict=True)) for c in (cell, reference))
    return Estimate.above(ours, theirs)


def rates() -> str:
    """Return the rates of change of the moments, by optimizer and betas (RQ1)."""
    rows = []
    for (label,), cell in kept("rates_of_change").items():
        name, *betas = label.split()
        first, second = (statistics.fmean(cell["rates_of_change"][moment]) for moment in MOMENTS)
        beta_1, beta_2 = map(float, betas)
        predicted = math.log(beta_1) / math.log(beta_2)
        row = [f"{name} {beta_1}, {beta_2}", f"{first:.2f}", f"{second:.2g}"]
        rows.append([*row, f"{first / second:.3g}", f"{predicted:.4g}"])
    heads = ["optimizer, β₁, β₂", "`exp_avg`", "`exp_avg_sq`", "first over second", "predicted"]
    return table(heads, rows)


def periods() -> str:
    """Return the cost of each stream's period while the others stay at K_b (RQ2)."""
    cells = kept("sync_periods")
    columns = [(optimizer, base) for optimizer in ("ADOPT", "Adam") for base in ("16", "64")]
    rows = []
    for position, name in enumerate(("params", "first moment", "second moment")):
        for period in ("16", "64", "256"):
            row = [f"{name} at {period}"]
            for optimizer, base in columns:
                varied = [base] * 3
                varied[position] = period
                reference = cells[optimizer, " ".join([base] * 3)]
                cell = cells.get((optimizer, " ".join(varied)))
                same = cell is reference
                row.append("0" if same else ladder.text(above(cell, reference)) if cell else "")
            rows.append(row)
    heads = [f"{optimizer}, K_b = {base}" for optimizer, base in columns]
    return table(["what varies", *heads], rows)


def splits() -> str:
    """Return the comparison of three splits of one budget."""
    cells = kept("budget_splits")
    names = dict.fromkeys(label.partition(",")[0] for _, label in cells)
    rows = []
    for name in names:
        row = [SPLITS.get(name, name)]
        for optimizer in ("ADOPT", "Adam"):
            for base in ("16", "64"):
                cell, local = (cells[optimizer, f"{each}, K={base}"] for each in (name, "Local"))
                more = "" if cell is local else f", {ladder.text(above(cell, local))}"
                row.append(f"{statistics.fmean(cell['scores']):.3f}{more}")
        rows.append([*row, SHARES.get(name, "1/2")])
    heads = [f"{optimizer}, K_x = {base}" for optimizer in ("ADOPT", "Adam") for base in (16, 64)]
    return table(["K_u, K_v", *heads, "bytes"], rows)


def coins() -> str:
    """Return the losses of SGDM with coins and with periods."""
    cells = kept("coins")
    seeds = cells["periods",]["seeds"]
    rows: list[list[object]] = [
        [name, *(f"{score:.3f}" for score in cell["scores"]), spread(cell["scores"])]
        for (name,), cell in cells.items()
    ]
    more = ladder.text(above(cells["coins",], cells["periods",]))
    rows.append(["coins above periods, %", *[""] * len(seeds), more])
    return table(["", *(f"seed {seed}" for seed in seeds), "mean"], rows)


def methods(study: str, partition: str) -> str:
    """Return the comparison of methods (RQ3), with norms (RQ4), from a study's collected runs."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    for run in collected(study):
        if run["partition"] == partition and run["seed"] < ladder.TUNING:
            # DiLoCo's AdamW is compared with Local Adam.
            optimizer = {"adamw": "adam"}.get(run["optimizer"], run["optimizer"])
            found[optimizer, run["method"]][run["seed"]] = run
    rows: list[list[object]] = []
    for (optimizer, method), seeds in sorted(found.items(), key=lambda item: _order(*item[0])):
        first, *_ = seeds.values()
        label = f"{LABELS.get(method, method)}, {ladder.NAMES[first['optimizer']]}"
        if any(run["status"] != "completed" for run in seeds.values()):
            rows.append([label, "diverged", *[""] * 8])
            continue
        local = found[optimizer, ladder.LOCAL]
        row = [label, ", ".join(sorted({f"{run['rate']:.2g}" for run in seeds.values()}))]
        row += [f"{ladder.bytes_share(seeds, local):.2f}", len(seeds)]
        row += [f"{statistics.fmean(run['loss'] for run in seeds.values()):.3f}"]
        for key in ("loss", "perplexity"):
            row += ["" if seeds is local else ladder.text(ladder.above(seeds, local, key))]
        for key in ("worst_client", "param_norm", "activation_norm"):
            values = [run[key] for run in seeds.values()]
            row += ["" if None in values else spread(values)]  # None: not evaluated on clients
        rows.append(row)
    heads = ["", "rate", "bytes", "seeds", "loss", "above Local's, %", "perplexity, %"]
    return table([*heads, "worst client", "parameters", "activations"], rows)


def parts() -> str:
    """Return the cost of each part of lean alone, at low frequency."""
    found: dict[str, dict[int, Any]] = defaultdict(dict)
    for run in collected(ladder.PARTS[0]):
        found[run["cell"]][run["seed"]] = run
    rows, local = [], found["local"]
    for cell, name in PARTS.items():
        seeds = found[cell]
        mean = f"{statistics.fmean(run['loss'] for run in seeds.values()):.3f}"
        more = "" if seeds is local else ladder.text(ladder.above(seeds, local, "loss"))
        rows.append([name, len(seeds), mean, more])
    return table(["K_x, K_u, K_v", "seeds", "loss", "above Local's, %"], rows)


def which_moment() -> str:
    """Return the cost of rare averages of u, of v and of both, by K_x and by v's half-life."""
    rows = []
    for rung, methods in sorted(
        ladder.gaps(ladder.results()).items(),
        key=lambda each: (each[0].partition, each[0].params, each[0].period),
    ):
        if rung.study not in (*ladder.PARTS, HALF_LIVES):
            continue
        gaps = [methods[name].loss for name in RARE]
        partition = rung.partition.replace("_", " ").replace("iid", "IID")
        setting = [partition, f"{rung.params:,}", rung.period, rung.beta_2]
        rows.append([*setting, gaps[0].seeds, *map(ladder.text, gaps)])
    return table(["partition", "parameters", "K_x", "β₂", "seeds", *RARE.values()], rows)


def _order(optimizer: str, method: str) -> tuple[str, int, str]:
    order = (
        ladder.LOCAL,
        *LABELS,
        "DES-LOC",
        "DES-LOC, bounded",
        "FAVG+OPT",
        "FAVG-OPT",
        "DDP",
        "DiLoCo",
    )
    return optimizer, order.index(method) if method in order else len(order), method


def formats() -> str:
    """Return the cost of lossy formats, compared with fp32 in the same partition."""
    cells = kept("wire")
    partitions = tuple(dict.fromkeys(partition for _, partition in cells))
    rows = []
    for name in dict.fromkeys(name for name, _ in cells):
        ours = [cells[name, partition] for partition in partitions]
        fp32 = [cells["fp32", partition] for partition in partitions]
        sent = fp32[0]["bytes_sent_by_a_client"] / ours[0]["bytes_sent_by_a_client"]
        row = [FORMATS[name], f"1/{sent:.2f}", len(ours[0]["seeds"])]
        for cell, reference in zip(ours, fp32, strict=True):
            loss = f"{statistics.fmean(cell['scores']):.3f}"
            row.append(loss if cell is reference else ladder.text(above(cell, reference)))
        rows.append(row)
    return table(["formats of x, u, v", "bytes", "seeds", *partitions], rows)


def thin_rates() -> str:
    """Return the loss of each method of the thin links by learning rate; the least in bold."""
    found: dict[str, dict[float, float]] = defaultdict(dict)
    for run in collected("thin_links_rates"):
        if run["status"] == "completed":
            found[run["cell"]][float(f"{run['rate']:.2g}")] = run["loss"]
    rates = sorted({rate for losses in found.values() for rate in losses})
    rows = []
    for name in yaml.safe_load(THIN_LINKS.read_text())["methods"]:
        if losses := found.get(ladder.slug(name)):
            shown = {rate: f"{loss:.3f}" for rate, loss in losses.items()}
            best = min(losses, key=losses.__getitem__)
            shown[best] = f"**{shown[best]}**"
            rows.append([name, *(shown.get(rate, "") for rate in rates)])
    return table(["", *(f"{rate:g}" for rate in rates)], rows)


def spread(values: list[float]) -> str:
    mean = f"{statistics.fmean(values):.4g}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.2g}"


TABLES = {
    "rates": rates,
    "periods": periods,
    "splits": splits,
    "coins": coins,
    "baselines by domain": partial(methods, ladder.PAPER, "by_domain"),
    "baselines IID": partial(methods, ladder.PAPER, "iid"),
    "low frequency by domain": partial(methods, ladder.LOW, "by_domain"),
    "low frequency IID": partial(methods, ladder.LOW, "iid"),
    "parts of lean": parts,
    "which moment": which_moment,
    "norms": partial(methods, "norms", "iid"),
    "formats": formats,
    "rates of thin links": thin_rates,
    "longer": partial(methods, "thin_links_longer", "by_domain"),
}
ELSEWHERE = {
    "formats": "compress.md",
    "rates of thin links": "thin-links.md",
    "longer": "thin-links.md",
}
"""Tables of other pages than research/paper.md."""


@app.command()
def draw() -> None:
    """Write the tables into their pages."""
    for name, text in TABLES.items():
        write_between(page_of(name), name, text())


def page_of(name: str) -> Path:
    """Return the page of a table."""
    return published(ELSEWHERE.get(name, "paper.md"))


if __name__ == "__main__":
    app()
