"""The numbers of docs/paper.md that are not in a study's own table.

    python benchmarks/paper_tables.py rates runs/rates_of_change
    python benchmarks/paper_tables.py against runs/low_frequency --reference "Local ADOPT"
    python benchmarks/paper_tables.py baselines

Prints a Markdown table: for each cell the mean over the seeds ± the sample standard deviation.
`baselines` writes the comparison of methods into docs/paper.md, from the runs that `ladder.py
collect runs/paper_baselines` has collected; differences to Local are paired by seed, with the 95 %
t-interval.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import ladder
from paired import DOCS, PARTITIONS, RESULTS, Estimate
from paired import table as markdown

from flower_desloc.runs.folder import read_lines

Line = dict[str, Any]
Row = dict[str, float]
Columns = dict[str, list[float]]
LABELS = {"u as often as x, lean, bounded": "`lean`"}


def rates(lines: list[Line]) -> Row:
    """Return the median rate of change |s_t - s_{t-K}| / |s_{t-K}| of each moment (RQ1)."""
    row: Row = {}
    for stream in ("exp_avg", "exp_avg_sq"):
        drifts = [line["drift"][stream] for line in lines if stream in line["drift"]]
        # The first average has no earlier one to compare with.
        changes = [now["moved"] / before["norm"] for before, now in pairwise(drifts)]
        if changes:
            row[stream] = statistics.median(changes)
    if len(row) == 2:
        row["exp_avg / exp_avg_sq"] = row["exp_avg"] / row["exp_avg_sq"]
    return row


def cells(study: Path) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return the cells of a study by their labels."""
    found = json.loads((study / "results.json").read_text())["cells"]
    # The axes come first, and their labels are all the strings but the tuned setting's name.
    return {tuple(v for k, v in c.items() if isinstance(v, str) and k != "key"): c for c in found}


def rates_of_change(study: Path) -> Iterator[tuple[str, Columns]]:
    """Yield the label of each cell, and its rates of change for each seed."""
    for labels, cell in cells(study).items():
        # In the study's folder, which may have been moved since.
        runs = [study / Path(run).parent.name / Path(run).name for run in cell["runs"]]
        rows = [rates(list(read_lines(run / "metrics.jsonl"))) for run in runs]
        if rows:
            yield ", ".join(labels), {name: [row[name] for row in rows] for name in rows[0]}


def against(study: Path, reference: str) -> Iterator[tuple[str, Columns]]:
    """Yield by how many percent each cell's score exceeds the ``reference``'s, seed by seed."""
    found = cells(study)
    for labels, cell in found.items():
        scores, other = cell["scores"], found[(reference, *labels[1:])]["scores"]
        if len(scores) == len(other):  # no pairs if a seed diverged
            more = [100 * (ours / theirs - 1) for ours, theirs in zip(scores, other, strict=True)]
            yield ", ".join(labels), {f"% above {reference}": more}


def baselines(partition: str) -> str:
    """Return the comparison of methods (RQ3), with norms (RQ4), from the collected runs."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    runs = json.loads((RESULTS / f"{ladder.PAPER}.json").read_text())["runs"]
    for run in runs:
        if run["partition"] == partition and run["seed"] < ladder.TUNING:
            # DiLoCo's AdamW is compared with Local Adam.
            optimizer = {"adamw": "adam"}.get(run["optimizer"], run["optimizer"])
            found[optimizer, run["method"]][run["seed"]] = run
    rows: list[list[object]] = []
    for (optimizer, method), seeds in sorted(found.items(), key=lambda item: _order(*item[0])):
        label = f"{LABELS.get(method, method)}, {ladder.NAMES[optimizer]}"
        if any(run["status"] != "completed" for run in seeds.values()):
            rows.append([label, "diverged", *[""] * 8])
            continue
        local = found[optimizer, ladder.LOCAL]
        above = [
            Estimate.above(_by_seed(seeds, key), _by_seed(local, key))
            for key in ("loss", "perplexity")
        ]
        sent = statistics.fmean(
            run["bytes_sent_by_a_client"] / local[seed]["bytes_sent_by_a_client"]
            for seed, run in seeds.items()
            if seed in local
        )
        is_local = method == ladder.LOCAL
        rates = sorted({f"{run['rate']:.2g}" for run in seeds.values()})
        columns = {
            key: [run[key] for run in seeds.values()]
            for key in ("loss", "worst_client", "param_norm", "activation_norm")
        }
        rows.append(
            [
                label,
                ", ".join(rates),
                f"{sent:.2f}",
                len(seeds),
                f"{statistics.fmean(columns['loss']):.3f}",
                *("" if is_local else ladder.text(one) for one in above),
                *(_spread(columns[key]) for key in list(columns)[1:]),
            ]
        )
    heads = ["", "rate", "bytes", "seeds", "loss", "above Local's, %", "perplexity, %"]
    return markdown([*heads, "worst client", "parameters", "activations"], rows)


def _by_seed(runs: dict[int, Line], key: str) -> dict[int, float]:
    return {seed: run[key] for seed, run in runs.items()}


def _order(optimizer: str, method: str) -> tuple[str, int, str]:
    order = (ladder.LOCAL, *LABELS, "DES-LOC", "FAVG+OPT", "FAVG-OPT", "DDP", "DiLoCo")
    return optimizer, order.index(method) if method in order else len(order), method


def _spread(values: list[float]) -> str:
    mean = f"{statistics.fmean(values):.4g}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.2g}"


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("table", choices=["rates", "against", "baselines"])
    parser.add_argument("study", type=Path, nargs="?", help="folder of a study, with results.json")
    parser.add_argument("--reference", help="label of the cell to compare with, on the first axis")
    given = parser.parse_args()
    if given.table == "baselines":
        for partition, name in PARTITIONS.items():
            if text := baselines(partition):
                ladder.write_between(DOCS / "paper.md", f"baselines {name}", text)
        return
    if given.study is None:
        parser.error("which study's folder?")
    if given.table == "against":
        rows = against(given.study, given.reference)
    else:
        rows = rates_of_change(given.study)
    for number, (label, columns) in enumerate(rows):
        if number == 0:
            print("| |", " | ".join(columns), "|")
            print("|---|" + "---|" * len(columns))
        print(f"| {label} |", " | ".join(map(_spread, columns.values())), "|")


if __name__ == "__main__":
    main()
