"""What a client says of itself, as it is written into the reply to a greeting and read from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from flwr.app import ConfigRecord

from flower_desloc.core.client_info import OF_DATA, STATEMENTS, ClientInfo, key_of
from flower_desloc.core.types import MOST
from flower_desloc.flower.failures import printable
from flower_desloc.flower.messages import is_name
from flower_desloc.flower.model_names import ModelNames

_DATA = "data/"  # prefix of the sizes of a client's domains or labels
_MAX_DESCRIBED = 1000  # domains or labels of one client; a server refuses many more


@dataclass(frozen=True)
class Greeting:
    """A client's reply to the greeting: what it says of itself, and the averages that it has."""

    name: str
    """Unlike its node id it stays the same over restarts."""
    info: ClientInfo
    versions: Mapping[str, int]
    """Of every stream that the client has, the step of the average or reset it is from."""
    model: ModelNames | None
    """Names of its model's tensors, if it states them."""

    def to_config(self) -> ConfigRecord:
        """Return what ``from_config`` reads."""
        record = ConfigRecord({**to_config(self.info), "client": self.name})
        record["streams"], record["versions"] = [*self.versions], [*self.versions.values()]
        record.update(self.model.to_config() if self.model else {})
        return record

    @classmethod
    def from_config(cls, record: ConfigRecord) -> Self:
        """Read what ``to_config`` wrote; raises ``ValueError`` for a malformed record."""
        streams, versions = record.get("streams", []), record.get("versions", [])
        name = record.get("client")
        if not isinstance(name, str) or not is_name(name):
            raise ValueError(f"{name!r} is not a valid client name")
        if not isinstance(streams, list) or not isinstance(versions, list):
            raise ValueError("streams and versions must be lists")
        known = {str(s): v for s, v in zip(streams, versions, strict=True) if isinstance(v, int)}
        return cls(name, from_config(record), known, ModelNames.from_config(record))


def to_config(info: ClientInfo) -> dict[str, str | int]:
    """Return what ``from_config`` reads: all that is stated, the smallest of the data together."""
    sizes = {f"{_DATA}{name}": int(size) for name, size in _described(info.data).items()}
    return {**info.stated(), **sizes}


def from_config(hello: ConfigRecord) -> ClientInfo:
    """Read what ``to_config`` wrote; what has another type or range counts as not stated.

    Lengths and numbers of texts are those that ``replies.Limits`` allows, as for every reply.
    """
    texts = {key: printable(value) for key, value in hello.items() if isinstance(value, str)}
    numbers = {
        printable(key): value
        for key, value in hello.items()
        if type(value) is int and 0 <= value < MOST
    }
    stated: dict[str, Any] = {
        name: (texts if kind is str else numbers).get(key_of(name))
        for name, kind in STATEMENTS.items()
    }
    sizes = {k.removeprefix(_DATA): size for k, size in numbers.items() if k.startswith(_DATA)}
    return ClientInfo(**stated, data=sizes)


def without_data(hello: ConfigRecord) -> ConfigRecord:
    """Return a reply to a greeting that says nothing of the client's data."""
    return ConfigRecord(
        {k: v for k, v in hello.items() if k not in OF_DATA and not k.startswith(_DATA)}
    )


def _described(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the largest ``sizes``, and the sum of the others."""
    largest = {*sorted(sizes, key=sizes.__getitem__, reverse=True)[:_MAX_DESCRIBED]}
    described = {name: size for name, size in sizes.items() if name in largest}
    if rest := sizes.keys() - largest:
        described[f"({len(rest)} others)"] = sum(sizes[name] for name in rest)
    return described
