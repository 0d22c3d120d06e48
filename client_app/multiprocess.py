"""Build a client of several processes, and refuse settings that it does not support."""

import json
from functools import partial

import torch
import torch.distributed as dist
from flwr.app import Context
from torch import Tensor, nn

from client_app.worker import RunParts
from flower_desloc.app.config import Config
from flower_desloc.app.config.schema import AUTO
from flower_desloc.app.setup.build import build_local_optimizer
from flower_desloc.app.setup.param_groups import OPTIMIZER, described_optimizer, trial_groups
from flower_desloc.app.sites.multiprocess.parallelism import Parallelism
from flower_desloc.app.sites.multiprocess.rank_worker import RankWorker, ShardedRankWorker
from flower_desloc.app.sites.multiprocess.ranks import RankLauncher
from flower_desloc.app.sites.multiprocess.worker import MultiProcessWorker
from flower_desloc.app.tasks import Batch, Task
from flower_desloc.app.tasks.compute import SharesBatches
from flower_desloc.core.worker import Worker
from flower_desloc.flower.client_state import state_folder
from flower_desloc.optim import OPTIMIZERS


def build_ranks_worker(
    parts: RunParts, context: Context, parallelism: Parallelism, launcher: RankLauncher
) -> Worker:
    """Return the worker of a client with several processes, which ``launcher`` starts if necessary.

    Raises ``ValueError`` for what several processes cannot do.
    """
    _check(parts.stated, parallelism)
    _require_shared_batches(parts.config, parts.task)
    argument = json.dumps(parts.sent)
    ranks = launcher.get("client_app.multiprocess:build_rank", argument, parallelism, parts.device)
    return MultiProcessWorker.of(ranks, context.node_config, state_folder(context))


def build_rank(device: torch.device, parallelism: Parallelism, argument: str) -> RankWorker:
    """Return what this process trains, as one rank."""
    settings, alike = json.loads(argument)
    parts = RunParts(settings, alike, device)
    task = parts.task
    rank, world = dist.get_rank(), dist.get_world_size()
    sharing = _require_shared_batches(parts.config, task)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        # Before anything is drawn for dropout: other rows need other random numbers.
        torch.manual_seed(torch.initial_seed() + rank)
        part, weight = sharing.share(batch, rank, world)
        return task.loss(module, part) * weight

    worker: RankWorker = (ShardedRankWorker if parallelism.sharded else RankWorker)(
        parts.build_model,
        partial(build_local_optimizer, parts.config),
        device,
    )
    worker.build_worker = lambda node: parts.worker(node, worker.model, worker.optimizer, loss)
    return worker


def _require_shared_batches(config: Config, task: Task) -> SharesBatches:
    if isinstance(task, SharesBatches):
        return task
    raise ValueError(
        f"task={config.task} does not say how several processes share a batch; give it a method "
        "share(batch, rank, world), or leave processes out of the node config"
    )


def _check(config: Config, parallelism: Parallelism) -> None:
    data = config.data
    if not config.is_desloc:
        raise ValueError(f"strategy={config.strategy} is for clients of one process")
    for name in config.optimizer.names:
        if described_optimizer(name).whole_window_states:  # the ranks' optimizers know no windows
            raise ValueError(f"optimizer.name={name} is for clients of one process")
    if data.batch_size < parallelism.processes:
        raise ValueError(
            f"data.batch_size={data.batch_size} is too small for "
            f"processes={parallelism.processes} in the node config"
        )
    if not parallelism.sharded:
        return
    names = dict.fromkeys(group[OPTIMIZER] for group in trial_groups(config))
    if whole := [name for name in names if not described_optimizer(name).elementwise]:
        elementwise = [name for name, known in OPTIMIZERS.items() if known.elementwise]
        raise ValueError(
            f"optimizer.name={whole[0]} may need whole tensors, which parallel='fsdp' "
            f"does not give it; use parallel='ddp', or one of {', '.join(elementwise)}; a class of "
            "your own that treats every value by itself says so by elementwise = True"
        )
    if config.averages_gradients:
        raise ValueError("sync.gradients is for parallel='ddp'")
    # All ranks must go through the model equally often.
    if data.micro_batch_size == AUTO:
        raise ValueError("data.micro_batch_size=auto is for parallel='ddp'; give a number")
    if data.micro_batch_size is not None and data.batch_size % parallelism.processes:
        raise ValueError(
            f"data.batch_size={data.batch_size} with data.micro_batch_size must be a multiple of "
            f"processes={parallelism.processes} under parallel='fsdp'"
        )
