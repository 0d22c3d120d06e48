"""Errors of Hugging Face's caches, which its libraries report as errors of what they read."""

import errno
from collections.abc import Iterator
from pathlib import Path

import datasets
from huggingface_hub import constants

from flower_desloc.app.config.errors import one_line

_CANNOT_WRITE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}

_FOLDERS = {
    "HF_DATASETS_CACHE": datasets.config.HF_DATASETS_CACHE,
    "HF_HUB_CACHE": constants.HF_HUB_CACHE,
}


def cache_error(error: Exception, otherwise: ValueError) -> Exception:
    """Return the error to raise: ``otherwise``, unless a cache that is not writable caused it."""
    for each in causes(error):
        if not isinstance(each, OSError) or each.errno not in _CANNOT_WRITE:
            continue
        for variable, folder in _FOLDERS.items():
            cache, file = Path(folder), Path(each.filename or folder)
            if cache.is_relative_to(file) or file.is_relative_to(cache):
                return OSError(
                    f"cannot write to the cache {cache} ({one_line(each)}); free disk space, or "
                    f"set the environment variable {variable} to a folder that is writable"
                )
    return otherwise


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes: libraries wrap the original error."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
