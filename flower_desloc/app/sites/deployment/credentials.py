"""SuperNode keys and SuperLink certificates for a federation on one machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)


def make_key(path: Path) -> Path:
    """Write a new SuperNode private key to ``path`` and its public key to ``path``.pub.

    Return the public key's path. The same as ``ssh-keygen -t ecdsa -b 384 -N "" -f path``.
    """
    key = generate_private_key(SECP384R1())
    _write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public = path.with_name(f"{path.name}.pub")
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    return public


@dataclass(frozen=True)
class Certificates:
    """The files with which a SuperLink serves TLS, in PEM format."""

    ca: Path
    """The authority's certificate: every SuperNode and every `flwr` command needs it."""
    certificate: Path
    key: Path


def make_certificates(folder: Path, hosts: Sequence[str]) -> Certificates:
    """Write the certificates of a server that is reached as ``hosts``, names or addresses.

    The authority signs only this certificate: its key is not written anywhere.
    """
    authority = trustme.CA()
    server = authority.issue_cert(*hosts)
    made = Certificates(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    authority.cert_pem.write_to_path(made.ca)
    server.cert_chain_pems[0].write_to_path(made.certificate)
    _write_private(made.key, server.private_key_pem.bytes())
    return made


def _write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, from the moment it exists."""
    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(data)
