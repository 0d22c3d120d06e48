"""What every tracker does, and what it is given."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PROJECT: Final = "flower-desloc"
"""Project or experiment of runs for which the tracker's own variable names none."""
TOO_SLOW: Final = 3
"""Exit status of a tracker's process that has not taken everything within the ``time_limit``."""
_PATIENCE = 120.0  # seconds
_UPLOAD = 1e6  # bytes in a second


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended."""

    completed: bool
    summary: Mapping[str, Any]
    """``summary.json``; empty if the run was killed."""
    step: int
    """The last step."""
    picture: Path | None
    """``overview.png``, if it was drawn."""
    model: Path | None
    """Folder of the final model; None unless ``run.track_model`` asks for it."""


class Tracker(ABC):
    """A run at a tracker; its constructor begins it, or continues the one called ``run_id``.

    Where it goes, and as whom, is said by the tracker's own environment variables. Runs in a
    process of its own: it may block, print, raise and exit.

    Args:
        run_id: The ``id`` that an earlier object for the same run had; None for a new run.
        name: Name of the run's folder.
        config: The settings, by dotted key.

    """

    id: str
    """Identifies the run at the tracker."""

    @abstractmethod
    def __init__(self, run_id: str | None, name: str, config: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def log(self, values: Mapping[int, Mapping[str, float]]) -> None:
        """Send the values of a window, by ascending step and name; none is NaN or infinite."""

    @abstractmethod
    def finish(self, ending: Ending) -> None:
        """Send how the run ended, and wait until everything was sent."""


def time_limit(model: Path | None) -> float:
    """Return the seconds after the end of a run in which a tracker must have taken everything.

    Two minutes, and those for the folder of the final model, if it is sent, at 1 MB/s.
    """
    files = model.rglob("*") if model is not None else ()
    sizes = (path.stat().st_size for path in files if path.is_file())
    return _PATIENCE + sum(sizes) / _UPLOAD
