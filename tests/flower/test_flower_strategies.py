"""Flower's own strategies over DES-LOC's clients: what they compute, send, record and refuse."""

import random
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import (
    OPTIMIZERS,
    OptimizerCase,
    Quadratic,
    assert_close,
    assert_same,
    falling,
    initial,
    trained,
)
from flower_path import Run
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedProx, FedYogi
from reference import E, Tree, each
from tiny import TINY, summary, train
from torch import Tensor, nn

from flower_desloc import DataParallel, OuterOptimizer, SyncSchedule
from flower_desloc.app.config import Config, ConfigError, load
from flower_desloc.app.runs.folder import read_lines
from flower_desloc.app.setup.build import build_flower_strategy
from flower_desloc.app.setup.streams import RunStreams
from flower_desloc.core.proximal import proximal
from flower_desloc.core.schedule import PARAMS
from flower_desloc.core.worker import Worker
from flower_desloc.flower.baselines.flower_strategies import STRATEGIES, FlowerStrategy
from flower_desloc.flower.failures import FederationError
from flower_desloc.flower.policy import Policy
from flower_desloc.optim import SGDM

ADAM = OPTIMIZERS["adam"]
SGD = replace(OPTIMIZERS["sgdm"], make=lambda p: SGDM(p, lr=OPTIMIZERS["sgdm"].lr, momentum=0.0))
WINDOWS = [range(0, 4), range(4, 8), range(8, 12), range(12, 14)]


def favg_opt(case: OptimizerCase) -> SyncSchedule:
    return SyncSchedule({PARAMS: 4, **dict.fromkeys(case.oracle.states, "reset")})


def federated(
    folder: Path,
    case: OptimizerCase = ADAM,
    *,
    problem: type[Quadratic] = Quadratic,
    num_clients: int = 3,
) -> Run:
    """Return a run whose clients share a module and an optimizer, as in the app.

    Nothing may leak from one client or round to the next.
    """
    own = problem()
    module = own.module()
    optimizer = case.make(module.parameters())
    object.__setattr__(own, "module", lambda: module)
    shared = replace(case, make=lambda params: optimizer)
    options: dict[str, Any] = {"num_clients": num_clients, "num_steps": 14, "lr_schedule": falling}
    return Run(shared, favg_opt(case), folder, problem=own, **options)


def flower(run: Run, make: Callable[..., FedAvg], **options: Any) -> Tree:
    """Start the run with a strategy of Flower's in place of DES-LOC."""
    options = {"templates": run.zeros, "evaluate_clients": False, **options}
    run.strategy = FlowerStrategy(make, run.schedule, run.num_steps, **options)
    return run.final()


def after_a_window(x: Tree, window: range, case: OptimizerCase = ADAM) -> list[Tree]:
    return [trained(Quadratic(), case, [m], x, window, falling)[PARAMS] for m in range(3)]


# ------------------------------------------------------------------------------------- Arithmetic


@pytest.mark.parametrize(
    ("name", "weighting"),
    [
        ("adam", "examples"),
        *((name, "uniform") for name in ("adam", "adopt", "amsgrad", "sgdm")),
    ],
)
def test_fedavg_is_the_mean_under_the_weighting_of_the_federation(name, weighting, tmp_path):
    x = initial(Quadratic())
    for window in WINDOWS:
        clients = after_a_window(x, window, OPTIMIZERS[name])
        x = E(clients, [1, 2, 3] if weighting == "examples" else None)
    run = federated(tmp_path, OPTIMIZERS[name])
    assert_close(flower(run, FedAvg, policy=Policy(weighting=weighting)), x)


def test_fedadam_is_adam_on_the_server_along_the_clients_mean_movement(tmp_path):
    x = initial(Quadratic())
    u = v = each(torch.zeros_like, x)
    for r, window in enumerate(WINDOWS, start=1):
        moved = each(torch.sub, E(after_a_window(x, window)), x)
        u = each(lambda u, d: 0.8 * u + 0.2 * d, u, moved)
        v = each(lambda v, d: 0.9 * v + 0.1 * d**2, v, moved)
        # Flower's bias correction is that of the next round.
        lr = 0.05 * (1 - 0.9 ** (r + 1)) ** 0.5 / (1 - 0.8 ** (r + 1))
        x = {key: x[key] + lr * u[key] / (v[key].sqrt() + 1e-2) for key in x}
    make = partial(FedAdam, eta=0.05, beta_1=0.8, beta_2=0.9, tau=1e-2)
    assert_close(flower(federated(tmp_path), make), x)


def test_fedyogi_is_yogi_on_the_server_along_the_clients_mean_movement(tmp_path):
    x = initial(Quadratic())
    u = v = each(torch.zeros_like, x)
    for window in WINDOWS:
        moved = each(torch.sub, E(after_a_window(x, window)), x)
        u = each(lambda u, d: 0.8 * u + 0.2 * d, u, moved)
        v = each(lambda v, d: v - 0.1 * d**2 * (v - d**2).sign(), v, moved)
        x = {key: x[key] + 0.05 * u[key] / (v[key].sqrt() + 1e-2) for key in x}
    make = partial(FedYogi, eta=0.05, beta_1=0.8, beta_2=0.9, tau=1e-2)
    assert_close(flower(federated(tmp_path), make), x)


def test_fedavgm_is_heavy_ball_on_the_server_along_the_clients_mean_movement(tmp_path):
    x = initial(Quadratic())
    velocity = each(torch.zeros_like, x)
    for window in WINDOWS:
        moved = each(torch.sub, E(after_a_window(x, window)), x)
        velocity = each(lambda v, d: 0.7 * v + d, velocity, moved)
        x = {key: x[key] + 0.5 * velocity[key] for key in x}
    make = partial(FedAvgM, server_learning_rate=0.5, server_momentum=0.7)
    assert_close(flower(federated(tmp_path), make), x)


def test_fedprox_holds_clients_near_the_parameters_that_they_start_a_window_from(tmp_path):
    """Its gradient is that of the client's loss plus mu (x - x_0)."""
    mu, problem, x = 0.7, Quadratic(), initial(Quadratic())
    for window in WINDOWS:
        clients = []
        for m in range(3):
            module = problem.module()
            with torch.no_grad():
                for key, p in module.named_parameters():
                    p.copy_(x[key])
            optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
            for t in window:
                optimizer.zero_grad()
                problem.loss(module, m, t).backward()
                optimizer.param_groups[0]["lr"] = SGD.lr * falling(t)
                for key, p in module.named_parameters():
                    assert p.grad is not None
                    p.grad += mu * (p.detach() - x[key])
                optimizer.step()
            clients.append({key: p.detach().clone() for key, p in module.named_parameters()})
        x = E(clients)
    run = federated(tmp_path, SGD)
    assert_close(flower(run, partial(FedProx, proximal_mu=mu)), x)


def test_the_loss_of_a_client_that_is_held_near_its_start_is_recorded_without_the_term():
    def losses(mu: float) -> tuple[list[float], list[float]]:
        start = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(start.weight)

        def loss_at(step: int) -> Tensor:
            loss = start.weight.square().sum()
            found.append(loss.item())
            return loss

        found: list[float] = []
        optimizer = torch.optim.SGD(start.parameters(), lr=0.1)
        worker = Worker(module=start, optimizer=optimizer, loss_at=loss_at, num_examples=1)
        return proximal(worker, mu).steps(0, 4).losses, found

    near, free = losses(3.0), losses(0.0)
    assert near[0] == near[1]
    assert near[0][0] == free[0][0]
    assert near[0][3] > free[0][3]  # and the term does hold it


def test_neither_the_order_of_the_nodes_nor_flowers_sampling_changes_a_bit(tmp_path):
    found = []
    for seed, order in enumerate([range(7), (3, 0, 6, 1, 5, 2, 4)]):
        random.seed(seed)  # what Flower samples nodes with
        run = federated(tmp_path, num_clients=7)
        run.renumber(order)
        found.append(flower(run, FedAdam))
        assert [*run.watch.records[1].clients] == [f"client-{m}" for m in range(7)]
    assert_same(*found)


class Single(Quadratic):
    """The same in single precision."""

    def module(self) -> nn.Module:
        return super().module().float()


def test_fedadams_parameters_are_sent_in_the_models_type(tmp_path):
    """Flower's own arrays are float64 from the first round on."""
    run = federated(tmp_path, problem=Single)
    assert {t.dtype for t in flower(run, FedAdam).values()} == {torch.float32}
    sizes = [record.traffic.down for record in run.watch.records[1:3]]
    assert sizes[0] == sizes[1]


# ---------------------------------------------------------------------------------------- Refusals


def test_a_divergence_on_the_server_names_the_setting_to_change(tmp_path):
    with pytest.raises(FederationError, match=r"FedAdam made .* step 4: .*lower optimizer.lr, or"):
        flower(federated(tmp_path, problem=Single), partial(FedAdam, eta=1e39))


def test_a_model_with_buffers_is_refused():
    with pytest.raises(ValueError, match=r"has buffers .*strategy=desloc"):
        FlowerStrategy(FedAvg, favg_opt(ADAM), 14, templates={"buffers": {"b": torch.zeros(1)}})


def test_the_log_names_the_method(caplog):
    caplog.set_level("INFO", "flwr")
    FlowerStrategy(FedAvg, favg_opt(ADAM), 14).summary()
    DataParallel(7, OuterOptimizer(partial(torch.optim.SGD, lr=1.0))).summary()
    assert "FedAvg, 14 local steps" in caplog.text
    assert "data parallelism, 7 local steps" in caplog.text


def test_a_policy_that_averages_in_another_way_is_refused():
    with pytest.raises(ValueError, match=r"average=median: only strategy=desloc has it"):
        FlowerStrategy(FedAvg, favg_opt(ADAM), 14, policy=Policy(average="median"))


# --------------------------------------------------------------------------------------- As an app

SMALL = [*TINY, *("run.steps=12", "run.eval_every=6", "sync.params=5", "simulation.num_clients=3")]


@pytest.mark.parametrize("preset", ["fedavg", "fedadam"])
def test_a_run_sends_the_parameters_in_every_round_and_records_it_as_desloc_does(preset, tmp_path):
    folder = train(tmp_path, *SMALL, config=preset, clients=3)
    found = summary(folder)
    assert (found["steps"], found["windows"], found["clients"]) == (12, 3, 3)
    measured, analytic = found["bytes"]["measured"], found["bytes"]["analytic"]
    assert measured["up"] == analytic["up"]
    assert measured["down"] == analytic["down"]
    # Local Adam's last average is that of params alone.
    assert found["ratio"]["local_adam"] == pytest.approx((3 + 2 * 2) / 3)
    assert found["ratio"]["ddp"] == 12 / 3
    lines = list(read_lines(folder / "metrics.jsonl"))
    assert [line["step"] for line in lines if line["evaluation"]] == [0, 10, 12]
    first, *windows = lines
    assert (first["round"], first["bytes_up"], first["streams"]) == (0, {}, [])
    assert [(line["start"], line["step"]) for line in windows] == [(0, 5), (5, 10), (10, 12)]
    sent = 3 * found["stream_bytes"]["params"]
    for line in windows:
        assert line["bytes_up"] == {"params": sent}
        # With an evaluation they are sent a second time.
        assert line["bytes_down"] == {"params": (2 if line["evaluation"] else 1) * sent}
        assert line["framed_bytes_up"] > sent > 0
        assert line["streams"] == [*line["drift"]] == ["params"]


# ---------------------------------------------------------------------------------------- Settings


def test_every_strategy_of_flowers_is_a_word_of_the_configuration():
    [field] = (field for field in fields(Config) if field.name == "strategy")
    assert field.metadata["words"] == ("desloc", *STRATEGIES)
    for name in STRATEGIES:
        config = load(name)
        assert config.strategy == name
        assert type(build_flower_strategy(config)()) is STRATEGIES[name]


@pytest.mark.parametrize("preset", ["fedavg", "fedadam"])
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS])
def test_the_presets_take_any_optimizer(preset, optimizer):
    RunStreams(load(preset, f"optimizer.name={optimizer} optimizer.lr=0.1")).check()


@pytest.mark.parametrize(
    ("preset", "override", "parts"),
    [
        ("quickstart", "strategy=fedavg", ["exp_avg, exp_avg_sq", "sync.params", "preset fedavg"]),
        ("fedavg", "sync.exp_avg=never", ["strategy=fedavg", "holds exp_avg"]),
        ("fedadam", "sync.buffers=4", ["strategy=fedadam", "holds buffers"]),
        ("fedavg", "sync_once_at=[4]", ["sync_once_at=[4]", "strategy=desloc"]),
        ("fedavg", "sync_phase.exp_avg=1", ["only strategy=desloc", "set sync_phase={}"]),
        ("fedavg", "outer.name=sgd", ["outer.name=sgd", "outer.name=none"]),
        ("fedavg", "strategy=fednova", ["strategy=fednova", "desloc, fedavg, fedavgm"]),
        ("quickstart", "strategy_options.eta=1", ["Flower's own", "set strategy_options={}"]),
        ("fedavg", "strategy_options.eta=1", ["options.eta: FedAvg has", "it has none"]),
        ("fedadam", "strategy_options.eta=-1", ["strategy_options.eta=-1", "at least 0"]),
        ("fedadam", "strategy_options.tau=small", ["strategy_options.tau=small", "a number"]),
        ("fedadam", "strategy_options.lr=1", ["FedAdam has no", "beta_1, beta_2, eta, tau"]),
        ("fedprox", "strategy_options.mu=1", ["FedProx has no", "it has proximal_mu"]),
    ],
)
def test_settings_that_flowers_strategies_lack_are_refused_in_one_line(preset, override, parts):
    with pytest.raises(ConfigError) as error:
        RunStreams(load(preset, override)).check()
    message = str(error.value)
    assert "\n" not in message
    assert not [part for part in parts if part not in message], message
