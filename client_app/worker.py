"""Build a client's worker from the server's settings and the site's own."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_desloc.app.config import Config, dump, parse
from flower_desloc.app.setup.build import build_clipping, build_local_optimizer, build_lr_schedule
from flower_desloc.app.setup.machine import default_device, device_info
from flower_desloc.app.setup.measured_step import with_micro_batch_size
from flower_desloc.app.sites.multiprocess.parallelism import NodeConfig
from flower_desloc.app.tasks import Batch, ClientData, Site, Task, build_task
from flower_desloc.app.tasks.data_version import data_version
from flower_desloc.core import streams
from flower_desloc.core.worker import Worker


def build_single_worker(settings: str, frozen: str, node: NodeConfig) -> Worker:
    """Return the worker of a client of one process.

    Raises ``ValueError`` when its node config lacks what it needs, or its shard is empty.
    """
    device = device_of(node)
    settings = with_number(settings, device, _site(node).data_path)
    return worker_of(settings, node, device, *_model(settings, frozen, device))


def worker_of(
    settings: str,
    node: NodeConfig,
    device: torch.device,
    module: nn.Module,
    optimizer: Optimizer,
    loss: Callable[[nn.Module, Batch], Tensor] | None = None,
) -> Worker:
    """Return the worker of the client with that node config, over that model and optimizer.

    ``loss`` takes the place of the task's.
    """
    typed, site = config_of(settings), _site(node)
    micro_batch = typed.data.micro_batch_size
    assert not isinstance(micro_batch, str), "with_number gives settings a number"
    task, data = task_of(settings), _data(settings, site)
    loss = loss or task.loss

    def loss_at(step: int) -> Tensor:
        # Dropout and the like draw from the global generator.
        torch.manual_seed(_mix(typed.run.seed, site.partition, step))
        return loss(module, data.train_batch(step))

    def version() -> str:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_mix(typed.run.seed, site.partition, 0))  # as for the first step
            return data_version(data)

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
        info=replace(device_info(device), micro_batch=micro_batch, data=data.description),
        data_version=version,
    )


# A process serves several clients of one run: the parts that are equal are built once. The model
# carries nothing from one client to the next, as a worker's streams are all put back before use.


@lru_cache(maxsize=1)
def config_of(settings: str) -> Config:
    """Return the configuration that was sent."""
    return parse(settings)


@lru_cache(maxsize=1)
def with_number(settings: str, device: torch.device, data_path: Path | None = None) -> str:
    """Return the settings with the number that ``data.micro_batch_size=auto`` is on ``device``.

    On a GPU it is found by steps on the data of ``data_path``, or of the first simulated client.
    """
    config = config_of(settings)
    sized = with_micro_batch_size(config, device, data_path)
    return settings if sized is config else dump(sized)


@lru_cache(maxsize=1)
def task_of(settings: str) -> Task:
    """Return the task of that configuration."""
    return build_task(config_of(settings))


@lru_cache(maxsize=1024)  # of hundreds of simulated clients, each has a part of one data set
def _data(settings: str, site: Site) -> ClientData:
    task = task_of(settings)
    if site.data_path is not None and not getattr(task, "reads_data_path", False):
        raise ValueError(
            f"data-path={site.data_path}: task={config_of(settings).task} does not state that it "
            "reads site.data_path, and may train on other data; let client_data read that path, "
            "and set reads_data_path = True in its class, or leave data-path out of the node config"
        )
    return task.client_data(site)


@lru_cache(maxsize=1)
def _model(settings: str, frozen: str, device: torch.device) -> tuple[nn.Module, Optimizer]:
    module = model_of(settings, frozen).to(device)
    return module, build_local_optimizer(config_of(settings), module.parameters())


def model_of(settings: str, frozen: str) -> nn.Module:
    """Return a new model; raises ``ValueError`` if its frozen parameters are not the server's."""
    model = task_of(settings).build_model()
    if frozen and streams.frozen(model) != frozen:
        raise ValueError(
            f"the frozen parameters of task={config_of(settings).task} differ from the server's; "
            "give every site the same base model"
        )
    return model


def device_of(node: NodeConfig) -> torch.device:
    """Return where a client computes: a GPU if there is one and the node config names no other."""
    return torch.device(str(node.get("device", default_device())))


def _site(node: NodeConfig) -> Site:
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
