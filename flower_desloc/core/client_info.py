"""What a client says of itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ClientInfo:
    """What a client says of itself; None: it does not say."""

    device: str | None = None
    """Where it computes, such as ``cuda:0``."""
    device_name: str | None = None
    """Of a GPU, the name of its model."""
    memory_total: int | None = None
    """Bytes of memory of the device."""
    memory_free: int | None = None
    """Those that were free when the client was asked."""
    micro_batch: int | None = None
    """How many examples it computes on at once."""
    data: Mapping[str, int] = field(default_factory=dict)
    """Size of its data by domain or label."""
    num_examples: int | None = None
    """Taken from its ``Worker``, as is ``data_version``."""
    data_version: str | None = None
    """A text that changes when its data does."""
