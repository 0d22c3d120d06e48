"""The toy with the real strategy and clients, over an in-process grid."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context
from torch import nn

from examples.toy.problem import SPLITS, START, Noise, Reals, noisy_value
from examples.toy.setting import ToyMethod, ToySetting
from flower_desloc.core.worker import Clipping, Worker
from flower_desloc.flower.arrays import from_record, to_record
from flower_desloc.flower.client import client_app
from flower_desloc.flower.inprocess import InProcessGrid
from flower_desloc.flower.messages import Settings
from flower_desloc.flower.strategy import DesLoc


class Points(nn.Module):
    """The model: x1 and x2 of every replica, (2, splits, seeds).

    A replica is an independent run. Every operation is elementwise, so many replicas share one
    tensor.
    """

    def __init__(self, num_seeds: int) -> None:
        super().__init__()
        start = torch.tensor(START, dtype=torch.float64)[:, None, None]
        self.x = nn.Parameter(start.repeat(1, len(SPLITS), num_seeds))


def federate(
    setting: ToySetting,
    method: ToyMethod,
    *,
    num_workers: int,
    num_steps: int,
    seeds: Sequence[int],
    state_dir: Path,
) -> Reals:
    """Return the start and every average of the parameters: (1 + rounds, 2, splits, seeds).

    The clients keep their state in ``state_dir``.
    """
    averages: list[Reals] = []

    def remember(_window: int, params: ArrayRecord) -> None:
        averages.append(from_record(params)["x"].numpy().copy())

    nodes = [{"partition-id": m, "state-dir": str(state_dir)} for m in range(num_workers)]
    grid = InProcessGrid(client_app(_builder(setting, seeds)), nodes)
    strategy = DesLoc(method.schedule(), num_steps, eval_every=1, evaluate_clients=False)
    start = to_record(dict(Points(len(seeds)).named_parameters()))
    strategy.start(grid, start, evaluate_fn=remember)
    return np.stack(averages)


def _builder(setting: ToySetting, seeds: Sequence[int]) -> Callable[[Settings, Context], Worker]:
    # All clients share one model and one optimizer, into which each message puts their streams.
    points = Points(len(seeds))
    optimizer = setting.optimizer(points.parameters())

    @cache
    def noise(worker: int) -> Noise:
        return Noise(worker, seeds)

    def build(_config: Settings, context: Context) -> Worker:
        own = noise(int(context.node_config["partition-id"]))
        return Worker(
            module=points,
            optimizer=optimizer,
            loss_at=lambda step: noisy_value(points.x, own.at(step)),
            num_examples=1,
            clipping=Clipping(value=setting.clip),
        )

    return build
