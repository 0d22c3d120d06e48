"""The client: the task's model and data, trained by DES-LOC."""

from typing import TYPE_CHECKING

from flwr.app import Context

from client_app.worker import build_single_worker, device_of
from flower_desloc.app.config.imports import make_importable
from flower_desloc.app.sites.multiprocess.parallelism import Parallelism
from flower_desloc.core.worker import Worker
from flower_desloc.flower.client import client_app
from flower_desloc.flower.messages import Settings

if TYPE_CHECKING:
    from flower_desloc.app.sites.multiprocess.ranks import RankLauncher


class WorkerBuilder:
    """Builds the workers of clients, and owns the processes of those that have several."""

    def __init__(self) -> None:
        self.launcher: RankLauncher | None = None

    def __call__(self, config: Settings, context: Context) -> Worker:
        """Return the worker of one client, in as many processes as its node config says.

        Raises ``ValueError`` when its node config lacks what it needs, or its shard is empty.
        """
        settings, frozen = str(config["settings"]), str(config.get("frozen", ""))
        node = context.node_config
        parallelism = Parallelism.of(node)
        if parallelism.processes == 1:
            return build_single_worker(settings, frozen, node)
        # Imported here: this takes a second, and most clients do without.
        from client_app.multiprocess import build_ranks_worker
        from flower_desloc.app.sites.multiprocess.ranks import RankLauncher

        self.launcher = self.launcher or RankLauncher()
        device = device_of(node)
        return build_ranks_worker(settings, frozen, context, device, parallelism, self.launcher)


make_importable()  # the greeting compares a task's code before it is imported
build_worker = WorkerBuilder()
app = client_app(build_worker)
