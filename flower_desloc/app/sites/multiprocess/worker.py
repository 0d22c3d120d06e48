"""The client's worker on rank 0, whose every method acts on all ranks."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from flower_desloc.app.sites.multiprocess.parallelism import NodeConfig
from flower_desloc.app.sites.multiprocess.ranks import Ranks
from flower_desloc.core.streams import check_like
from flower_desloc.core.types import Stream
from flower_desloc.core.worker import StepMetrics, Worker


@dataclass(frozen=True, kw_only=True)
class MultiProcessWorker(Worker):
    """A worker that trains on several ranks."""

    ranks: Ranks
    folder: Path
    """Folder in which whole streams are stored until they are read."""

    @classmethod
    def of(cls, ranks: Ranks, node_config: NodeConfig, folder: Path) -> "MultiProcessWorker":
        """Return the worker of the client with that node config."""
        worker = ranks.call("serve", dict(node_config))
        if worker.evaluate is not None and ranks.parallelism.sharded:
            worker = replace(worker, evaluate=partial(ranks.call, "evaluate"))
        return cls(**vars(worker), ranks=ranks, folder=folder)

    def templates(self, names: Iterable[str]) -> dict[str, Stream]:
        """Return tensors of the shapes and types that streams have in a single process."""
        return {name: self.ranks.worker.shapes(name) for name in names}

    def put(self, streams: Mapping[str, Stream]) -> None:
        """Write streams into all ranks."""
        for name, like in self.templates(streams).items():
            check_like(name, streams[name], like)
        self.ranks.call("put", list(streams), streams=streams)

    def take(self, names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
        """Return whole streams."""
        streams: dict[str, dict[str, Tensor]]
        streams = self.ranks.call("take", list(names), folder=self.folder)
        return streams

    def seed(self, names: Collection[str], step: int) -> None:
        """Let the optimizer of every rank seed the named states."""
        self.ranks.call("seed", names, step)

    def steps(self, start: int, stop: int, origin: int = 0) -> StepMetrics:
        """Take the local steps ``start + 1 .. stop`` on all ranks."""
        steps: StepMetrics = self.ranks.call("steps", start, stop, origin)
        return steps

    def gradient(self, step: int) -> tuple[dict[str, Tensor], StepMetrics]:
        """Return the gradient of the next batch."""
        gradient: tuple[dict[str, Tensor], StepMetrics] = self.ranks.call("gradient", step)
        return gradient
