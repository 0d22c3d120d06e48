"""A training loop of one's own ends as a worker's ``loss_at`` does, with every kind of window."""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import OPTIMIZERS, assert_same, falling
from flower_path import Run
from flwr.app import Context, Message
from torch import Tensor
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from flower_desloc import DesLocClient, FederationError, OuterOptimizer, Policy, SyncSchedule
from flower_desloc.core.schedule import PARAMS
from flower_desloc.core.worker import own_loop


def in_own_loop(
    run: Run,
    calls: int = 1,
    record: bool = True,
    leave_at: float = math.inf,
    in_closure: bool = False,
) -> Run:
    """Let the clients of a run train in a loop that a user would write."""

    def build(config: Any, context: Context) -> Any:
        return replace(run.app._build(config, context), loss_at=own_loop)

    client = DesLocClient(build)

    @client.train()
    def train(message: Message, context: Context) -> Message:
        m = int(context.node_config["partition-id"])
        with client.window(message, context) as window:
            module, optimizer = window.worker.module, window.worker.optimizer
            for step in window:
                if step >= leave_at:
                    break
                for group in optimizer.param_groups:
                    group["lr"] = run.case.lr * falling(step)
                losses: list[Tensor] = []

                def gradients(step: int = step, losses: list[Tensor] = losses) -> float:
                    optimizer.zero_grad()
                    losses.append(run.problem.loss(module, m, step))
                    losses[-1].backward()
                    return losses[-1].item()

                if not in_closure:
                    gradients()
                for _ in range(calls):
                    optimizer.step(gradients if in_closure else None)
                if record:
                    window.record(losses[-1])
        return window.reply

    run.grid.client_app = client
    return run


LOSSY = {PARAMS: "int4", "exp_avg": "int8", "exp_avg_sq": "int8"}


def grouped(params: Iterable[Tensor]) -> Optimizer:
    """Return an Adam of two parameter groups, of which one has no bound (``optim.bounds``)."""
    params = list(params)
    groups: list[dict[str, Any]] = [
        {"params": params[::2]},
        {"params": params[1::2], "betas": (0.99, 0.9)},
    ]
    return Adam(groups, lr=0.05, betas=(0.9, 0.95))


CASES = {name: OPTIMIZERS[name] for name in ("adam", "adopt", "sgdm")}
CASES["groups"] = replace(OPTIMIZERS["adam"], make=grouped)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "late": {"sync_delay": 2},
    "joiner": {"present": lambda m, t: m < 2 or t >= 4, "sync_bound": True},
    "unequal": {"policy": Policy(min_steps=0.3, step_seconds={"client-0": 1.0, "client-1": 4.0})},
    "lossy": {"compression": LOSSY},
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("adam", kind) for kind in OPTIONS),
        *(("adopt", kind) for kind in ("late", "joiner")),
        *(("sgdm", kind) for kind in ("unequal", "lossy")),
        *(("groups", kind) for kind in ("plain", "joiner", "lossy")),
    ],
)
def test_both_forms_of_a_client_end_equal(name, kind, tmp_path):
    case, options = CASES[name], OPTIONS[kind]
    schedule = SyncSchedule(case.periods(3, 4, 6))
    if "compression" in options:
        options = {"compression": {s: f for s, f in LOSSY.items() if s in schedule.periods}}

    def run(folder: str) -> Run:
        return Run(case, schedule, tmp_path / folder, lr_schedule=falling, **options)

    first, second = run("loss_at"), in_own_loop(run("loop"))
    assert_same(second.start(), first.start())
    for one, other in zip(first.watch.records, second.watch.records, strict=True):
        assert (one.traffic.up, one.traffic.down) == (other.traffic.up, other.traffic.down)
        for client in one.clients:
            a, b = one.clients[client], other.clients[client]
            assert (a.losses, a.learning_rates) == (b.losses, b.learning_rates)


def test_a_client_that_joins_may_have_its_gradients_in_a_closure(tmp_path):
    """The second moment is seeded with them, which are not there before the closure is called."""
    case = CASES["adam"]

    def run(folder: str) -> Run:
        return Run(
            case, SyncSchedule(case.periods(3, 4, 6)), tmp_path / folder, **OPTIONS["joiner"]
        )

    assert_same(
        in_own_loop(run("closure"), in_closure=True).start(), in_own_loop(run("loop")).start()
    )


def small(folder: Path) -> Run:
    return Run("adam", (3,), folder, num_clients=2, num_steps=6)


def test_a_loss_need_not_be_recorded(tmp_path):
    run = in_own_loop(small(tmp_path), record=False)
    assert_same(run.start(), in_own_loop(small(tmp_path / "other")).start())
    assert all(math.isnan(c.train_loss) for w in run.watch.records for c in w.clients.values())


def test_a_loop_keeps_a_scheduler_in_its_state_and_reports_the_rates_it_used(tmp_path):
    """Also where the scheduler has changed the rate for the next step before the loop goes on."""
    run, kept = small(tmp_path), []
    client = DesLocClient(run.app._build)

    @client.train()
    def train(message: Message, context: Context) -> Message:
        with client.window(message, context) as window:
            optimizer = window.worker.optimizer
            scheduler = StepLR(optimizer, 1, gamma=0.5)
            if window.loop_state:
                scheduler.load_state_dict(dict(window.loop_state))
                optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
            for step in window:
                run.problem.loss(window.worker.module, 0, step).backward()
                optimizer.step()
                scheduler.step()
            kept.append(window.loop_state)
            window.loop_state = scheduler.state_dict()
        return window.reply

    run.grid.client_app = client
    run.start()
    assert [state.get("last_epoch", 0) for state in kept] == [0, 0, 3, 3]
    last = run.watch.records[-1].clients["client-0"].learning_rates
    assert last == [run.case.lr * 0.5**step for step in (3, 4, 5)]


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        ({"calls": 0}, r"no step called optimizer.step\(\) of the Worker's optimizer"),
        ({"calls": 2}, r"step 0 called optimizer.step\(\) 2 times"),
        ({"leave_at": 2}, "the loop over a window ended before its last step, 3"),
    ],
)
def test_a_loop_that_does_not_take_each_step_once_is_an_error(loop, words, tmp_path):
    with pytest.raises(FederationError, match=words):
        in_own_loop(small(tmp_path), **loop).start()


def test_steps_that_a_gradient_scaler_skips_count_as_taken(tmp_path):
    run = small(tmp_path)
    client = DesLocClient(run.app._build)

    @client.train()
    def train(message: Message, context: Context) -> Message:
        scaler = torch.amp.GradScaler("cpu")
        with client.window(message, context) as window:
            window.may_skip_steps = True
            for step in window:
                loss = run.problem.loss(window.worker.module, 0, step)
                scaler.scale(loss * (1 if step == 4 else math.inf)).backward()
                scaler.step(window.worker.optimizer)
                scaler.update()
                window.worker.optimizer.zero_grad()
        return window.reply

    run.grid.client_app = client
    run.start()
    first, second = (w.drift["params"].moved for w in run.watch.records[1:])
    assert first == 0 < second


def test_averaged_gradients_need_a_loss(tmp_path):
    outer = OuterOptimizer(OPTIMIZERS["adam"].make)
    run = Run("adam", SyncSchedule({"gradients": 1}), tmp_path, outer=outer)
    with pytest.raises(FederationError, match="give the Worker a loss_at"):
        in_own_loop(run).start()
