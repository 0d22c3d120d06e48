"""Number of processes of a client, from the node config."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from flower_desloc.app.sites.supervisor import can_watch
from flower_desloc.core.errors import SiteRefusedError

NodeConfig = Mapping[str, str | int | float | bool]
_MODES = ("ddp", "fsdp")


@dataclass(frozen=True)
class Parallelism:
    """The number of processes of a client, and whether they hold replicas or shards."""

    processes: int
    mode: str

    @classmethod
    def of(cls, node_config: NodeConfig) -> "Parallelism":
        """Read a node config; raises ``SiteRefusedError`` for invalid values."""
        processes, mode = node_config.get("processes", 1), node_config.get("parallel", _MODES[0])
        if type(processes) is not int or processes < 1:
            raise SiteRefusedError(f"processes={processes!r} in the node config: must be 1 or more")
        if processes > 1 and sys.platform != "linux":
            raise SiteRefusedError(
                f"processes={processes} in the node config: more than 1 needs Linux"
            )
        if processes > 1 and not can_watch():
            raise SiteRefusedError(
                f"processes={processes} in the node config: more than 1 needs os.pidfd_open, which "
                "does not work with this Python on this system"
            )
        if mode not in _MODES:
            raise SiteRefusedError(
                f"parallel={mode!r} in the node config: must be one of {', '.join(_MODES)}"
            )
        return cls(processes, str(mode))

    @property
    def sharded(self) -> bool:
        """True if each process holds a shard of the model."""
        return self.mode == "fsdp"
