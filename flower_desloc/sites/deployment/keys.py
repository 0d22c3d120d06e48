"""A SuperNode's key pair, as `flwr supernode register` and `flower-supernode` want it."""

import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP384R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)


def make_key(path: Path) -> Path:
    """Write a new private key to ``path``; return the file of its public half, ``path``.pub.

    The same as ``ssh-keygen -t ecdsa -b 384 -N "" -f path``.
    """
    key = generate_private_key(SECP384R1())
    write_private(path, key, PrivateFormat.OpenSSH)
    public = path.with_name(f"{path.name}.pub")
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    return public


def write_private(path: Path, key: EllipticCurvePrivateKey, kind: PrivateFormat) -> None:
    """Write a private key that nobody else may read, not even for a moment."""
    text = key.private_bytes(Encoding.PEM, kind, NoEncryption())
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(text)
