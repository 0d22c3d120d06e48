"""What gpu.sh has measured, as tables and a picture.

python benchmarks/gpu_tables.py [--results FOLDER] [--picture docs/images/gpu.png]
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from common import table

from flower_desloc.app.runs.figures import style

HERE = Path(__file__).resolve().parent
BLUE = "#0072B2"
TRAINED = {"des_loc": "DES-LOC", "local_adopt": "Local ADOPT", "favg_opt": "FAVG+OPT"}
Result = Mapping[str, Any]


def optimizer_table(result: Result) -> str:
    """Return the time of a step of each optimizer on the 135M model's tensors."""
    rows = []
    for name, one in result["models"]["llama"]["steps"].items():
        form = one["compared_with"].partition(", ")[2]
        rows.append([name, f"{one['milliseconds']:.3g}", f"{one['ratio']['median']:.2f}", form])
    return table(["optimizer", "ms a step", "times Adam's", "Adam in the form"], rows)


def client_table(result: Result) -> str:
    """Return tokens/s and MFU of a client and of the plain loop, and what a window costs."""
    rows, waits = [], result["waits_by_steps_a_window"]
    for name, one in result["contenders"].items():
        mfu = one["flops_utilization"]
        row = [name, f"{one['tokens_a_second']:,.0f}", "" if mfu is None else f"{mfu:.1%}"]
        row += [", ".join(map(str, waits.get(name, {}).values()))]
        rows.append([*row, f"{result['gigabytes_added_by_a_window'][name]:.2f}"])
    heads = ["", "tokens/s", "MFU", "waits in a window of n, 2n steps", "GB a window adds"]
    four = result["four_clients"]
    return table(heads, rows) + (
        f"\n\nFour clients share {four['models']} model; the last three add "
        f"{four['megabytes_of_three_more']:.1f} MB."
    )


def training_table(results: Mapping[str, Result]) -> str:
    """Return loss, bytes and seconds of the trainings."""
    rows = []
    for name, one in results.items():
        loss = one["evaluation"]["central"]["loss"]["final"]
        sent = one["bytes"]["measured"]["up"]["total"] / 1e9
        minutes = one["seconds"]["total"] / 60
        rows.append([name, one["steps"], f"{loss:.3f}", f"{sent:.2f}", f"{minutes:.1f}"])
    return table(["method", "steps", "held-out loss", "sent up, GB", "minutes"], rows)


def draw(optimizers: Result, client: Result, path: Path) -> None:
    steps = optimizers["models"]["llama"]["steps"]
    times = {name: one["milliseconds"] for name, one in steps.items()}
    speeds = {name: one["tokens_a_second"] for name, one in client["contenders"].items()}
    made, (left, right) = style.figure(1, 2, 3)
    for panel, values, what in (
        (left, times, "milliseconds a step of the optimizer"),
        (right, speeds, "tokens a second, all of a client's step"),
    ):
        ours = [BLUE if "dopt" in n.lower() or "desloc" in n else "#BBBBBB" for n in values]
        panel.barh(range(len(values)), list(values.values()), color=ours)
        style.rows_axis(panel, list(values))
        panel.set_xlabel(what)
    made.savefig(path, dpi=110)


def main(
    results: Path = HERE / "results", picture: Path = HERE.parent / "docs" / "images" / "gpu.png"
) -> None:
    """Print what gpu.sh has measured as tables, and draw a picture."""
    paths = results.glob("gpu_*.json")
    found = {path.stem.removeprefix("gpu_"): json.loads(path.read_text()) for path in paths}
    missing = {"optimizer_step", "client_step", *TRAINED} - found.keys()
    if missing:
        sys.exit(f"{results} lacks {', '.join(sorted(missing))}: run gpu.sh first")
    client = found["client_step"]
    print(f"{client['machine']}, {client['versions']}, {client['date']}\n")
    print(optimizer_table(found["optimizer_step"]), client_table(client), sep="\n\n")
    print("", training_table({label: found[name] for name, label in TRAINED.items()}), sep="\n")
    draw(found["optimizer_step"], client, picture)


if __name__ == "__main__":
    typer.run(main)
