"""A client as the server knows it, and who is asked."""

import random
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import get_args

from flwr.app import ConfigRecord

from flower_desloc.core.robust import Average
from flower_desloc.core.streams import starts_at_zero


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Who takes part, and what happens when somebody does not.

    The fields are those of the configuration's section ``federation``.
    """

    min_clients: int = 1
    fraction_train: float = 1.0
    weighting: str = "uniform"
    """Or ``examples``."""
    on_failure: str = "stop"
    """Or ``continue``."""
    timeout: float = 3600.0
    repeats: int = 2
    attendance: Mapping[int, int] = field(default_factory=dict)
    """Step -> how many clients, the first by name, take part from there on; before the first step
    that is named, all."""
    average: Average = "mean"
    """Or ``median`` or ``trimmed_mean``, coordinate by coordinate."""
    trim: int = 1
    """How many replies a trimmed mean cuts on each side."""
    norm_bound: float | None = None
    """Leave out a client whose update is longer than so many times the median of all."""
    seed: int = 0
    """Draws who trains where ``fraction_train`` is below 1."""

    def __post_init__(self) -> None:
        allowed = {
            "weighting": ("uniform", "examples"),
            "on_failure": ("stop", "continue"),
            "average": get_args(Average),
        }
        for name, values in allowed.items():
            if (value := getattr(self, name)) not in values:
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(values)}")
        if not 0 < self.fraction_train <= 1:
            raise ValueError(f"fraction_train={self.fraction_train}: must be above 0, at most 1")
        if self.min_clients < 1 or self.repeats < 0 or not self.timeout > 0:
            raise ValueError("min_clients and timeout must be positive, repeats at least 0")
        if self.average != "mean" and self.weighting != "uniform":
            raise ValueError(f"average={self.average}: its clients have no weights")
        if self.trim < 0 or (self.average == "trimmed_mean" and self.min_clients <= 2 * self.trim):
            raise ValueError(f"trim={self.trim}: min_clients must be at least {2 * self.trim + 1}")
        if self.norm_bound is not None and not self.norm_bound >= 1:
            raise ValueError(f"norm_bound={self.norm_bound}: must be at least 1")
        for step, number in self.attendance.items():
            if step < 0 or number < self.min_clients:
                raise ValueError(
                    f"attendance={dict(self.attendance)}: steps must be at least 0, numbers of "
                    f"clients at least min_clients={self.min_clients}"
                )


@dataclass
class Member:
    """One client."""

    name: str
    """Its own name, which outlives its node id."""
    node_id: int
    about: Mapping[str, str]
    held: dict[str, int] = field(default_factory=dict)
    """Of every stream it holds, the step of the average or reset it descends from."""
    reads_bundles: bool = False

    @classmethod
    def from_hello(cls, node_id: int, hello: ConfigRecord) -> "Member":
        """Read what a client says of itself; raises ``ValueError`` when it says no name."""
        about = dict(hello)
        streams, versions = about.pop("held-streams", []), about.pop("held-versions", [])
        name, reads_bundles = about.pop("client", None), about.pop("bundles", False) is True
        if not isinstance(name, str) or not is_name(name):
            raise ValueError(f"{name!r} is not a name")
        if not isinstance(streams, list) or not isinstance(versions, list):
            raise ValueError("it did not say which streams it holds")
        held = {str(s): v for s, v in zip(streams, versions, strict=True) if isinstance(v, int)}
        told = {printable(k): printable(str(v)) for k, v in about.items()}
        return cls(name, node_id, told, held, reads_bundles)

    def lacks(self, versions: Mapping[str, int], resets: Container[str] = ()) -> list[str]:
        """Return the streams that must be sent to this client, given the ``versions`` of all."""
        return [
            name
            for name, version in versions.items()
            if self.held.get(name) != version
            # Optimizer states are zero before their first average: nothing to send.
            and not (version == 0 and starts_at_zero(name))
            and name not in resets
        ]


def printable(text: str) -> str:
    """Return what a client said as one that writes to terminals may: without control characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def is_name(text: str) -> bool:
    """Return whether ``text`` can name a run or a client; it names files, so not everything can."""
    return re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", text) is not None


def in_order(members: Iterable[Member]) -> list[Member]:
    """Return members by name, client-2 before client-10: the fixed order of summation."""
    return sorted(members, key=lambda member: (_natural(member.name), member.name))


def present(members: list[Member], policy: Policy, step: int) -> list[Member]:
    """Return those of ``members``, in the order given, who take part after ``step`` steps."""
    begun = [begin for begin in policy.attendance if begin <= step]
    return members[: policy.attendance[max(begun)]] if begun else members


def drawn(members: list[Member], policy: Policy, step: int) -> list[Member]:
    """Return those who train in the window that begins at ``step``, in the order given."""
    number = max(policy.min_clients, round(policy.fraction_train * len(members)))
    if number >= len(members):
        return members
    chosen = random.Random(f"{policy.seed}/clients/{step}")  # noqa: S311
    names = set(chosen.sample([member.name for member in members], number))
    return [member for member in members if member.name in names]


def _natural(name: str) -> list[tuple[int, int, str]]:
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]
