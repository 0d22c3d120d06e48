"""What gpu.sh has measured, as tables and a picture.

python benchmarks/gpu_tables.py [--results FOLDER] [--picture docs/gpu.png]
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
TRAINED = {"des_loc": "DES-LOC", "local_adopt": "Local ADOPT", "favg_opt": "FAVG+OPT"}


def optimizer_table(result: Mapping[str, Any]) -> str:
    """Return the time of a step of each optimizer on the 135M model's tensors."""
    lines = ["| optimizer | ms a step | times Adam's | Adam in the form |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {one['milliseconds']:.3g} | {one['ratio']['median']:.2f} | "
        f"{one['compared_with'].partition(', ')[2]} |"
        for name, one in result["models"]["llama"]["steps"].items()
    ]
    return "\n".join(lines)


def client_table(result: Mapping[str, Any]) -> str:
    """Return tokens/s and MFU of a client and of the plain loop, and what a window costs."""
    lines = [
        "| | tokens/s | MFU | waits in a window of n, 2n steps | GB a window adds |",
        "|---|---|---|---|---|",
    ]
    waits = result["waits_by_steps_a_window"]
    for name, one in result["contenders"].items():
        mfu = one["flops_utilization"]
        counted = ", ".join(map(str, waits[name].values())) if name in waits else ""
        lines.append(
            f"| {name} | {one['tokens_a_second']:,.0f} | {'' if mfu is None else f'{mfu:.1%}'} | "
            f"{counted} | {result['gigabytes_added_by_a_window'][name]:.2f} |"
        )
    four = result["four_clients"]
    lines.append(
        f"\nFour clients share {four['models']} model; the last three add "
        f"{four['megabytes_of_three_more']:.1f} MB."
    )
    return "\n".join(lines)


def training_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return loss, bytes and seconds of the trainings."""
    lines = ["| method | steps | held-out loss | sent up, GB | minutes |", "|---|---|---|---|---|"]
    for name, one in results.items():
        loss = one["evaluation"]["central"]["loss"]["final"]
        sent = one["bytes"]["measured"]["up"]["total"] / 1e9
        minutes = one["seconds"]["total"] / 60
        lines.append(f"| {name} | {one['steps']} | {loss:.3f} | {sent:.2f} | {minutes:.1f} |")
    return "\n".join(lines)


def picture(optimizers: Mapping[str, Any], client: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(9, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = {
        name: one["milliseconds"] for name, one in optimizers["models"]["llama"]["steps"].items()
    }
    speeds = {name: one["tokens_a_second"] for name, one in client["contenders"].items()}
    for panel, values, what in (
        (left, steps, "milliseconds a step of the optimizer"),
        (right, speeds, "tokens a second, all of a client's step"),
    ):
        ours = ["#0072B2" if "dopt" in n.lower() or "desloc" in n else "#BBBBBB" for n in values]
        panel.barh(list(values), list(values.values()), color=ours)
        panel.invert_yaxis()
        panel.set_xlabel(what, fontsize=8)
        panel.tick_params(labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "gpu.png")
    arguments = parser.parse_args()
    found = {
        path.stem.removeprefix("gpu_"): json.loads(path.read_text())
        for path in arguments.results.glob("gpu_*.json")
    }
    missing = {"optimizer_step", "client_step", *TRAINED} - found.keys()
    if missing:
        parser.error(f"{arguments.results} lacks {', '.join(sorted(missing))}: run gpu.sh first")
    client = found["client_step"]
    print(f"{client['machine']}, {client['versions']}, {client['date']}\n")
    print(optimizer_table(found["optimizer_step"]), client_table(client), sep="\n\n")
    print("", training_table({label: found[name] for name, label in TRAINED.items()}), sep="\n")
    picture(found["optimizer_step"], client).savefig(arguments.picture, dpi=110)


if __name__ == "__main__":
    main()
