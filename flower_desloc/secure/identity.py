"""Who a site is to the other sites: long-lived keys, exchanged between the organisations.

A folder of the site has ``NAME.key``, its own key, and ``peers``: a line with name and public key
of each site, its own included. The server never has a part in either.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from flower_desloc.core.errors import SiteRefusedError

PEERS = "peers"
LEAST = 3
"""Sites in a sum, unless a site says otherwise: of two, each can subtract its own."""

_LINE = re.compile(r"(\S+)\s+([0-9a-f]{64})")


@dataclass(frozen=True)
class Identity:
    """A site's name and key, and the public keys of all sites."""

    name: str
    key: Ed25519PrivateKey
    peers: Mapping[str, bytes]
    least: int = LEAST
    """The fewest sites in a sum that this one takes part in."""

    def __post_init__(self) -> None:
        if self.least < 2:
            raise ValueError(f"secure-min={self.least}: a sum of one site is that site's own")
        if self.peers.get(self.name) != self.key.public_key().public_bytes_raw():
            raise ValueError(
                f"the key of {self.name!r} is not the one that the peers' file names; add the line "
                "that its command printed"
            )

    @classmethod
    def read(cls, folder: Path, name: str, least: int = LEAST) -> "Identity":
        """Read the identity of a site; raises ``SiteRefusedError`` for a bad file."""
        try:
            key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(_key(folder, name)))
            peers = _peers((folder / PEERS).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SiteRefusedError(
                "secure-keys in the node config: the folder has no key of this site, or its peers "
                f"cannot be read; `python -m flower_desloc.secure FOLDER {name}` makes the key, "
                f"and FOLDER/{PEERS} has a line of each site",
                f"{folder}: {error}",
            ) from error
        return cls(name, key, peers, least)

    def sign(self, what: bytes) -> bytes:
        """Return this site's signature, 64 bytes."""
        return self.key.sign(what)

    def require_signed(self, name: str, signature: bytes, what: bytes) -> None:
        """Raise ``ValueError`` unless the site of that name, which must be known, signed this."""
        if name not in self.peers:
            raise ValueError(
                f"{name!r} is not among the peers of {self.name!r}, which adds only to the sites "
                "that its peers' file names"
            )
        if not self.has_signed(name, signature, what):
            raise ValueError(
                f"what the server passes on as signed by {name!r} is not: it was changed on the "
                "way, or belongs to another window"
            )

    def has_signed(self, name: str, signature: bytes, what: bytes) -> bool:
        """Return whether the site of that name is known, and signed this."""
        if name not in self.peers:
            return False
        try:
            Ed25519PublicKey.from_public_bytes(self.peers[name]).verify(signature, what)
        except InvalidSignature:
            return False
        return True


def create(folder: Path, name: str) -> str:
    """Return the line of a site in the peers' files; its key is made at the first call."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.key"
    if not path.exists():
        temporary = path.with_suffix(".partial")
        temporary.unlink(missing_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w", encoding="utf-8") as file:  # noqa: PTH123  # of a handle
            file.write(Ed25519PrivateKey.generate().private_bytes_raw().hex())
        temporary.rename(path)
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(_key(folder, name)))
    return f"{name} {key.public_key().public_bytes_raw().hex()}"


def introduce(folder: Path, names: Iterable[str]) -> None:
    """Make the keys and the peers' file of sites that share a folder: those of a simulation."""
    lines = [create(folder, name) for name in names]
    (folder / PEERS).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _key(folder: Path, name: str) -> str:
    return (folder / f"{name}.key").read_text(encoding="utf-8").strip()


def _peers(text: str) -> dict[str, bytes]:
    peers: dict[str, bytes] = {}
    for line in text.splitlines():
        stated = line.partition("#")[0].strip()
        if not stated:
            continue
        if (found := _LINE.fullmatch(stated)) is None:
            raise ValueError(f"{PEERS} has the line {line!r}, expected NAME and 64 hex digits")
        name, key = found[1], bytes.fromhex(found[2])
        if name in peers or key in peers.values():
            raise ValueError(f"{PEERS} has {name!r} or its key twice")
        peers[name] = key
    return peers
