"""Records that fail."""

import errno
from dataclasses import dataclass
from traceback import format_exception

import torch

_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "std::bad_alloc",
    "ALLOC_FAILED",
)
"""Texts of PyTorch's errors on CPUs and GPUs, and those of the libraries it calls."""


@dataclass
class Failures:
    """How many records failed, and of the first what the site's log gets.

    Errors are not kept: their tracebacks hold all that was computed of a record.
    """

    number: int = 0
    text: str = ""
    traceback: str = ""

    def add(self, error: Exception) -> None:
        """Count a record that failed with an error."""
        self.number += 1
        if self.number == 1:
            self.text = _text(error)
            self.traceback = "".join(format_exception(error))


def is_of_memory(error: Exception) -> bool:
    """Return whether memory was too small, which is no fault of a record."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if error.__cause__ is not None:  # an exit or a panic, which may quote a record
        return False
    # As errors of other types, and a task's own, may.
    is_of_pytorch = type(error).__module__.partition(".")[0] in ("builtins", "torch")
    if not (isinstance(error, RuntimeError) and is_of_pytorch):
        return False
    return any(text in _text(error) for text in _OF_MEMORY)


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception:
        return type(error).__name__
