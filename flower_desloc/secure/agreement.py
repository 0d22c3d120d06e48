"""What the sites of one sum agree on: what is added, and with which keys."""

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Final

KEY: Final = 32
"""Bytes of a public or private key, of a seed, of a commitment, of a history and of a share."""
NEW: Final = bytes(KEY)
"""The history of a site that begins from the averages alone."""
WIDE, NARROW, SHORT = 8, 6, 4
"""Bytes of the codes of second moments, of all others, and of parameters; no width is another."""
LARGEST_SCALE: Final = 1000

_STATED = re.compile(r"(?:0|[1-9][0-9]{0,17}) [0-9a-f]+ [0-9][0-9.e+-]*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class SumTerms:
    """What a sum is of. The server states it, and every signature and key is bound to it."""

    run: str
    attempt: str
    """Random: names this try to add up the window."""
    start: int
    stop: int
    """The window's local steps."""
    threshold: int
    """The fewest sites that a sum may have, and that can remove a mask."""
    shapes: Mapping[str, str]
    """By due stream the digest of its tensors' names and shapes (``shapes_digest``)."""
    scales: Mapping[str, int]
    """By due stream the binary digits after the point of its codes (``codes``)."""
    widths: Mapping[str, int]
    """By due stream the bytes of each code."""
    most: int
    """The sites whose sum the codes have room for."""
    averages: Mapping[str, str]
    """By stream that has an average its version, digest and greatest value (``stated``), which all
    sites begin from: with another model the others' parts could be made known, and one site's with
    them (Pasquini et al. 2022, arXiv:2111.07380)."""
    fresh: bool
    """Whether all sites leave their own states, and begin from the averages alone: for sites that
    have taken other windows than the others (``Keys.history``)."""
    request: str
    """Digest of all other settings of the request for the window: were the others' different, their
    parts could be made known."""

    def to_json(self) -> str:
        """Return what ``of_json`` reads, the same text for the same content."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def of_json(cls, text: str) -> "SumTerms":
        """Read what the server sent; raises ``ValueError`` for anything else."""
        try:
            terms = cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise ValueError(f"not the terms of a sum: {error}") from error
        if not terms._is_sound() or terms.to_json() != text:
            raise ValueError("not the terms of a sum")
        return terms

    def _is_sound(self) -> bool:
        """Return whether all values have the types and ranges of one: JSON may hold any."""
        texts, numbers = (self.shapes, self.averages), (self.scales, self.widths)
        integers = self.start, self.stop, self.threshold, self.most
        return (
            all(type(value) is str for value in (self.run, self.attempt, self.request))
            and all(type(value) is int for value in integers)
            and type(self.fresh) is bool
            and all(type(each) is dict for each in (*texts, *numbers))
            and all(type(value) is str for each in texts for value in each.values())
            and all(type(value) is int for each in numbers for value in each.values())
            and 0 <= self.start < self.stop
            and min(self.threshold, self.most) >= 2
            and {*self.shapes} == {*self.scales} == {*self.widths} != set()
            and all(abs(scale) <= LARGEST_SCALE for scale in self.scales.values())
            and all(width in (WIDE, NARROW, SHORT) for width in self.widths.values())
            and all(self._is_average(average) for average in self.averages.values())
        )

    def _is_average(self, stated: str) -> bool:
        return _STATED.fullmatch(stated) is not None and version_of(stated) <= self.start

    @property
    def digest(self) -> bytes:
        """Its 32 bytes, for signatures."""
        return hashed("terms", self.to_json().encode())

    @property
    def steps(self) -> bytes:
        """A digest of what a site's local steps follow from, besides its data and its state."""
        values = self.run, self.start, self.stop, dict(self.averages), self.request
        return hashed("steps", json.dumps(values, sort_keys=True).encode())

    @property
    def versions(self) -> dict[str, int]:
        """By stream that has an average, its version."""
        return {name: version_of(average) for name, average in self.averages.items()}

    @property
    def window(self) -> str:
        """The window in words."""
        return f"steps {self.start + 1} to {self.stop}"


@dataclass(frozen=True)
class Keys:
    """A site's keys for one sum, which nobody uses again."""

    mask: bytes
    """The public key from which its masks with the other sites follow."""
    channel: bytes
    """The public key under which the others encrypt shares for it."""
    commitment: bytes
    """The hash of the seed of its own mask: what shares are joined to must have it."""
    history: bytes
    """Digest of the windows that its state is from, since the averages. All sites must have the
    same: were a window of one site in the sum and of no other, the rest could be made known."""
    signature: bytes
    """By the site's long-lived key, over ``signed``."""

    def to_bytes(self) -> bytes:
        """Return 192 bytes."""
        return self.mask + self.channel + self.commitment + self.history + self.signature

    @classmethod
    def of(cls, data: bytes) -> "Keys":
        """Read ``to_bytes``; raises ``ValueError`` for another length."""
        if len(data) != 6 * KEY:
            raise ValueError(f"the keys of a site have {6 * KEY} bytes, not {len(data)}")
        starts = range(0, 4 * KEY, KEY)
        mask, channel, commitment, history = (data[at : at + KEY] for at in starts)
        return cls(mask, channel, commitment, history, data[4 * KEY :])

    def signed(self, terms: SumTerms, name: str) -> bytes:
        """Return what the signature is of."""
        parts = self.mask, self.channel, self.commitment, self.history
        return hashed("keys", terms.digest, name.encode(), *parts)


def session_of(terms: SumTerms, keys: Mapping[str, Keys]) -> bytes:
    """Return what names a sum: a digest of all its sites' keys, of which each site's are new."""
    parts = [part for name in sorted(keys) for part in (name.encode(), keys[name].to_bytes())]
    return hashed("session", terms.digest, *parts)


def to_confirm(session: bytes, sharing: Collection[str], survivors: Collection[str]) -> bytes:
    """Return what every site of the sum signs before a mask is removed: who is in it."""
    lists = [
        hashed("list", *(name.encode() for name in sorted(names))) for names in (sharing, survivors)
    ]
    return hashed("confirm", session, *lists)


def least_threshold(number: int) -> int:
    """Return the least threshold for so many sites: more than two thirds.

    So no two lists of survivors have enough signatures, and no site's two masks are both removed,
    unless a third of them side with the server (Bonawitz et al., section 6.2), which chooses them.

    >>> [least_threshold(number) for number in (3, 4, 7, 10, 20)]
    [3, 3, 5, 7, 14]
    """
    return 2 * number // 3 + 1


def shapes_digest(shapes: Mapping[str, Iterable[int]]) -> str:
    """Return a digest of tensors' names and shapes."""
    text = json.dumps({name: list(shape) for name, shape in shapes.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def stated(version: int, digest: str, largest: float = 0.0) -> str:
    """Return how an average is named, with the magnitude of its greatest value.

    >>> stated(16, "0f", 0.5)
    '16 0f 0.5'
    """
    return f"{version} {digest} {largest!r}"


def version_of(average: str) -> int:
    """Return the version of an average that is ``stated``."""
    return int(average.split()[0])


def digest_in(average: str) -> str:
    """Return the digest of an average that is ``stated``; empty if there is none."""
    return average.split()[1] if average else ""


def largest_in(average: str) -> float:
    """Return the magnitude of the greatest value of an average that is ``stated``."""
    return float(average.split()[2])


def bits_of(number: int) -> int:
    """Return how many binary digits a sum of so many numbers has more than one of them."""
    return math.ceil(math.log2(number))


def hashed(what: str, *parts: bytes) -> bytes:
    """Return 32 bytes that no other parts have; ``what`` keeps uses apart."""
    digest = hashlib.sha256(b"flower-desloc secure sum\0" + what.encode() + b"\0")
    for part in parts:
        digest.update(len(part).to_bytes(8) + part)
    return digest.digest()
