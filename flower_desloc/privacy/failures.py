"""Records that fail."""

from dataclasses import dataclass
from traceback import format_exception

import torch


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
    return "can't allocate memory" in _text(error)  # PyTorch's, on a CPU


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception:
        return type(error).__name__
