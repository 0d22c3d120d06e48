"""The client: the task's model and data, trained by DES-LOC."""

from functools import partial
from typing import TYPE_CHECKING

from flwr.app import Context

from client_app.worker import RunParts, device_of, site_of
from flower_desloc.app.config.imports import make_importable
from flower_desloc.app.sites.audit import audited
from flower_desloc.app.sites.multiprocess.parallelism import NodeConfig, Parallelism
from flower_desloc.app.sites.required import check_keys, require_settings
from flower_desloc.app.tasks.alike import ALIKE
from flower_desloc.core.worker import Worker
from flower_desloc.flower.client import client_app
from flower_desloc.flower.messages import RUN_KEY, Settings
from flower_desloc.flower.protection import OF_THE_APP

if TYPE_CHECKING:
    from flower_desloc.app.sites.multiprocess.ranks import RankLauncher
    from flower_desloc.privacy.account import Account


class WorkerBuilder:
    """Builds the workers of clients, and owns what they share in this process.

    These are the parts of the run that is being served, and the processes of a client that has
    several.
    """

    def __init__(self) -> None:
        self.launcher: RankLauncher | None = None
        self._parts: tuple[tuple[object, ...], RunParts] | None = None
        self._account: tuple[int, Account] | None = None  # of the last client, by its node's id

    def __call__(self, config: Settings, context: Context) -> Worker:
        """Return the worker of one client, in as many processes as its node config says.

        Raises ``ValueError`` when its node config lacks what it needs, or its shard is empty.
        """
        node, self._account = context.node_config, None
        check_keys(node)
        parts = self._parts_of(config, node)
        require_settings(parts.stated, node)
        parallelism = Parallelism.of(node)
        if parts.stated.privacy.epsilon is not None or _has_budget(node):
            from client_app.privacy import private_worker  # Opacus takes seconds to import

            worker, account = private_worker(parts, context, str(config[RUN_KEY]), parallelism)
            self._account = context.node_id, account
            return worker
        if parallelism.processes == 1:
            return parts.single_worker(node)
        # Imported here: this takes a second, and most clients do without.
        from client_app.multiprocess import build_ranks_worker
        from flower_desloc.app.sites.multiprocess.ranks import RankLauncher

        self.launcher = self.launcher or RankLauncher()
        return build_ranks_worker(parts, context, parallelism, self.launcher)

    def spent(self, context: Context) -> dict[str, float]:
        """Return what the run has spent of a client's privacy; empty if that is not known."""
        node, account = self._account or (None, None)
        return account.spent() if account is not None and node == context.node_id else {}

    def is_private(self) -> bool:
        """Return whether the configuration of the last run asks for differential privacy."""
        return self._parts is not None and self._parts[1].stated.privacy.epsilon is not None

    def _parts_of(self, config: Settings, node: NodeConfig) -> RunParts:
        alike = {key: str(text) for key, text in config.items() if key in ALIKE}
        sent, is_private = (str(config["settings"]), alike, device_of(node)), _has_budget(node)
        if self._parts is None or self._parts[0] != (*sent, is_private):
            parts = RunParts(*sent, site_of(node).data_path, is_private=is_private)
            self._parts = (*sent, is_private), parts
        return self._parts[1]


def _has_budget(node: NodeConfig) -> bool:
    """Return whether a node config has anything of a privacy budget."""
    return not {"epsilon", "delta"}.isdisjoint(node)


make_importable()  # the greeting compares a task's code before it is imported
build_worker = WorkerBuilder()
app = client_app(
    build_worker,
    [partial(audited, spent=build_worker.spent)],
    carries_out=OF_THE_APP,
    is_private=build_worker.is_private,
)
