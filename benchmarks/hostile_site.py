"""Held-out loss with one hostile site of eight, under the mean and under each robust guard.

    python benchmarks/hostile_site.py [--seeds 3] [--guard NAME] [--json FILE]

Eight clients with heterogeneous parts of scikit-learn's digits train a small network by
DES-LOC-ADOPT, with the real strategy and client in one process. The last client trains like the
others, but replaces its update of params and its first moment:

- flipped: multiplied by -10;
- noise: normal noise with ten times their norm;
- huge: multiplied by 100,000.

Its second moment is unchanged. The table shows the held-out loss of the final averaged model in
nats per image (2.30 for guessing), as mean and standard deviation over the seeds, and how often the
last client + all the others together were left out, over all seeds.
"""

import logging
import math
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from common import report, table
from flower_runs import Windows
from flwr.app import Context, Message
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from flower_desloc import DesLoc, SyncSchedule
from flower_desloc.core.lr_schedule import wsd
from flower_desloc.core.worker import Worker
from flower_desloc.flower.arrays import from_record, to_record
from flower_desloc.flower.client import client_app
from flower_desloc.flower.failures import FederationError
from flower_desloc.flower.inprocess import InProcessGrid
from flower_desloc.flower.policy import Policy
from flower_desloc.optim import ADOPT

CLIENTS, STEPS, BATCH = 8, 192, 16
PERIODS = {"params": 8, "exp_avg": 24, "exp_avg_sq": 48}
GUARDS: dict[str, dict[str, Any]] = {
    "mean": {"norm_bound": None},
    "median": {"average": "median", "norm_bound": None},
    "trimmed mean, 1 a side": {
        "average": "trimmed_mean",
        "trim": 1,
        "min_clients": 3,
        "norm_bound": None,
    },
    "norm bound, 3 medians": {"norm_bound": 3.0},
    "norm bound, 30 medians (default)": {},
}
Stream = dict[str, torch.Tensor]
Attack = Callable[[Stream, Stream, torch.Generator], Stream]


def flipped(last: Stream, own: Stream, _noise: torch.Generator) -> Stream:
    return {key: last[key] - 10 * (own[key] - last[key]) for key in own}


def noise(last: Stream, own: Stream, noise: torch.Generator) -> Stream:
    lie = {}
    for key, tensor in own.items():
        wild = torch.randn(tensor.shape, generator=noise)
        length = 10 * (tensor - last[key]).norm()
        lie[key] = last[key] + wild * (length / wild.norm())
    return lie


def huge(last: Stream, own: Stream, _noise: torch.Generator) -> Stream:
    return {key: last[key] + 1e5 * (own[key] - last[key]) for key in own}


ATTACKS: dict[str, Attack | None] = {
    "nobody": None,
    "flipped": flipped,
    "noise": noise,
    "huge": huge,
}


class Data:
    """The digits, partitioned label by label with shares from Dirichlet(1); a fifth is held out."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        images, labels = load_digits(return_X_y=True)
        order = rng.permutation(len(labels))
        held, train = np.split(order, [len(order) // 5])
        self.images = torch.tensor(images / 16.0, dtype=torch.float32)
        self.labels = torch.tensor(labels)
        self.held = torch.tensor(held)
        parts: list[list[int]] = [[] for _ in range(CLIENTS)]
        for label in range(10):
            own = [i for i in train if labels[i] == label]
            ends = np.cumsum(rng.dirichlet(np.ones(CLIENTS)))[:-1] * len(own)
            for part, some in zip(parts, np.split(own, ends.astype(int)), strict=True):
                part.extend(int(i) for i in some)
        self.parts = [torch.tensor(part) for part in parts]

    def loss(self, module: torch.nn.Module, which: torch.Tensor) -> torch.Tensor:
        return cross_entropy(module(self.images[which]), self.labels[which])


def network(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def run(guard: str, attack: str, seed: int) -> tuple[float, int, int]:
    """Return the final held-out loss, and how often the last client and others were left out."""
    data = Data(seed)

    def build(_config: Any, context: Context) -> Worker:
        m, module = int(context.node_config["partition-id"]), network(seed)

        def loss_at(step: int) -> torch.Tensor:
            draw = torch.Generator().manual_seed(1_000_003 * seed + 1009 * step + m)
            some = torch.randint(len(data.parts[m]), (BATCH,), generator=draw)
            return data.loss(module, data.parts[m][some])

        return Worker(
            module=module,
            optimizer=ADOPT(module.parameters(), lr=0.01, betas=(0.95, 0.999)),
            loss_at=loss_at,
            num_examples=len(data.parts[m]),
            lr_schedule=wsd(STEPS, STEPS // 12, STEPS // 10),
        )

    honest = client_app(build)
    wild = torch.Generator().manual_seed(seed)
    lie = ATTACKS[attack]

    def app(message: Message, context: Context) -> Message:
        hostile = context.node_config["partition-id"] == CLIENTS - 1
        if lie is None or not hostile or message.metadata.message_type != "train":
            return honest(message, context)
        sent = from_record(message.content.array_records["params"])  # averaged in every window
        reply = honest(message, context)
        arrays = reply.content.array_records
        reply.content["params"] = to_record(lie(sent, from_record(arrays["params"]), wild))
        if "exp_avg" in arrays:
            own = from_record(arrays["exp_avg"])
            zero = {key: torch.zeros_like(tensor) for key, tensor in own.items()}
            reply.content["exp_avg"] = to_record(lie(zero, own, wild))
        return reply

    policy = Policy(**{"on_failure": "continue", **GUARDS[guard]})
    strategy = DesLoc(SyncSchedule(PERIODS), STEPS, policy=policy, evaluate_clients=False)
    module, watch = network(seed), Windows()
    with tempfile.TemporaryDirectory() as folder:
        nodes = [{"partition-id": m, "state-dir": folder} for m in range(CLIENTS)]
        params = to_record(dict(module.named_parameters()))
        try:
            result = strategy.start(InProcessGrid(app, nodes), params, observer=watch)
            module.load_state_dict(from_record(result.arrays))
            with torch.no_grad():
                loss = float(data.loss(module, data.held))
        except FederationError:  # every client's training diverged
            loss = float("inf")
    out = [name for record in watch.records for name in record.left_out]
    last = out.count(f"client-{CLIENTS - 1}")
    return loss, last, len(out) - last


def main(seeds: int = 3, guard: list[str] | None = None, json: Path | None = None) -> None:
    """Held-out loss with one hostile site of eight, under the mean and under each guard."""
    guards = guard or [*GUARDS]
    if unknown := set(guards) - GUARDS.keys():
        raise typer.BadParameter(f"{unknown}: must be among {', '.join(GUARDS)}")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    cells = {
        name: {attack: [run(name, attack, s) for s in range(seeds)] for attack in ATTACKS}
        for name in guards
    }
    rows = [[guard, *map(_cell, row.values())] for guard, row in cells.items()]
    print(table(["average", *ATTACKS], rows))
    report({"loss_and_how_often_the_last_client_and_others_were_left_out": cells}, json)


def _cell(runs: list[tuple[float, int, int]]) -> str:
    losses, last, others = zip(*runs, strict=True)
    if not all(map(math.isfinite, losses)):
        return "diverged"
    spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
    out = f", left out {sum(last)} + {sum(others)}" if sum(last) + sum(others) else ""
    return f"{statistics.fmean(losses):.3f}{spread}{out}"


if __name__ == "__main__":
    typer.run(main)
