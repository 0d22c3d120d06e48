"""DES-LOC for Flower: average parameters and optimizer states on periods of their own.

Names are imported when first used: ``DesLoc``, ``Worker`` and ``client_app`` need Flower, the
algorithm needs only PyTorch, and a process that forwards messages
(:mod:`flower_desloc.sites.warm`) needs neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flower_desloc.core.averaging import Drift, Mean
    from flower_desloc.core.local_steps import Clipping, StepMetrics, local_steps
    from flower_desloc.core.schedule import NEVER, PARAMS, SyncSchedule, Window
    from flower_desloc.core.streams import prime, put, set_step, stream_names, take
    from flower_desloc.flower.client import client_app
    from flower_desloc.flower.records import from_record, to_record
    from flower_desloc.flower.strategy import DesLoc
    from flower_desloc.flower.worker import Worker

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
    "Worker",
    "client_app",
    "from_record",
    "local_steps",
    "prime",
    "put",
    "set_step",
    "stream_names",
    "take",
    "to_record",
]

_HOMES = {
    "core.averaging": ["Drift", "Mean"],
    "core.local_steps": ["Clipping", "StepMetrics", "local_steps"],
    "core.schedule": ["NEVER", "PARAMS", "SyncSchedule", "Window"],
    "core.streams": ["prime", "put", "set_step", "stream_names", "take"],
    "flower.client": ["client_app"],
    "flower.records": ["from_record", "to_record"],
    "flower.strategy": ["DesLoc"],
    "flower.worker": ["Worker"],
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
