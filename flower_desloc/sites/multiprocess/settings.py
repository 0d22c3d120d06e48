"""What a site says of its group, and where that cannot be."""

from collections.abc import Mapping
from dataclasses import dataclass

Node = Mapping[str, str | int | float | bool]
"""A node config."""
PROCESSES = "processes"  # in the node config, as the next
PARALLEL = "parallel"
_PARALLEL = ("ddp", "fsdp")


@dataclass(frozen=True)
class Setting:
    """How many processes a client has, and how the model lies in them."""

    processes: int
    parallel: str

    @classmethod
    def of(cls, node: Node) -> "Setting":
        """Read a node config; raises ``ValueError`` for what is no setting."""
        processes, parallel = node.get(PROCESSES, 1), node.get(PARALLEL, _PARALLEL[0])
        if type(processes) is not int or processes < 1:
            raise ValueError(f"{PROCESSES}={processes!r} in the node config: must be 1 or more")
        if parallel not in _PARALLEL:
            raise ValueError(
                f"{PARALLEL}={parallel!r} in the node config: must be one of {', '.join(_PARALLEL)}"
            )
        return cls(processes, str(parallel))

    @property
    def sharded(self) -> bool:
        """Whether each process holds a share of the model, not all of it."""
        return self.parallel == "fsdp"
