"""The numbers of docs/paper.md that are not in a study's own table.

    python benchmarks/paper_tables.py rates runs/rates_of_change
    python benchmarks/paper_tables.py against runs/low_frequency --reference "Local ADOPT"
    python benchmarks/paper_tables.py baselines

The first two print, for each cell, the mean over the seeds ± the sample standard deviation.
`baselines` writes the comparison of methods into docs/paper.md, from the runs that `ladder.py
collect runs/paper_baselines` has collected; differences to Local are paired by seed, with the 95 %
t-interval.
"""

import json
import statistics
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import ladder
import typer
from paired import DOCS, PARTITIONS, RESULTS, table, write_between

from flower_desloc.runs.folder import read_lines

Line = dict[str, Any]
Row = dict[str, float]
Columns = dict[str, list[float]]
LABELS = {"u as often as x, lean, bounded": "`lean`"}
Folder = Annotated[Path, typer.Argument(help="folder of a study, with results.json")]
app = typer.Typer(help=__doc__, add_completion=False)


def rates_of(lines: list[Line]) -> Row:
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


@app.command()
def rates(study: Folder) -> None:
    """Print the rates of change of each cell."""
    found = {}
    for labels, cell in cells(study).items():
        # In the study's folder, which may have been moved since.
        runs = [study / Path(run).parent.name / Path(run).name for run in cell["runs"]]
        rows = [rates_of(list(read_lines(run / "metrics.jsonl"))) for run in runs]
        if rows:
            found[labels] = {name: [row[name] for row in rows] for name in rows[0]}
    print_spreads(found)


@app.command()
def against(
    study: Folder,
    reference: Annotated[str, typer.Option(help="label of a cell, on the first axis")],
) -> None:
    """Print by how many percent each cell's score exceeds the reference's, seed by seed."""
    found, more = cells(study), {}
    for labels, cell in found.items():
        scores, other = cell["scores"], found[(reference, *labels[1:])]["scores"]
        if len(scores) == len(other):  # no pairs if a seed diverged
            above = [100 * (ours / theirs - 1) for ours, theirs in zip(scores, other, strict=True)]
            more[labels] = {f"% above {reference}": above}
    print_spreads(more)


def print_spreads(found: dict[tuple[str, ...], Columns]) -> None:
    """Print the values over the seeds of each cell."""
    heads = next(iter(found.values()), {})
    rows = [
        [", ".join(labels), *map(_spread, columns.values())] for labels, columns in found.items()
    ]
    print(table(["", *heads], rows))


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
        row = [label, ", ".join(sorted({f"{run['rate']:.2g}" for run in seeds.values()}))]
        row += [f"{ladder.bytes_share(seeds, local):.2f}", len(seeds)]
        row += [f"{statistics.fmean(run['loss'] for run in seeds.values()):.3f}"]
        for key in ("loss", "perplexity"):
            row += ["" if seeds is local else ladder.text(ladder.above(seeds, local, key))]
        for key in ("worst_client", "param_norm", "activation_norm"):
            row += [_spread([run[key] for run in seeds.values()])]
        rows.append(row)
    heads = ["", "rate", "bytes", "seeds", "loss", "above Local's, %", "perplexity, %"]
    return table([*heads, "worst client", "parameters", "activations"], rows)


def _order(optimizer: str, method: str) -> tuple[str, int, str]:
    order = (ladder.LOCAL, *LABELS, "DES-LOC", "FAVG+OPT", "FAVG-OPT", "DDP", "DiLoCo")
    return optimizer, order.index(method) if method in order else len(order), method


def _spread(values: list[float]) -> str:
    mean = f"{statistics.fmean(values):.4g}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.2g}"


@app.command("baselines")
def write_baselines() -> None:
    """Write the comparison of methods into docs/paper.md."""
    for partition, name in PARTITIONS.items():
        write_between(DOCS / "paper.md", f"baselines {name}", baselines(partition))


if __name__ == "__main__":
    app()
