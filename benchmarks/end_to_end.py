"""Bytes, time and held-out loss of whole runs, compared with Flower's FedAvg with a local Adam.

    python benchmarks/end_to_end.py [--seeds 3] [--json FILE] [KEY=VALUE ...]

Every arm is `desloc run PRESET` in Flower's simulation, on the builtin text, with the same model,
clients, data, steps and seed. The order of the arms is reversed with each seed.

- fedavg: Flower's own strategy; every client creates a new Adam in every round.
- local_adam: parameters and both moments are averaged at the same time.
- desloc_adam: DES-LOC; the moments are averaged a third and a sixth as often.

Bytes are measured over all messages in both directions, including framing. Time is that of the
windows, and of the whole command. Ratios are relative to FedAvg with the same seed.
"""

import subprocess
import tempfile
import time
from json import loads
from pathlib import Path

import typer
from common import DESLOC, Overrides, Times, extremes, ratios, report

PEER = "fedavg"
ARMS = [PEER, "local_adam", "desloc_adam"]
SAME = ["optimizer.betas=[0.95,0.95]"]  # the paper's for DES-LOC-Adam, in all arms


def run(preset: str, seed: int, overrides: list[str], folder: Path) -> dict[str, float]:
    """Return the bytes, seconds and final loss of one run."""
    settings = [*overrides, f"run.seed={seed}", f"run.name={preset}-{seed}"]
    began = time.perf_counter()
    command = [DESLOC, "run", preset, *settings, "--output-dir", str(folder)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    took = time.perf_counter() - began
    summary = loads((folder / f"{preset}-{seed}" / "summary.json").read_text())
    measured = summary["bytes"]["measured"]
    return {
        "megabytes": (measured["framed_up"] + measured["framed_down"]) / 1e6,
        "windows' seconds": summary["seconds"]["total"],
        "command's seconds": took,
        "loss": summary["evaluation"]["central"]["loss"]["final"],
    }


def main(overrides: Overrides = None, seeds: int = 3, json: Path | None = None) -> None:
    """Bytes, time and held-out loss of whole runs, compared with Flower's FedAvg."""
    settings = [*SAME, *(overrides or [])]
    measured: dict[str, Times] = {arm: {} for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            for arm in ARMS if seed % 2 == 0 else reversed(ARMS):
                for what, value in run(arm, seed, settings, Path(folder)).items():
                    measured[arm].setdefault(what, []).append(value)
    result = {
        "settings": settings,
        "seeds": seeds,
        "measured": {
            arm: {what: extremes(values) for what, values in found.items()}
            for arm, found in measured.items()
        },
        "to_fedavg": {
            arm: {
                what: extremes(ratios(values, to=measured[PEER][what]))
                for what, values in found.items()
            }
            for arm, found in measured.items()
            if arm != PEER
        },
    }
    report(result, json)


if __name__ == "__main__":
    typer.run(main)
