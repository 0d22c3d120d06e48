"""What a client trains: built from the server's settings and the site's own."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import Context
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_desloc.build import build_clipping, build_lr_schedule, build_optimizer
from flower_desloc.config import Config, parse
from flower_desloc.flower.client import Worker
from flower_desloc.record import DATA
from flower_desloc.tasks import ClientData, Site, Task, build_task


def build_worker(config: Mapping[str, str | int | float | bool], context: Context) -> Worker:
    """Return the worker of one client.

    Raises ``ValueError`` when its node config lacks what it needs, or its shard is empty.
    """
    settings = str(config["settings"])
    typed = _config(settings)
    device, site = _device(context), _site(context)
    task, data = _task(settings), _data(settings, site)
    module, optimizer = _model(settings, device)

    def loss_at(step: int) -> Tensor:
        # Dropout and the like draw from the global generator.
        torch.manual_seed(_mix(typed.run.seed, site.partition, step))
        return task.loss(module, data.train_batch(step))

    return Worker(
        module=module,
        optimizer=optimizer,
        loss_at=loss_at,
        num_examples=data.num_examples,
        lr_schedule=build_lr_schedule(typed),
        clipping=build_clipping(typed),
        evaluate=(lambda: task.evaluate(module, data.heldout()))
        if typed.evaluation.federated
        else None,
        metrics=task.metrics,
        about={
            "device": str(device),
            **{f"{DATA}{name}": str(size) for name, size in data.description.items()},
        },
    )


# A process serves several clients of one run: the parts that are equal are built once. The model
# carries nothing from one client to the next, as a worker's streams are all put back before use.


@lru_cache(maxsize=1)
def _config(settings: str) -> Config:
    return parse(settings)


@lru_cache(maxsize=1)
def _task(settings: str) -> Task:
    return build_task(_config(settings))


@lru_cache(maxsize=1024)  # of hundreds of simulated clients, each has a part of one data set
def _data(settings: str, site: Site) -> ClientData:
    return _task(settings).client_data(site)


@lru_cache(maxsize=1)
def _model(settings: str, device: torch.device) -> tuple[nn.Module, Optimizer]:
    module = _task(settings).build_model().to(device)
    return module, build_optimizer(_config(settings), module.parameters())


def _device(context: Context) -> torch.device:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(str(context.node_config.get("device", default)))


def _site(context: Context) -> Site:
    node = context.node_config
    path = node.get("data-path")
    if path is None and not {"partition-id", "num-partitions"} <= node.keys():
        raise ValueError(
            "the node config has neither data-path nor partition-id and num-partitions; start the "
            "SuperNode with --node-config 'partition-id=0 num-partitions=4' or "
            "'data-path=\"/data/text\"'"
        )
    return Site(
        partition=int(node.get("partition-id", 0)),
        num_partitions=int(node.get("num-partitions", 1)),
        data_path=None if path is None else Path(str(path)),
    )


def _mix(*numbers: int) -> int:
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % 2**63
    return seed
