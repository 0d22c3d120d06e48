"""The client's worker that has a group behind it."""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from flower_desloc.core.averaging import Stream
from flower_desloc.core.local_steps import StepMetrics
from flower_desloc.core.streams import check_like
from flower_desloc.flower.client import Worker
from flower_desloc.sites.multiprocess.group import Group
from flower_desloc.sites.multiprocess.settings import Node


@dataclass(frozen=True, kw_only=True)
class GroupWorker(Worker):
    """A worker whose every act is one of all its ranks."""

    group: Group
    folder: Path
    """Where streams may lie that memory has no room for."""

    @classmethod
    def of(cls, group: Group, node: Node, folder: Path) -> "GroupWorker":
        """Return the worker of the client with that node config."""
        worker = group.serve(dict(node))
        totals: Callable[[], Mapping[str, float]] | None = worker.evaluate
        if totals is not None and group.sharded:
            totals = group.evaluate
        return cls(**{**vars(worker), "evaluate": totals}, group=group, folder=folder)

    def like(self, names: Iterable[str]) -> dict[str, Stream]:
        """Return tensors of the shapes and types that streams have in one process."""
        return {name: self.group.member.like(name) for name in names}

    def put(self, streams: Mapping[str, Stream], due: Container[str] = ()) -> None:
        """Write streams into all ranks."""
        del due  # their memory is the ranks' own
        for name, like in self.like(streams).items():
            check_like(name, streams[name], like)
        self.group.put(list(streams), streams=streams)

    def take(self, names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
        """Return streams from all ranks."""
        return self.group.take(list(names), folder=self.folder)

    def seed(self, step: int) -> None:
        """Give ADOPT the v that its first step would have."""
        self.group.seed(step)

    def steps(self, start: int, stop: int, origin: int) -> StepMetrics:
        """Take the local steps ``start + 1 .. stop`` on all ranks."""
        return self.group.steps(start, stop, origin)

    def gradient(self, step: int) -> tuple[dict[str, Tensor], StepMetrics]:
        """Return the gradient of the next batch."""
        return self.group.gradient(step)
