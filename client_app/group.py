"""A client of several processes: what each of them trains, and what they cannot."""

import json
from typing import Any

import torch
import torch.distributed as dist
from flwr.app import Context
from torch import Tensor, nn

from client_app.worker import config_of, model_of, task_of, worker_of
from flower_desloc.config import Config
from flower_desloc.core.schedule import GRADIENTS
from flower_desloc.flower.client import Worker, state_folder
from flower_desloc.setup.build import build_optimizer
from flower_desloc.sites.multiprocess.group import Group
from flower_desloc.sites.multiprocess.layout import Layout
from flower_desloc.sites.multiprocess.member import Member
from flower_desloc.sites.multiprocess.settings import Setting
from flower_desloc.sites.multiprocess.whole import Whole
from flower_desloc.sites.multiprocess.worker import GroupWorker
from flower_desloc.tasks import Batch, Task
from flower_desloc.tasks.compute import SharesBatches

_BY_VALUE = ("adopt", "adam", "adamw", "amsgrad", "sgdm", "paper_adam")
"""Optimizers that treat every value by itself, and so work on a share of a tensor."""


def group_worker(
    settings: str, frozen: str, context: Context, device: torch.device, setting: Setting
) -> Worker:
    """Return the worker of a client whose node has several processes, which are started if needed.

    Raises ``ValueError`` for what several processes cannot do.
    """
    _shares_batches(config_of(settings), task_of(settings))
    _check(config_of(settings), setting)
    about = json.dumps([settings, frozen])
    group = Group.of("client_app.group:build_member", about, setting, device)
    return GroupWorker.of(group, context.node_config, state_folder(context))


def build_member(device: torch.device, setting: Setting, about: str) -> Member:
    """Return what the process that calls this trains, one rank of a group."""
    settings, frozen = json.loads(about)
    config, task = config_of(settings), task_of(settings)
    rank, world, sharing = dist.get_rank(), dist.get_world_size(), _shares_batches(config, task)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        # Before what is drawn for dropout: other rows, other draws.
        torch.manual_seed(torch.initial_seed() + rank)
        part, weight = sharing.share(batch, rank, world)
        return task.loss(module, part) * weight

    parts = (
        lambda: model_of(settings, frozen),
        lambda params: build_optimizer(config, params),
        device,
    )
    layout: Layout = _sharded(*parts) if setting.sharded else Whole(*parts)
    return Member(
        layout,
        lambda node: worker_of(settings, node, device, layout.model, layout.optimizer, loss),
    )


def _sharded(*parts: Any) -> Layout:
    from flower_desloc.sites.multiprocess.sharded import Sharded  # to import FSDP takes a second

    return Sharded(*parts)


def _shares_batches(config: Config, task: Task) -> SharesBatches:
    if isinstance(task, SharesBatches):
        return task
    raise ValueError(
        f"task={config.task} does not say how several processes share a batch; give it a method "
        "share(batch, rank, world), or leave processes out of the node config"
    )


def _check(config: Config, setting: Setting) -> None:
    data = config.data
    if config.strategy != "desloc":
        raise ValueError(f"strategy={config.strategy} is for clients of one process")
    if data.batch_size < setting.processes:
        raise ValueError(
            f"data.batch_size={data.batch_size} is too small for processes={setting.processes} in "
            "the node config"
        )
    if not setting.sharded:
        return
    if config.optimizer.name not in _BY_VALUE:
        raise ValueError(
            f"optimizer.name={config.optimizer.name} may need whole tensors, which parallel='fsdp' "
            f"does not give it; take parallel='ddp', or one of {', '.join(_BY_VALUE)}"
        )
    if GRADIENTS in config.sync:
        raise ValueError("sync.gradients is for parallel='ddp'")
    # All ranks must go through the model equally often.
    if data.micro_batch_size == "auto":
        raise ValueError("data.micro_batch_size=auto is for parallel='ddp'; give a number")
    if data.micro_batch_size is not None and data.batch_size % setting.processes:
        raise ValueError(
            f"data.batch_size={data.batch_size} with data.micro_batch_size must be a multiple of "
            f"processes={setting.processes} under parallel='fsdp'"
        )
