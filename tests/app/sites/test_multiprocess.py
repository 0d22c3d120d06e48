"""A client of several processes equals a client of one process, and fails as one.

The model has shapes that break things: fewer rows than ranks, tied weights, a parameter that the
loss does not use, a batch that does not divide.
"""

import errno
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from configurations import with_values
from federation import assert_close
from flwr.app import Context, RecordDict
from processes import has_ended, wait_until
from scripts import ROOT
from torch import nn

from client_app.client import build_worker
from flower_desloc.app.config import Config, dump
from flower_desloc.app.config.schema import ParamGroup
from flower_desloc.app.sites.multiprocess.parallelism import Parallelism
from flower_desloc.app.sites.multiprocess.ranks import RankError, RankLauncher
from flower_desloc.app.sites.multiprocess.worker import MultiProcessWorker
from flower_desloc.app.tasks import Site
from flower_desloc.app.tasks.compute import share_rows
from flower_desloc.core.errors import SiteRefusedError
from flower_desloc.flower.ahead import StepsAhead, delayed_window
from flower_desloc.flower.client_state import StateFiles
from flower_desloc.flower.messages import WindowRequest
from flower_desloc.flower.window import evaluate_average

ROWS = 5
TOLERANCE = 1e-12  # float64, summed in another order
WINDOWS = [(0, 2, {"params"}), (2, 3, {"exp_avg"}), (3, 6, {"params", "exp_avg", "exp_avg_sq"})]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.back = nn.Linear(4, 3, bias=False)
        self.out = nn.Linear(3, 1)  # of one row: the second rank has none
        self.again = nn.Linear(4, 3, bias=False)
        self.again.weight = self.back.weight
        self.unknown = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.out(self.back(x) + self.again(x).square())


@dataclass
class Shard:
    partition: int
    num_examples: int = 100
    description: dict[str, int] = field(default_factory=dict)

    def train_batch(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.partition + step)
        return torch.randn(ROWS, 4, dtype=torch.float64, generator=generator)

    def heldout(self) -> list[torch.Tensor]:
        return [self.train_batch(500)]


class Undivided:
    """A task that cannot share batches; the test and the ranks communicate in ``folder``."""

    def __init__(self, config: Config) -> None:
        self.folder = Path(config.task_options["folder"])

    def build_model(self) -> nn.Module:
        torch.manual_seed(1)
        return Model().double()

    def client_data(self, site: Site) -> Shard:
        return Shard(site.partition)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._obey(rank)
        with suppress(RuntimeError), (self.folder / f"rank-{rank}").open("a") as file:
            values = torch.cat([p.detach().flatten() for p in model.parameters()])
            print(hashlib.sha256(values.numpy().data).hexdigest(), file=file)
        return (model(batch[:, :3]) - batch[:, 3:]).square().mean()

    def evaluate(self, model: nn.Module, batches: list[torch.Tensor]) -> dict[str, float]:
        with torch.no_grad():
            losses = [(model(b[:, :3]) - b[:, 3:]).square().sum().item() for b in batches]
        return {"squares": sum(losses), "rows": float(ROWS * len(batches))}

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {"loss": sums["squares"] / sums["rows"]}

    def heldout(self) -> dict[str, list[torch.Tensor]]:
        return {}

    def save(self, model: nn.Module, folder: Path) -> None:
        raise NotImplementedError  # only the server saves

    def _obey(self, rank: int) -> None:
        if rank == 1 and (order := self.folder / "order").exists():
            what = order.read_text()
            order.unlink()
            (self.folder / "obeyed").touch()
            if what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "sleep":
                time.sleep(600)
            raise ValueError("no such row")


class Rows(Undivided):
    def share(self, batch: torch.Tensor, rank: int, world: int) -> tuple[torch.Tensor, float]:
        (rows,), weight = share_rows(rank, world, batch)
        return rows, weight


class Client:
    """The only client of a federation: the average is its own reply."""

    def __init__(self, folder: Path, config: Config | None = None, **node: str | int) -> None:
        folder.mkdir(exist_ok=True)
        self.config = config or settings(folder)
        here: dict[str, Any] = {
            "partition-id": 0,
            "num-partitions": 1,
            "state-dir": str(folder / "state"),
        }
        self.context = Context(1, 1, here | node, RecordDict(), {})
        self.file = StateFiles(folder / "state", "run", "client-0")
        self.versions = dict.fromkeys(("params", "exp_avg", "exp_avg_sq"), 0)
        model = Rows(self.config).build_model()
        self.averages = {"params": {k: p.detach() for k, p in model.named_parameters()}}
        self.delay, self.ahead = 0, StepsAhead()

    def window(self, start: int, stop: int, due: set[str]):
        worker = build_worker({"settings": dump(self.config)}, self.context)
        request = WindowRequest(
            run_key="run",
            start=start,
            stop=stop,
            before_merge=min(self.delay, stop - start),
            ahead=self.delay,
            due=frozenset(due),
            versions=self.versions,
            streams=self.averages,
        )
        with delayed_window(worker, request, self.file, self.ahead) as window:
            window.train()
        reply = window.answer
        # With a delay something must differ from what this client has sent.
        scale = 1.01 if self.delay else 1.0
        self.averages = {n: {k: scale * t for k, t in reply.streams[n].items()} for n in due}
        self.versions = {**self.versions, **dict.fromkeys(due, stop)}
        return reply

    def evaluate(self):
        worker = build_worker({"settings": dump(self.config)}, self.context)
        request = WindowRequest(run_key="run", versions=self.versions, streams=self.averages)
        with self.ahead.kept(worker):
            return evaluate_average(worker, request, self.file).metrics


def settings(folder: Path, task: str = "Rows", **optimizer: object) -> Config:
    config = Config(
        task=f"test_multiprocess:{task}", sync={"params": 1, "exp_avg": 1, "exp_avg_sq": 1}
    )
    chosen = {"lr": 0.05, "clip_norm": 0.5} | optimizer
    return with_values(
        config,
        {
            "task_options": {"folder": str(folder)},
            "data.batch_size": ROWS,
            "lr_schedule.name": "constant",
            "lr_schedule.warmup_steps": 0,
            **{f"optimizer.{key}": value for key, value in chosen.items()},
        },
    )


@pytest.fixture(scope="module", autouse=True)
def _end_ranks() -> Iterator[None]:
    build_worker.launcher = RankLauncher()
    yield
    build_worker.launcher.end()
    assert not dist.is_initialized()


def assert_same_client(one: Client, other: Client, windows) -> None:
    for window in windows:
        a, b = one.window(*window), other.window(*window)
        assert_close(a.streams, b.streams)
        for name in ("losses", "grad-norms"):
            assert b.metrics[name] == pytest.approx(a.metrics[name], rel=TOLERANCE)
        kept, others = one.file.last(), other.file.last()
        assert kept is not None
        assert others is not None
        assert_close(dict(kept.streams), dict(others.streams))
    assert other.evaluate()["loss"] == pytest.approx(one.evaluate()["loss"], rel=TOLERANCE)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_fails(client: Client, window, order: str, message: str) -> None:
    """Let rank 1 obey ``order`` in a window: all ranks end, and the state file stays as it was."""
    before = contents(client.file.folder)
    launcher = build_worker.launcher
    assert launcher is not None
    assert launcher.ranks is not None
    other = launcher.ranks.processes[1]
    (Path(client.config.task_options["folder"]) / "order").write_text(order)
    with pytest.raises(RankError, match=f"rank 1 of this client's 2 processes {message}"):
        client.window(*window)
    assert other.returncode is not None
    assert contents(client.file.folder) == before


def test_two_replicas_equal_one_process_and_a_dead_rank_costs_only_its_window(tmp_path):
    one, two = Client(tmp_path), Client(tmp_path / "two", processes=2)
    assert_same_client(one, two, WINDOWS)
    first, second = [(tmp_path / "two" / f"rank-{rank}").read_text() for rank in range(2)]
    assert len(first.splitlines()) == WINDOWS[-1][1]
    assert first == second  # bit for bit, in every step

    assert_fails(two, (6, 8, {"params"}), "die", "was ended by SIGKILL")
    assert_same_client(one, two, [(6, 8, {"params"})])


def test_two_shards_equal_one_process_and_their_state_file_suits_both(tmp_path):
    one, two = Client(tmp_path), Client(tmp_path / "two", processes=2, parallel="fsdp")
    assert_same_client(one, two, WINDOWS)
    # v was lost: ADOPT seeds it from the gradients of its next batch.
    for client in (one, two):
        client.file.delete()
        zeros = {k: torch.zeros_like(p) for k, p in client.averages["params"].items()}
        client.averages |= {"exp_avg": zeros, "exp_avg_sq": zeros}
    assert_same_client(one, two, [(6, 8, {"params"})])
    assert_fails(two, (8, 9, {"params", "exp_avg"}), "fail", "failed: ValueError: no such row")
    two.context.node_config["processes"] = 1
    assert_same_client(one, two, [(8, 9, {"params", "exp_avg"})])


def test_two_shards_that_go_on_while_their_streams_travel_equal_one_process(tmp_path, monkeypatch):
    """With biases in a parameter group of their own, whose average decays otherwise."""
    group = ParamGroup(kinds=["norms_and_biases"], lr=0.02, betas=(0.5, 0.9), weight_decay=0.1)
    one, two = Client(tmp_path), Client(tmp_path / "two", processes=2, parallel="fsdp")
    for client in (one, two):
        client.config = with_values(client.config, {"optimizer.groups": [group]})
    one.delay = two.delay = 1
    expected = [deepcopy(one.window(*window)) for window in WINDOWS]
    taken, steps = [], MultiProcessWorker.steps

    def counted(self, *which):
        taken.append(which[:2])
        return steps(self, *which)

    monkeypatch.setattr(MultiProcessWorker, "steps", counted)
    for window, reply in zip(WINDOWS, expected, strict=True):
        got = two.window(*window)
        assert_close(reply.streams, got.streams)
        assert got.metrics["losses"] == pytest.approx(reply.metrics["losses"], rel=TOLERANCE)
        two.ahead.take()
    assert taken == [(0, 2), (2, 3), (3, 4), (4, 6), (6, 7)]  # none of them twice


@pytest.mark.soak
def test_a_rank_that_fails_before_it_joins_is_reported():
    parallelism, cpu = Parallelism(2, "ddp"), torch.device("cpu")
    assert build_worker.launcher is not None
    with pytest.raises(RankError, match=r"rank 1 .* failed: ModuleNotFoundError: .*no_such_module"):
        build_worker.launcher.get("no_such_module:build", "", parallelism, cpu)


ALONE = """
import os, sys, torch
from pathlib import Path
sys.path[:0] = sys.argv[1].split(os.pathsep)
import test_multiprocess
client = test_multiprocess.Client(Path(sys.argv[2]), processes=2)
client.window(0, 1, {"params"})
print(test_multiprocess.build_worker.launcher.ranks.processes[1].pid, flush=True)
(Path(sys.argv[2]) / "order").write_text("sleep")
client.window(1, 2, {"params"})
"""


@pytest.mark.soak
def test_no_rank_outlives_rank_0(tmp_path):
    folders = os.pathsep.join([str(Path(__file__).parent), str(ROOT / "tests")])
    command = [sys.executable, "-c", ALONE, folders, str(tmp_path)]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as rank_0,
    ):
        assert rank_0.stdout is not None
        pid = rank_0.stdout.readline()
        assert pid, (tmp_path / "log").read_text()
        rank_1 = psutil.Process(int(pid))
        # One rank sleeps, the other waits for it in a collective.
        wait_until((tmp_path / "obeyed").exists, (tmp_path / "log").read_text)
        assert not has_ended(rank_1)
        rank_0.kill()
    wait_until(lambda: has_ended(rank_1), (tmp_path / "log").read_text)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_shares_of_a_batch_make_up_the_batch_and_their_weights_add_up_to_one(world):
    rows, labels = torch.arange(10).reshape(5, 2), torch.arange(5)
    parts = [share_rows(rank, world, rows, labels) for rank in range(world)]
    assert torch.equal(torch.cat([part[0] for part, _ in parts]), rows)
    assert torch.equal(torch.cat([part[1] for part, _ in parts]), labels)
    assert sum(weight for _, weight in parts) == pytest.approx(1)
    with pytest.raises(ValueError, match="a batch of 5 is too small for 6 processes"):
        share_rows(0, 6, rows)


@pytest.mark.parametrize(
    ("node", "change", "message"),
    [
        ({"processes": 0}, {}, "processes=0 in the node config: must be 1 or more"),
        ({"processes": "2"}, {}, "processes='2' in the node config"),
        ({"processes": 2, "parallel": "tp"}, {}, "must be one of ddp, fsdp"),
        ({"processes": 6}, {}, "data.batch_size=5 is too small for processes=6"),
        ({"processes": 2, "device": "cuda:1"}, {}, "give the type only"),
        ({"processes": 2}, {"task": "Undivided"}, r"give it a method share\(batch, rank, world\)"),
        (
            {"processes": 2, "parallel": "fsdp"},
            {"name": "torch.optim:Adafactor"},
            "may need whole tensors",
        ),
    ],
)
def test_what_several_processes_cannot_do_is_refused(tmp_path, node, change, message):
    client = Client(tmp_path, settings(tmp_path, **change), **node)
    with pytest.raises(ValueError, match=message):
        client.window(0, 1, {"params"})


def test_several_processes_are_refused_where_they_cannot_be_watched(monkeypatch):
    def not_allowed(pid: int) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    for missing in (True, False):
        if missing:
            monkeypatch.delattr(os, "pidfd_open")
        else:
            monkeypatch.setattr(os, "pidfd_open", not_allowed, raising=False)
        with pytest.raises(SiteRefusedError, match=r"more than 1 needs os\.pidfd_open"):
            Parallelism.of({"processes": 2})
        assert Parallelism.of({"processes": 1}).processes == 1
