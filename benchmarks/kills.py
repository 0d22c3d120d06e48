"""Kill clients, SuperNodes and servers at random moments, and compare the results of training.

    python benchmarks/kills.py [--trials 50] [--federations 6] [--seed 0] [--json FILE]

Each of the ``trials`` trains a small language model on four clients in one process. A random victim
is killed with SIGKILL at a random moment, both drawn from the seed: a client in some window, with
or without the loss of its files, or the server with all clients. Each of the ``federations`` is
`desloc federate`, a SuperLink and three SuperNodes over TLS. The victims in turn are the ServerApp,
the SuperLink, a SuperNode, a SuperNode that also loses its files, and everything.

A run that loses a client must complete by itself; its held-out loss is compared with that of an
undisturbed run, and with the spread between seeds. A run that loses its server is resumed by the
command that the error message names; whether its weights are bit-identical is recorded. The run's
folder must record the failure of a client.
"""

import argparse
import json
import os
import platform
import random
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import flwr
import psutil
import torch
from flwr.app import Error, Message

from flower_desloc.tools.engines import in_process

NAME = "quickstart"
SMALL = [
    "run.steps=192",
    "run.eval_every=0",
    "sync.params=8",
    "sync.exp_avg=16",
    "sync.exp_avg_sq=32",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_hidden_layers=1",
    "data.max_bytes=200000",
    "data.partition=iid",
    "data.seq_len=64",
    "data.batch_size=4",
    "evaluation.sequences=64",
    "evaluation.federated=false",
    "federation.on_failure=continue",
    "federation.min_clients=1",
]
WINDOWS = 24
SEEDS = 3
CLIENT, LOST, SERVER = "a client", "a client and its files", "the server and all"
PROGRAMS = {"the ServerApp": "flwr-serverapp", "the SuperLink": "flower-superlink"}
NODE, LOST_NODE, ALL = "a SuperNode", "a SuperNode and its files", "everything"
FEDERATED = [*PROGRAMS, NODE, LOST_NODE, ALL]


def newest(folder: Path) -> Path:
    """Return the newest folder of the run: there is a second if the first had no checkpoint."""
    found = [path for path in folder.glob(f"{NAME}*") if path.is_dir()]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=folder / NAME)


def summary(folder: Path) -> dict[str, Any]:
    path = newest(folder) / "summary.json"
    assert path.exists(), (folder / "log").read_text()
    found: dict[str, Any] = json.loads(path.read_text())
    assert found["status"] == "completed", found
    return found


def loss(folder: Path) -> float:
    return float(summary(folder)["evaluation"]["central"]["nats_per_byte"]["final"])


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    path = newest(folder) / name
    # The last line may be incomplete while it is being written.
    return [json.loads(x) for x in path.read_text().split("\n")[:-1]] if path.exists() else []


def told(folder: Path) -> list[str]:
    """Return the events that the run's folder records."""
    events = [f"{e['client']} {e['kind']}" for line in lines(folder) for e in line["events"]]
    return events + [f"resumed at step {line['step']}" for line in lines(folder, "resumes.jsonl")]


# --- In one process


class KillingGrid(in_process.InProcessGrid):
    """Runs one client of one window in a child process, and kills it after part of its time."""

    victim, window, part, lost = -1, -1, 0.0, False
    state_dir = Path()

    def _answer(self, message: Message) -> Message:
        began = time.monotonic()
        node, kind = message.metadata.dst_node_id, message.metadata.message_type
        mine = node - 1 == self.victim and kind == "train"
        if not mine or message.content["config"]["server-round"] != self.window:
            reply = super()._answer(message)
            if mine:
                self._usual = time.monotonic() - began
            return reply
        child = os.fork()
        if child == 0:
            super()._answer(message)
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(self.part * getattr(self, "_usual", 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if self.lost:
            for file in self.state_dir.rglob(f"client-{self.victim}.*"):
                shutil.rmtree(file) if file.is_dir() else file.unlink()
        return Message(Error(8, "ClientApp stopped responding."), reply_to=message)


def run(folder: Path, *words: str) -> None:
    in_process.run_in_process(
        {
            "config": NAME,
            "overrides": " ".join([*SMALL, *words]),
            "output-dir": str(folder),
        },
        4,
    )


@contextmanager
def forked(folder: Path, *words: str) -> Iterator[int]:
    """Run in a child process that logs to ``folder/log``; yield its pid, then wait for its end."""
    folder.mkdir(exist_ok=True)
    child = os.fork()
    if child == 0:
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            run(folder, *words)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    yield child
    os.waitpid(child, 0)


def trial(draw: random.Random, folder: Path, usual: float) -> dict[str, Any]:
    victim = draw.choice([CLIENT, LOST, SERVER])
    if victim == SERVER:
        after = draw.uniform(0, usual)
        with forked(folder) as child:
            while not lines(folder):  # until it has begun
                time.sleep(0.01)
            time.sleep(after)
            os.kill(child, signal.SIGKILL)
        with forked(folder, "run.resume=auto"):
            pass
        return {"killed": victim, "after seconds": round(after, 2)}
    KillingGrid.victim, KillingGrid.window = draw.randrange(4), draw.randrange(1, WINDOWS + 1)
    KillingGrid.part, KillingGrid.lost = draw.uniform(0, 1.2), victim == LOST
    KillingGrid.state_dir = folder

    with patch.object(in_process, "InProcessGrid", KillingGrid), forked(folder):
        pass
    assert any(e.startswith(f"client-{KillingGrid.victim} failed") for e in told(folder))
    found = {"killed": victim, "client": KillingGrid.victim, "in window": KillingGrid.window}
    return found | {"part of its time": round(KillingGrid.part, 2)}


# --- Over TLS


def federate(folder: Path) -> list[str]:
    desloc = str(Path(sys.executable).with_name("desloc"))
    command = [desloc, "federate", NAME, *SMALL, "--nodes", "3"]
    return [*command, "--output-dir", str(folder)]


def federated_trial(victim: str, draw: random.Random, folder: Path) -> dict[str, Any]:
    window, wait = draw.randrange(1, WINDOWS), draw.uniform(0, 5)
    node = draw.randrange(3)
    command = federate(folder)
    log = folder / "log"
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        while len(lines(folder)) <= window and process.poll() is None:
            time.sleep(0.05)
        time.sleep(wait)
        family = [(one, _words(one)) for one in psutil.Process(process.pid).children(True)]
        if victim == ALL:
            process.kill()
        for one, words in family:
            if _is_victim(victim, node, words):
                one.kill()
        if victim == LOST_NODE:
            for file in (folder / ".clients").rglob(f"client-{node}.*"):
                shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
    found = {"killed": victim, "after window": window, "and seconds": round(wait, 1)}
    if victim in (NODE, LOST_NODE):
        assert process.returncode == 0, log.read_text()
        assert any(event.startswith(f"client-{node} ") for event in told(folder)), told(folder)
        return found | {"client": node}
    named = re.search(r"resume from its last checkpoint: (.*)", log.read_text())
    assert named or victim == ALL, log.read_text()
    again = shlex.split(named[1]) if named else [*command, "run.resume=auto"]
    again[0] = command[0]
    subprocess.run(again, check=True, capture_output=True)
    return found


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended since
        return []


def _is_victim(victim: str, node: int, words: list[str]) -> bool:
    line = " ".join(words)
    if victim in (NODE, LOST_NODE):
        is_node = "flower_desloc.sites.deployment.node " in line and "supervisor.py" not in line
        return is_node and f"partition-id={node} " in line
    return victim == ALL or any(PROGRAMS[victim] in word for word in words)


# --- Results


def judged(one: dict[str, Any], folder: Path, peace: Path) -> dict[str, Any]:
    one["told"] = told(folder)
    one["loss"] = loss(folder)
    one["relative to peace"] = one["loss"] / loss(peace) - 1
    one["same weights"] = summary(folder)["weights_sha256"] == summary(peace)["weights_sha256"]
    print(json.dumps(one), flush=True)
    shutil.rmtree(folder)
    return one


def tally(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return by kind of victim how often weights were equal, and the largest change of loss."""
    result = {}
    for victim in dict.fromkeys(one["killed"] for one in found):
        of_it = [one for one in found if one["killed"] == victim]
        result[victim] = {
            "trials": len(of_it),
            "same weights": sum(one["same weights"] for one in of_it),
            "largest change of loss": max(abs(one["relative to peace"]) for one in of_it),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--federations", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"flwr": flwr.__version__, "torch": torch.__version__},
    }
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        others = []
        for seed in range(SEEDS):
            with forked(root / f"seed{seed}", f"run.seed={seed}"):
                pass
            usual = summary(root / f"seed{seed}")["seconds"]["total"]
            others.append(loss(root / f"seed{seed}"))
        result["losses of seeds in peace"] = others
        result["their spread"] = statistics.stdev(others) / statistics.mean(others)
        print(f"undisturbed: {others}", flush=True)
        trials = []
        for number in range(args.trials):
            folder = root / f"trial{number}"
            one = trial(random.Random(f"{args.seed}/{number}"), folder, usual)
            trials.append(judged(one, folder, root / "seed0"))
        federations = []
        if args.federations:
            subprocess.run(federate(root / "federation"), check=True, capture_output=True)
        for number in range(args.federations):
            folder = root / f"federation{number}"
            folder.mkdir()
            draw = random.Random(f"{args.seed}/{number}/federation")
            one = federated_trial(FEDERATED[number % len(FEDERATED)], draw, folder)
            federations.append(judged(one, folder, root / "federation"))
    result["in one process"] = {"tally": tally(trials), "trials": trials}
    result["over TLS"] = {"tally": tally(federations), "trials": federations}
    print(json.dumps([result[part]["tally"] for part in ("in one process", "over TLS")], indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
