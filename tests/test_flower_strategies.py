"""Flower's own strategies over DES-LOC's clients: what they compute, send, record and refuse."""

import json
import random
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import OPTIMIZERS, OptimizerCase, Problem, Quadratic, assert_close, assert_same
from flwr.app import Context
from flwr.serverapp.strategy import FedAdam, FedAvg
from reference import Tree
from tiny import summary, train
from torch import nn

from flower_desloc import DesLoc, SyncSchedule, prime, stream_names, take
from flower_desloc.config import ConfigError, load
from flower_desloc.core.schedule import PARAMS
from flower_desloc.core.worker import Worker
from flower_desloc.flower.baselines.flower_strategies import FlowerStrategy
from flower_desloc.flower.client import client_app
from flower_desloc.flower.inprocess import InProcessGrid
from flower_desloc.flower.observer import Plan, WindowRecord
from flower_desloc.flower.policy import FederationError, Policy
from flower_desloc.flower.records import from_record, to_record
from flower_desloc.setup.build import check_streams

ROOT = Path(__file__).resolve().parents[1]
ADAM, SGDM = OPTIMIZERS["adam"], OPTIMIZERS["sgdm"]


def rate(step: int) -> float:
    return 1 / (1 + step)


class Watch:
    """Keeps the records."""

    def __init__(self) -> None:
        self.records: list[WindowRecord] = []
        self.plan: Plan

    def started(self, plan: Plan) -> None:
        self.plan = plan

    def joined(self, client: str, about: Any) -> None:
        raise AssertionError("nobody joins here")

    def window(self, record: WindowRecord) -> None:
        self.records.append(record)


class Federated:
    """Clients over a problem of federation.py, for whichever strategy."""

    def __init__(
        self,
        folder: Path,
        problem: Problem,
        case: OptimizerCase = ADAM,
        *,
        num_clients: int = 3,
        order: Iterable[int] = (),
    ) -> None:
        # One for all clients and rounds, as in the app: nothing may leak from one to the next.
        module = problem.module()
        optimizer = case.make(module.parameters())

        def build(config: Any, context: Context) -> Worker:
            m = int(context.node_config["partition-id"])

            def evaluate() -> Mapping[str, float]:
                with torch.no_grad():
                    return {"nats": float(problem.loss(module, m, 0)) + 100, "tokens": m + 1}

            return Worker(
                module=module,
                optimizer=optimizer,
                loss_at=lambda t: problem.loss(module, m, t),
                num_examples=m + 1,
                lr_schedule=rate,
                evaluate=evaluate,
                metrics=per_token,
            )

        nodes = [
            {"partition-id": m, "num-partitions": num_clients, "state-dir": str(folder)}
            for m in order or range(num_clients)
        ]
        self.grid = InProcessGrid(client_app(build), nodes)
        self.watch = Watch()
        prime(optimizer)
        self.streams = take(module, optimizer, stream_names(module, optimizer))
        self.initial = to_record(self.streams.pop(PARAMS))

    def start(self, strategy: DesLoc) -> Tree:
        result = strategy.start(self.grid, self.initial, observer=self.watch)
        return from_record(result.arrays)

    def flower(
        self, make: Callable[..., FedAvg], every: int, num_steps: int, **kwargs: Any
    ) -> Tree:
        schedule = SyncSchedule({PARAMS: every, **dict.fromkeys(self.streams, "reset")})
        options = {"states": self.streams, "metrics": per_token, **kwargs}
        return self.start(FlowerStrategy(make, schedule, num_steps, **options))


def per_token(totals: Mapping[str, float]) -> Mapping[str, float]:
    return {"loss": totals["nats"] / totals["tokens"]}


def initial(problem: Problem) -> Tree:
    return {key: p.detach().clone() for key, p in problem.module().named_parameters()}


def trained(problem: Problem, case: OptimizerCase, m: int, x: Tree, start: int, stop: int) -> Tree:
    """Train from ``x`` as one would without any of this: a new optimizer and a loop."""
    module = problem.module()
    with torch.no_grad():
        for key, p in module.named_parameters():
            p.copy_(x[key])
    optimizer = case.make(module.parameters())
    for t in range(start, stop):
        optimizer.zero_grad()
        problem.loss(module, m, t).backward()
        for group in optimizer.param_groups:
            group["lr"] = case.lr * rate(t)
        optimizer.step()
    return {key: p.detach().clone() for key, p in module.named_parameters()}


def rounds(every: int, num_steps: int) -> Iterable[tuple[int, int]]:
    return [(start, min(start + every, num_steps)) for start in range(0, num_steps, every)]


def mean(trees: list[Tree], weights: Iterable[float]) -> Tree:
    weights = list(weights)
    return {
        key: sum(w * tree[key] for w, tree in zip(weights, trees, strict=True)) / sum(weights)
        for key in trees[0]
    }


def favg_opt(case: OptimizerCase) -> SyncSchedule:
    return SyncSchedule({PARAMS: 4, **dict.fromkeys(case.oracle.states, "reset")})


# ------------------------------------------------------------------------------------- Arithmetic


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fedavg_with_one_client_is_training_with_a_new_optimizer_every_round(name, tmp_path):
    problem, case = Quadratic(), OPTIMIZERS[name]
    x = initial(problem)
    for start, stop in rounds(4, 14):
        x = trained(problem, case, 0, x, start, stop)
    got = Federated(tmp_path, problem, case, num_clients=1).flower(FedAvg, 4, 14)
    assert_same([{PARAMS: got}], [{PARAMS: x}])


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_fedavg_is_the_mean_under_the_weighting_of_the_federation(weighting, tmp_path):
    problem = Quadratic()
    x = initial(problem)
    for start, stop in rounds(4, 14):
        trees = [trained(problem, ADAM, m, x, start, stop) for m in range(3)]
        x = mean(trees, [1, 2, 3] if weighting == "examples" else [1, 1, 1])
    got = Federated(tmp_path, problem).flower(FedAvg, 4, 14, policy=Policy(weighting=weighting))
    assert_close([{PARAMS: got}], [{PARAMS: x}])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fedavg_equals_favg_opt(name, tmp_path):
    problem, case = Quadratic(), OPTIMIZERS[name]
    ours = DesLoc(favg_opt(case), 14, evaluate_clients=False)
    expected = Federated(tmp_path / "ours", problem, case).start(ours)
    got = Federated(tmp_path / "flowers", problem, case).flower(FedAvg, 4, 14)
    assert_close([{PARAMS: got}], [{PARAMS: expected}])


def test_fedadam_is_adam_on_the_server_along_the_clients_mean_movement(tmp_path):
    problem = Quadratic()
    x = initial(problem)
    u, v = ({key: torch.zeros_like(p) for key, p in x.items()} for _ in range(2))
    for r, (start, stop) in enumerate(rounds(4, 14), start=1):
        trees = [trained(problem, ADAM, m, x, start, stop) for m in range(3)]
        moved = {key: p - x[key] for key, p in mean(trees, [1, 1, 1]).items()}
        u = {key: 0.8 * u[key] + 0.2 * d for key, d in moved.items()}
        v = {key: 0.9 * v[key] + 0.1 * d**2 for key, d in moved.items()}
        # Flower's bias correction is that of the next round.
        lr = 0.05 * (1 - 0.9 ** (r + 1)) ** 0.5 / (1 - 0.8 ** (r + 1))
        x = {key: x[key] + lr * u[key] / (v[key].sqrt() + 1e-2) for key in x}
    make = partial(FedAdam, eta=0.05, beta_1=0.8, beta_2=0.9, tau=1e-2)
    got = Federated(tmp_path, problem).flower(make, 4, 14)
    assert_close([{PARAMS: got}], [{PARAMS: x}])


@pytest.mark.parametrize("make", [FedAvg, FedAdam])
def test_neither_the_order_of_the_nodes_nor_flowers_sampling_changes_a_bit(make, tmp_path):
    found = []
    for seed, order in enumerate([range(7), range(6, -1, -1), (3, 0, 6, 1, 5, 2, 4)]):
        random.seed(seed)  # what Flower samples nodes with
        federated = Federated(tmp_path, Quadratic(), num_clients=7, order=order)
        got = federated.flower(make, 4, 14)
        assert [*federated.watch.records[1].clients] == [f"client-{m}" for m in range(7)]
        found.append({PARAMS: got})
    assert_same(found, found[:1] * 3)


# ------------------------------------------------------------------------------ Records and bytes


def test_every_round_sends_the_parameters_to_every_client_and_back(tmp_path):
    federated = Federated(tmp_path, Quadratic())
    federated.flower(FedAvg, 4, 14, eval_every=6)
    plan, records = federated.watch.plan, federated.watch.records
    size = sum(t.numel() * t.element_size() for t in initial(Quadratic()).values())
    assert (plan.num_steps, plan.num_windows) == (14, 4)
    assert plan.stream_bytes == {PARAMS: size, "exp_avg": size, "exp_avg_sq": size}
    assert [(r.round, r.start, r.step) for r in records] == [
        *((0, 0, 0), (1, 0, 4), (2, 4, 8), (3, 8, 12), (4, 12, 14)),
    ]
    assert [r.step for r in records if r.federated] == [0, 8, 12, 14]
    for record in records:
        trains, evaluates = record.round > 0, record.federated is not None
        assert record.traffic.up == ({PARAMS: 3 * size} if trains else {})
        assert record.traffic.down == {PARAMS: 3 * size * (trains + evaluates)}
        assert record.traffic.framed_up > sum(record.traffic.up.values())
        assert record.streams == ([PARAMS] if trains else [])
        assert record.drift.keys() == set(record.streams)
        assert all(len(c.losses) == record.step - record.start for c in record.clients.values())


class Single(Quadratic):
    """The same in single precision."""

    def module(self) -> nn.Module:
        return super().module().float()


def test_fedadams_parameters_are_sent_in_the_models_type(tmp_path):
    """Flower's own arrays are float64 from the first round on."""
    federated = Federated(tmp_path, Single())
    got = federated.flower(FedAdam, 4, 12)
    assert {t.dtype for t in got.values()} == {torch.float32}
    sizes = [record.traffic.down for record in federated.watch.records[1:3]]
    assert sizes[0] == sizes[1]


# ---------------------------------------------------------------------------------------- Refusals


def test_a_divergence_names_the_setting_to_change(tmp_path):
    steep = OptimizerCase(lambda p: torch.optim.SGD(p, lr=1e200), SGDM.oracle, 1e200)
    with pytest.raises(FederationError, match=r"client-0 .*diverged.*; lower optimizer.lr"):
        Federated(tmp_path, Quadratic(), steep).flower(FedAvg, 4, 14)
    with pytest.raises(FederationError, match=r"FedAdam made .* step 4: .*lower optimizer.lr, or"):
        Federated(tmp_path, Single()).flower(partial(FedAdam, eta=1e39), 4, 14)


def test_a_model_with_buffers_is_refused():
    with pytest.raises(ValueError, match=r"has buffers .*strategy=desloc"):
        FlowerStrategy(FedAvg, favg_opt(ADAM), 14, states={"buffers": {"b": torch.zeros(1)}})


# --------------------------------------------------------------------------------------- As an app

SMALL = (
    "run.steps=12 run.eval_every=6 sync.params=5 model.hidden_size=32 "
    "model.intermediate_size=64 model.num_hidden_layers=1 data.max_bytes=60000 data.seq_len=32 "
    "data.batch_size=2 federation.num_clients=3 evaluation.sequences=4"
)


def run(preset: str, folder: Path, more: str = "") -> dict[str, Any]:
    return summary(train(folder, SMALL, more, config=preset, clients=3))


@pytest.mark.parametrize("preset", ["fedavg", "fedadam"])
def test_a_run_writes_the_same_folder_as_desloc_and_the_analytic_bytes(preset, tmp_path):
    found = run(preset, tmp_path)
    folder = tmp_path / preset
    assert {path.name for path in folder.iterdir()} >= {
        *("config.yaml", "metrics.jsonl", "summary.json", "overview.png", "tensorboard", "final")
    }
    assert found["status"] == "completed"
    assert (found["steps"], found["windows"], found["clients"]) == (12, 3, 3)
    measured, analytic = found["bytes"]["measured"], found["bytes"]["analytic"]
    assert measured["up"] == analytic["up"]
    assert measured["down"] == analytic["down"]
    assert measured["up"]["total"] == 3 * 3 * found["stream_bytes"]["params"] > 0
    # Local Adam's last average is that of params alone.
    assert found["ratio"]["local_adam"] == pytest.approx((3 + 2 * 2) / 3)
    assert found["ratio"]["ddp"] == 12 / 3
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "evaluation" in line] == [0, 10, 12]
    assert found["weights_sha256"] == run(preset, tmp_path / "again")["weights_sha256"]


def test_a_run_whose_clients_fail_writes_the_reason(tmp_path):
    with pytest.raises(FederationError, match=r"lower optimizer\.lr"):
        run("fedavg", tmp_path, "optimizer.lr=1e30")
    found = summary(tmp_path / "fedavg")
    assert found["status"] == "failed"
    assert "lower optimizer.lr" in found["error"]


# ---------------------------------------------------------------------------------------- Settings


def test_the_defaults_of_fedadam_are_flowers():
    own, flowers = load("fedadam").fedadam, FedAdam()
    assert type(own)().lr == flowers.eta
    assert type(own)().tau == flowers.tau


@pytest.mark.parametrize("preset", ["fedavg", "fedadam"])
@pytest.mark.parametrize("optimizer", ["adopt", "adam", "adamw", "amsgrad", "sgdm", "paper_adam"])
def test_the_presets_take_any_optimizer(preset, optimizer):
    check_streams(load(preset, f"optimizer.name={optimizer}"))


@pytest.mark.parametrize(
    ("preset", "override", "parts"),
    [
        ("quickstart", "strategy=fedavg", ["exp_avg, exp_avg_sq", "sync.params", "preset fedavg"]),
        ("fedavg", "sync.exp_avg=never", ["strategy=fedavg", "holds exp_avg"]),
        ("fedadam", "sync.buffers=4", ["strategy=fedadam", "holds buffers"]),
        ("fedavg", "sync_once_at=[4]", ["sync_once_at=[4]", "strategy=desloc"]),
        ("fedavg", "outer.name=sgd", ["outer.name=sgd", "outer.name=none"]),
        ("fedavg", "strategy=fedprox", ["strategy=fedprox", "desloc, fedavg, fedadam"]),
        ("fedadam", "fedadam.lr=-1", ["fedadam.lr=-1.0", "at least 0"]),
        ("fedadam", "fedadam.tau=0", ["fedadam.tau=0.0", "at least"]),
        ("fedadam", "fedadam.betas=[0.9,1]", ["fedadam.betas", "lr, tau"]),
        ("fedadam", "fedadam.eta=1", ["fedadam.eta", "lr, tau"]),
    ],
)
def test_settings_that_flowers_strategies_lack_are_refused_in_one_line(preset, override, parts):
    with pytest.raises(ConfigError) as error:
        load(preset, override)
    message = str(error.value)
    assert "\n" not in message
    assert not [part for part in parts if part not in message], message
