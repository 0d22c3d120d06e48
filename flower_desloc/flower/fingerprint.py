"""Which code runs: simulation may import another copy of the app than the one that was sent."""

import hashlib
from functools import cache
from pathlib import Path


@cache
def fingerprint() -> str:
    """Return a digest of this package's source.

    The apps, which a wheel has in the folder ``app``, are always those that were sent.
    """
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted({*root.rglob("*.py")} - {*root.glob("app/**/*.py")}):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
