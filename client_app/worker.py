"""Build the workers of clients from the server's settings and the sites' own."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_desloc.app.config import Config, parse
from flower_desloc.app.setup.build import build_clipping, build_local_optimizer, build_lr_schedule
from flower_desloc.app.setup.machine import default_device, device_info
from flower_desloc.app.setup.measured_step import with_micro_batch_size
from flower_desloc.app.sites.multiprocess.parallelism import NodeConfig
from flower_desloc.app.tasks import Batch, ClientData, Site, Task, build_task
from flower_desloc.app.tasks.alike import ALIKE, required_alike
from flower_desloc.app.tasks.data_version import data_version
from flower_desloc.core.errors import SiteRefusedError
from flower_desloc.core.worker import Worker


class RunParts:
    """What the clients of one run share in a process; each part is built once.

    The model carries no stream from one client to the next, as all are put back before use. What a
    module of your own keeps besides, such as records, the next simulated client finds.

    Parameters
    ----------
    settings : str
        The configuration that was sent.
    alike : Mapping[str, str]
        What the server has, and every site must have alike: ``required_alike``.
    device : torch.device
        Where this process computes.
    data_path : Path, optional
        A site's data, on which ``data.micro_batch_size=auto`` is found; by default that of the
        first simulated client.
    is_private : bool
        Whether the site has a privacy budget of its own.

    """

    def __init__(
        self,
        settings: str,
        alike: Mapping[str, str],
        device: torch.device,
        data_path: Path | None = None,
        *,
        is_private: bool = False,
    ) -> None:
        self.sent = settings, {**alike}
        self.stated = parse(settings)
        self.device = device
        self._alike, self._data_path, self._is_private = alike, data_path, is_private
        # Of hundreds of simulated clients, each has a part of one data set.
        self.data = lru_cache(maxsize=1024)(self._client_data)

    @cached_property
    def config(self) -> Config:
        """The configuration, with the number that ``data.micro_batch_size=auto`` is here."""
        return with_micro_batch_size(
            self.stated, self.device, self._data_path, is_private=self._is_private
        )

    @cached_property
    def task(self) -> Task:
        """The task of that configuration."""
        return build_task(self.config)

    def build_model(self) -> nn.Module:
        """Return a new model; raises ``SiteRefusedError`` if this site differs from the server."""
        model = self.task.build_model()
        here = required_alike(self.task, model)
        for what, theirs in self._alike.items():
            if here[what] != theirs:
                raise SiteRefusedError(
                    f"{ALIKE[what]} of task={self.config.task} differ from the server's; give "
                    "every site the same files"
                )
        return model

    @cached_property
    def _trained(self) -> tuple[nn.Module, Optimizer]:
        module = self.build_model().to(self.device)
        return module, build_local_optimizer(self.config, module)

    def single_worker(self, node: NodeConfig) -> Worker:
        """Return the worker of a client of one process.

        Raises ``ValueError`` when its node config lacks what it needs, or its shard is empty.
        """
        return self.worker(node, *self._trained)

    def worker(
        self,
        node: NodeConfig,
        module: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[nn.Module, Batch], Tensor] | None = None,
    ) -> Worker:
        """Return the worker of the client with that node config, over that model and optimizer.

        ``loss`` takes the place of the task's.
        """
        config, task, site = self.config, self.task, site_of(node)
        micro_batch, data = config.data.micro_batch_size, self.data(site)
        assert not isinstance(micro_batch, str), "with_micro_batch_size gives it a number"
        loss = loss or task.loss

        # torch.manual_seed also seeds accelerators. Where there is none it keeps its caller's stack
        # instead, three times in every step, which takes a millisecond.
        on_cpu = self.device.type == "cpu"
        seed = torch.default_generator.manual_seed if on_cpu else torch.manual_seed

        def loss_at(step: int) -> Tensor:
            # Dropout and the like draw from the global generator.
            seed(_mix(config.run.seed, site.partition, step))
            return loss(module, data.train_batch(step))

        def version() -> str:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(_mix(config.run.seed, site.partition, 0))  # as for the first step
                return data_version(data)

        return Worker(
            module=module,
            optimizer=optimizer,
            loss_at=loss_at,
            num_examples=data.num_examples,
            lr_schedule=build_lr_schedule(config),
            clipping=build_clipping(config),
            evaluate=(lambda: task.evaluate(module, data.heldout()))
            if config.evaluation.federated
            else None,
            metrics=task.metrics,
            info=replace(device_info(self.device), micro_batch=micro_batch, data=data.description),
            data_version=version,
        )

    def _client_data(self, site: Site) -> ClientData:
        if site.data_path is not None and not getattr(self.task, "reads_data_path", False):
            raise SiteRefusedError(
                f"data-path in the node config: task={self.config.task} does not state that it "
                "reads site.data_path, and may train on other data; let client_data read that "
                "path, and set reads_data_path = True in its class, or leave data-path out"
            )
        return self.task.client_data(site)


def device_of(node: NodeConfig) -> torch.device:
    """Return where a client computes: a GPU if there is one and the node config names no other."""
    return torch.device(str(node.get("device", default_device())))


def site_of(node: NodeConfig) -> Site:
    """Return a client's data, as its node config names it; raises ``SiteRefusedError`` if not."""
    path = node.get("data-path")
    if path is None and not {"partition-id", "num-partitions"} <= node.keys():
        raise SiteRefusedError(
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
