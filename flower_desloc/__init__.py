"""DES-LOC: averaging parameters and optimizer states on clocks of their own.

``DesLoc`` is the Flower strategy; it is imported when first asked for, because the algorithm
itself needs PyTorch alone.
"""

from typing import TYPE_CHECKING, Any

from flower_desloc.averaging import Drift, Mean
from flower_desloc.local import Clipping, StepMetrics, local_steps
from flower_desloc.schedule import NEVER, PARAMS, SyncSchedule, Window
from flower_desloc.streams import prime, put, set_step, stream_names, take

if TYPE_CHECKING:
    from flower_desloc.flower.strategy import DesLoc as DesLoc

__version__ = "0.1.0"

__all__ = [
    "NEVER",
    "PARAMS",
    "Clipping",
    "DesLoc",
    "Drift",
    "Mean",
    "StepMetrics",
    "SyncSchedule",
    "Window",
    "local_steps",
    "prime",
    "put",
    "set_step",
    "stream_names",
    "take",
]


def __getattr__(name: str) -> Any:
    if name == "DesLoc":
        from flower_desloc.flower.strategy import DesLoc

        return DesLoc
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
