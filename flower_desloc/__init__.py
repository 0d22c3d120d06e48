"""DES-LOC: averaging parameters and optimizer states on clocks of their own.

Every name is imported when first asked for: ``DesLoc`` is the Flower strategy, and the algorithm
itself needs PyTorch alone; a process that only forwards messages
(:mod:`flower_desloc.sites.warm`) needs neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flower_desloc.core.averaging import Drift, Mean
    from flower_desloc.core.local_steps import Clipping, StepMetrics, local_steps
    from flower_desloc.core.schedule import NEVER, PARAMS, SyncSchedule, Window
    from flower_desloc.core.streams import prime, put, set_step, stream_names, take
    from flower_desloc.flower.strategy import DesLoc

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

_HOMES = {
    "core.averaging": ["Drift", "Mean"],
    "flower.strategy": ["DesLoc"],
    "core.local_steps": ["Clipping", "StepMetrics", "local_steps"],
    "core.schedule": ["NEVER", "PARAMS", "SyncSchedule", "Window"],
    "core.streams": ["prime", "put", "set_step", "stream_names", "take"],
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
