"""A client as the server knows it, and which clients take part in a window."""

import random
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import ConfigRecord

from flower_desloc.core.streams import starts_at_zero
from flower_desloc.flower.policy import Policy


@dataclass
class Member:
    """One client."""

    name: str
    """Its own name; unlike its node id it stays the same over restarts."""
    node_id: int
    about: Mapping[str, str]
    held: dict[str, int] = field(default_factory=dict)
    """Version of every stream the client holds: the step of the average or reset it is from."""
    reads_bundles: bool = False

    @classmethod
    def from_hello(cls, node_id: int, hello: ConfigRecord) -> "Member":
        """Read a client's reply to the greeting; raises ``ValueError`` for a malformed one."""
        about = dict(hello)
        streams, versions = about.pop("held-streams", []), about.pop("held-versions", [])
        name, reads_bundles = about.pop("client", None), about.pop("bundles", False) is True
        if not isinstance(name, str) or not is_name(name):
            raise ValueError(f"{name!r} is not a valid client name")
        if not isinstance(streams, list) or not isinstance(versions, list):
            raise ValueError("held-streams and held-versions must be lists")
        held = {str(s): v for s, v in zip(streams, versions, strict=True) if isinstance(v, int)}
        texts = {printable(key): printable(str(value)) for key, value in about.items()}
        return cls(name, node_id, texts, held, reads_bundles)

    def lacks(self, versions: Mapping[str, int], resets: Container[str] = ()) -> list[str]:
        """Return the streams to send to this client, given everyone's current ``versions``."""
        return [
            name
            for name, version in versions.items()
            if self.held.get(name) != version
            # Optimizer states are zero before their first average: nothing to send.
            and not (version == 0 and starts_at_zero(name))
            and name not in resets
        ]


def printable(text: str) -> str:
    """Replace control characters, so that a client's text cannot act on a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def is_name(text: str) -> bool:
    """Return whether ``text`` may name a run or a client; both name files."""
    return re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", text) is not None


def in_order(members: Iterable[Member]) -> list[Member]:
    """Return members by name, client-2 before client-10: the fixed order of summation."""
    return sorted(members, key=lambda member: (_natural(member.name), member.name))


def present(members: list[Member], policy: Policy, step: int) -> list[Member]:
    """Return the members that take part after ``step`` steps, by ``policy.attendance``."""
    begun = [begin for begin in policy.attendance if begin <= step]
    return members[: policy.attendance[max(begun)]] if begun else members


def drawn(members: list[Member], policy: Policy, step: int, seed: int) -> list[Member]:
    """Return the members that train in the window that starts at ``step``, in the given order."""
    number = max(policy.min_clients, round(policy.fraction_train * len(members)))
    if number >= len(members):
        return members
    chosen = random.Random(f"{seed}/clients/{step}")  # noqa: S311
    names = set(chosen.sample([member.name for member in members], number))
    return [member for member in members if member.name in names]


def _natural(name: str) -> list[tuple[int, int, str]]:
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]
