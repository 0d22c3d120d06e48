"""What a client says of itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final, get_args


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

    def stated(self) -> dict[str, str | int]:
        """Return what it states of itself but ``data``: ``num_examples`` as "num-examples"."""
        values = {name: getattr(self, name) for name in STATEMENTS}
        return {key_of(name): value for name, value in values.items() if value is not None}


STATEMENTS: Final[Mapping[str, type]] = {
    each.name: get_args(each.type)[0] for each in fields(ClientInfo) if each.name != "data"
}
"""The fields that are a text or a whole number, and which of them."""


OF_DATA: Final = ("num-examples", "data-version")
"""Keys of what the statements tell of a client's data."""


def key_of(name: str) -> str:
    """Return the key of a field in records, messages and files."""
    return name.replace("_", "-")
