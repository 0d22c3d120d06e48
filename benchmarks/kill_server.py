"""A server that is killed, over and over: does one command more end with the same weights.

    python benchmarks/kill_server.py [--trials 5] [--seed 0] [--json FILE]

Each trial is `desloc federate`, a SuperLink and two SuperNodes over TLS with keys, on this machine.
After a window drawn by the seed, and a wait drawn too, `kill -9` ends the ServerApp's process, the
SuperLink, or everything. Then the command is run that the error message names (after everything
the same one with run.resume=auto), and the weights' hash is compared with an undisturbed run's.
"""

import argparse
import json
import os
import platform
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import flwr
import psutil
import torch

SMALL = [
    "run.steps=10",
    "run.eval_every=5",
    "sync.params=2",
    "sync.exp_avg=4",
    "sync.exp_avg_sq=6",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_hidden_layers=1",
    "data.max_bytes=60000",
    "data.seq_len=32",
    "data.batch_size=2",
    "evaluation.sequences=4",
]
VICTIMS = {"the ServerApp": "flwr-serverapp", "the SuperLink": "flower-superlink", "all": ""}
WINDOWS = 6  # of SMALL: those that end after 2, 4, 6, 8 and 10, and round 0


def federate(output_dir: Path) -> list[str]:
    desloc = str(Path(sys.executable).with_name("desloc"))
    command = [desloc, "federate", "quickstart", *SMALL, "--nodes", "2"]
    return [*command, "--output-dir", str(output_dir)]


def weights(folder: Path) -> str:
    summary = json.loads((folder / "quickstart" / "summary.json").read_text())
    assert summary["status"] == "completed", summary
    return str(summary["weights_sha256"])


def lines(folder: Path) -> int:
    path = folder / "quickstart" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def trial(draw: random.Random, folder: Path) -> dict[str, Any]:
    """Kill once, go on once."""
    victim = draw.choice([*VICTIMS])
    window, wait = draw.randrange(1, WINDOWS), draw.uniform(0, 10)
    command = federate(folder)
    log = folder / "log"
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        while lines(folder) < window and process.poll() is None:
            time.sleep(0.05)
        time.sleep(wait)
        family = psutil.Process(process.pid).children(recursive=True)
        if victim == "all":
            for one in [*family, psutil.Process(process.pid)]:
                one.kill()
        for one in family:
            if victim != "all" and any(VICTIMS[victim] in part for part in one.cmdline()):
                one.kill()
    told = re.search(r"go on from its last checkpoint: (.*)", log.read_text())
    assert told or victim == "all", log.read_text()
    again = shlex.split(told[1]) if told else [*command, "run.resume=auto"]
    again[0] = command[0]
    subprocess.run(again, check=True, capture_output=True)
    return {"killed": victim, "after window": window, "and seconds": round(wait, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        whole = Path(temporary) / "whole"
        subprocess.run(federate(whole), check=True, capture_output=True)
        for number in range(args.trials):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            one = trial(random.Random(f"{args.seed}/{number}"), folder)
            one["same weights"] = weights(folder) == weights(whole)
            found.append(one)
            print(one, flush=True)
            shutil.rmtree(folder)
    result = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"flwr": flwr.__version__, "torch": torch.__version__},
        "trials": found,
    }
    print(f"{sum(one['same weights'] for one in found)} of {len(found)} with the same weights")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
