"""Kill programs of a deployment at random moments, and compare the results of training.

    python benchmarks/kills.py [--trials 6] [--seed 0] [--json FILE]

Each trial is `desloc federate` of a small language model: a SuperLink and three SuperNodes over
TLS. A victim is killed with SIGKILL at a random moment, drawn from the seed. The victims in turn
are the ServerApp, the SuperLink, a SuperNode, a SuperNode that also loses its files, and
everything.

A run that loses a SuperNode must complete by itself and record it; its held-out loss is compared
with that of an undisturbed run. A run that loses its server is resumed by the command that the
error message names; whether its weights are bit-identical is recorded.
"""

import random
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import typer
from common import DESLOC, report

from flower_desloc.app.runs.folder import read_lines, read_summary

NAME = "quickstart"
SMALL = [
    *("run.steps=192", "run.eval_every=0", "sync.params=8", "sync.exp_avg=16"),
    *("sync.exp_avg_sq=32", "model.hidden_size=32", "model.intermediate_size=64"),
    *("model.num_hidden_layers=1", "data.max_bytes=200000", "data.partition=iid"),
    *("data.seq_len=64", "data.batch_size=4", "evaluation.sequences=64"),
    *("evaluation.federated=false", "federation.on_failure=continue", "federation.min_clients=1"),
]
WINDOWS = 24
NODES = 3
PROGRAMS = {"the ServerApp": "flwr-serverapp", "the SuperLink": "flower-superlink"}
NODE, LOST_NODE, ALL = "a SuperNode", "a SuperNode and its files", "everything"
VICTIMS = [*PROGRAMS, NODE, LOST_NODE, ALL]


def newest(folder: Path) -> Path:
    """Return the newest folder of the run: there is a second if the first had no checkpoint."""
    found = [path for path in folder.glob(f"{NAME}*") if path.is_dir()]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=folder / NAME)


def federate(folder: Path) -> list[str]:
    return [DESLOC, "federate", NAME, *SMALL, "--nodes", str(NODES), "--output-dir", str(folder)]


def trial(victim: str, draw: random.Random, folder: Path) -> dict[str, Any]:
    """Kill ``victim`` in a run, resume the run if it ended, and return what the folder records."""
    window, wait, node = draw.randrange(1, WINDOWS), draw.uniform(0, 5), draw.randrange(NODES)
    command = federate(folder)
    log = folder / "log"
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        while len(list(read_lines(newest(folder) / "metrics.jsonl"))) <= window:
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        time.sleep(wait)
        family = psutil.Process(process.pid).children(True)
        if victim == ALL:
            process.kill()
        for one in family:
            with suppress(psutil.Error):  # it has ended since
                if is_victim(victim, node, one.cmdline()):
                    one.kill()
        if victim == LOST_NODE:
            for file in (folder / ".clients").rglob(f"client-{node}*"):
                shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
    if victim not in (NODE, LOST_NODE):
        named = re.search(r"resume from its last checkpoint: (.*)", log.read_text())
        assert named or victim == ALL, log.read_text()
        again = shlex.split(named[1]) if named else [*command, "run.resume=auto"]
        subprocess.run([command[0], *again[1:]], check=True, capture_output=True)
    run = newest(folder)
    events = [e for line in read_lines(run / "metrics.jsonl") for e in line["events"]]
    told = [f"{event['client']} {event['kind']}" for event in events]
    told += [f"resumed at step {line['step']}" for line in read_lines(run / "resumes.jsonl")]
    if victim in (NODE, LOST_NODE):
        assert process.returncode == 0, log.read_text()
        assert any(one.startswith(f"client-{node} ") for one in told), told
    return {"killed": victim, "after window": window, "and seconds": wait, "told": told}


def is_victim(victim: str, node: int, words: list[str]) -> bool:
    line = " ".join(words)
    if victim in (NODE, LOST_NODE):
        is_node = "flower_desloc.app.sites.deployment.node " in line and "supervisor.py" not in line
        return is_node and f"partition-id={node} " in line
    return victim == ALL or any(PROGRAMS[victim] in word for word in words)


def outcome(folder: Path) -> tuple[float, str]:
    """Return the loss and the hash of the weights of a completed run."""
    summary = read_summary(newest(folder) / "summary.json")
    assert summary["status"] == "completed", summary
    return summary["evaluation"]["central"]["nats_per_byte"]["final"], summary["weights_sha256"]


def main(trials: int = 6, seed: int = 0, json: Path | None = None) -> None:
    """Kill programs of a deployment at random moments, and compare the results of training."""
    found = []
    with tempfile.TemporaryDirectory() as root:
        peace = Path(root, "peace")
        subprocess.run(federate(peace), check=True, capture_output=True)
        loss, weights = outcome(peace)
        for number in range(trials):
            folder = Path(root, str(number))
            folder.mkdir()
            draw = random.Random(f"{seed}/{number}/federation")
            one = trial(VICTIMS[number % len(VICTIMS)], draw, folder)
            its_loss, its_weights = outcome(folder)
            one["relative to peace"] = its_loss / loss - 1
            one["same weights"] = its_weights == weights
            print(one, flush=True)
            found.append(one)
            shutil.rmtree(folder)
    report({"undisturbed loss": loss, "over TLS": {"trials": found}}, json)


if __name__ == "__main__":
    typer.run(main)
