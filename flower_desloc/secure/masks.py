"""Keys that two sites share, and the masks that follow from keys."""

from collections.abc import Iterable, Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from flower_desloc.secure.agreement import KEY, Keys, hashed
from flower_desloc.secure.codes import Codes

_BLOCK = 1 << 17
"""Values of a mask that are in memory, and in the cache, at once."""


def public_of(private: bytes) -> bytes:
    """Return the public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def shared_key(private: bytes, public: bytes, *purpose: bytes) -> bytes:
    """Return the key that the owners of two key pairs share, for one use.

    Raises ``ValueError`` for a public key that gives every owner the same.
    """
    secret = X25519PrivateKey.from_private_bytes(private).exchange(
        X25519PublicKey.from_public_bytes(public)
    )
    return derived(secret, *purpose)


def require_keys(name: str, keys: Keys) -> None:
    """Raise ``ValueError`` for keys of a site with which all others would share the same."""
    for public in (keys.mask, keys.channel):
        try:
            shared_key(bytes(KEY), public)
        except ValueError:
            raise ValueError(f"{name!r} has sent keys that are no secret") from None


def derived(secret: bytes, *purpose: bytes) -> bytes:
    """Return a key for one use of a secret."""
    return HKDF(SHA256(), KEY, salt=None, info=hashed("use", *purpose)).derive(secret)


def pair_key(private: bytes, public: bytes, session: bytes, one: str, other: str) -> bytes:
    """Return the key of the mask of two sites, the same for both."""
    names = (name.encode() for name in sorted((one, other)))
    return shared_key(private, public, b"mask", session, *names)


def seed_key(seed: bytes, session: bytes) -> bytes:
    """Return the key of a site's own mask."""
    return derived(seed, b"seed", session)


def sign(one: str, other: str) -> int:
    """Return with which sign a site adds the mask that it shares with another."""
    return 1 if one < other else -1


def add_masks(arrays: Iterable[Codes], keys: Sequence[tuple[bytes, int]]) -> None:
    """Add the mask of each key, times its sign, to arrays in one dimension, in place.

    The arrays are one after the other in the key's stream: it must always be the same arrays, in
    the same order. One that is made when it is asked for has its masks when the next one is.
    AES-256 in counter mode from zero: no key has a second use.
    """
    streams = [(Cipher(AES(key), CTR(bytes(16))).encryptor(), sign) for key, sign in keys]
    zeros, buffer = bytes(8 * _BLOCK), bytearray(8 * _BLOCK + 15)
    for array in arrays:
        values = array.view(np.uint64)  # their sums are modulo 2^64
        for start in range(0, len(values), _BLOCK):
            part = values[start : start + _BLOCK]
            for stream, sign_ in streams:
                stream.update_into(memoryview(zeros)[: part.nbytes], buffer)
                mask = np.frombuffer(buffer, np.uint64, len(part))
                (np.add if sign_ > 0 else np.subtract)(part, mask, out=part)
