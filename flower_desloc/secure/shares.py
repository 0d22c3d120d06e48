"""Shamir's shares of a secret: ``threshold`` of them give it back, and fewer say nothing of it."""

from collections.abc import Mapping

from Crypto.Protocol.SecretSharing import Shamir

from flower_desloc.secure.agreement import KEY

_HALF = KEY // 2  # PyCryptodome shares 16 bytes at a time


def split(secret: bytes, threshold: int, number: int) -> list[bytes]:
    """Return ``number`` shares of 32 bytes; their places are their indices."""
    halves = [
        [share for _, share in Shamir.split(threshold, number, secret[at : at + _HALF], ssss=False)]
        for at in (0, _HALF)
    ]
    return [first + second for first, second in zip(*halves, strict=True)]


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Return the secret from shares by their places; only the first ``threshold`` are used.

    False shares give another secret: the caller must know what it has to be.
    """
    chosen = sorted(shares.items())[:threshold]
    assert len(chosen) == threshold, "too few shares"
    return b"".join(
        Shamir.combine([(place + 1, share[at : at + _HALF]) for place, share in chosen], ssss=False)
        for at in (0, _HALF)
    )
