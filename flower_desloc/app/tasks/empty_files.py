"""Files without content among those of a source: they are skipped, and named."""

import gzip
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pyarrow.parquet
from pyarrow import ArrowException

from flower_desloc.app.tasks.source import Source

_LARGEST = 1 << 20
"""Bytes of a file that may be without content: a Parquet file has a header of any length."""
_READ = 1 << 16

_log = logging.getLogger(__name__)


def without_empty(source: Source, files: Sequence[Path]) -> list[Path]:
    """Return the files with content; name the others in a warning, once in a process.

    Raises ``ValueError`` if there are files and all are empty.
    """
    is_kept = {file: not is_empty(file) for file in files}
    empty = [str(file) for file in files if not is_kept[file]]
    if empty:
        more = f", and {len(empty) - 5} more" if len(empty) > 5 else ""
        named = ", ".join(empty[:5]) + more
        if len(empty) == len(files):
            raise ValueError(f"{source}: all of its files are empty: {named}")
        _warn_once(f"{source}: empty files are skipped: {named}")
    return [file for file in files if is_kept[file]]


def is_empty(file: Path) -> bool:
    """Return whether a file has no bytes, no rows, or no text; a damaged one is not empty."""
    size = file.stat().st_size
    if not 0 < size <= _LARGEST:
        return size == 0
    suffixes = [suffix.lower() for suffix in file.suffixes]
    try:
        if suffixes[-1:] == [".parquet"]:
            return bool(pyarrow.parquet.read_metadata(file).num_rows == 0)
        zipped = suffixes[-1:] == [".gz"]
        if not {*suffixes[-2:]} & {".txt", ".json", ".jsonl"}:
            return False
        with gzip.open(file) if zipped else file.open("rb") as opened:
            return opened.read(_READ).strip() in (b"", b"[]")
    except (OSError, EOFError, ArrowException):
        return False


@cache
def _warn_once(text: str) -> None:
    _log.warning("%s", text)
