"""Bytes, time and held-out loss of whole runs, compared with Flower's FedAvg with a local Adam.

    python benchmarks/end_to_end.py [--seeds 3] [--set KEY=VALUE ...] [--json FILE]

Every arm is `desloc run PRESET` in Flower's simulation, on the builtin text, with the same model,
clients, data, steps and seed. The order of the arms is reversed with each seed.

- fedavg: Flower's own strategy; every client creates a new Adam in every round.
- local_adam: parameters and both moments are averaged at the same time.
- desloc_adam: DES-LOC; the moments are averaged a third and a sixth as often.

Bytes are measured over all messages in both directions, including framing. Time is that of the
windows, and of the whole command. Ratios are relative to FedAvg with the same seed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from aggregation import about

PEER = "fedavg"
ARMS = [PEER, "local_adam", "desloc_adam"]
Columns = dict[str, list[float]]
SAME = ["optimizer.betas=[0.95,0.95]"]  # the paper's for DES-LOC-Adam, in all arms


def run(preset: str, seed: int, overrides: list[str], folder: Path) -> dict[str, float]:
    """Return the bytes, seconds and final loss of one run."""
    desloc = str(Path(sys.executable).with_name("desloc"))
    settings = [*SAME, *overrides, f"run.seed={seed}", f"run.name={preset}-{seed}"]
    began = time.perf_counter()
    command = [desloc, "run", preset, *settings, "--output-dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    took = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    summary = json.loads((folder / f"{preset}-{seed}" / "summary.json").read_text())
    measured = summary["bytes"]["measured"]
    return {
        "megabytes": (measured["framed_up"] + measured["framed_down"]) / 1e6,
        "windows' seconds": summary["seconds"]["total"],
        "command's seconds": took,
        "loss": summary["evaluation"]["central"]["loss"]["final"],
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def ratios(found: Columns, peer: Columns) -> dict[str, dict[str, float]]:
    """Return each measure as a multiple of the peer's, seed by seed."""
    return {
        what: spread([a / b for a, b in zip(values, peer[what], strict=True)])
        for what, values in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], help="settings of all runs, KEY=VALUE")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            for arm in ARMS if seed % 2 == 0 else reversed(ARMS):
                runs[arm].append(run(arm, seed, args.set, Path(folder)))
                rounded = {what: round(value, 3) for what, value in runs[arm][-1].items()}
                print(arm, seed, rounded, flush=True)
    measures = list(runs[PEER][0])
    columns = {arm: {w: [r[w] for r in found] for w in measures} for arm, found in runs.items()}
    result = {
        **about(),
        "settings": [*SAME, *args.set],
        "seeds": args.seeds,
        "measured": {
            arm: {what: spread(values) for what, values in found.items()}
            for arm, found in columns.items()
        },
        "to_fedavg": {
            arm: ratios(found, columns[PEER]) for arm, found in columns.items() if arm != PEER
        },
    }
    print(f"{'vs ' + PEER:14}", *(f"{what:>18}" for what in measures))
    for arm, times in result["to_fedavg"].items():
        print(f"{arm:14}", *(f"{times[what]['median']:18.3f}" for what in measures))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
