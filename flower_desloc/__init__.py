"""DES-LOC for Flower: average parameters and optimizer states on periods of their own.

This module has all that an app of one's own needs; the modules below may be reorganised. Names are
imported when first used: ``DesLoc``, ``Worker`` and ``client_app`` need Flower, the algorithm needs
only PyTorch, and a process that forwards messages (``flower_desloc.app.sites.warm``) needs neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flower_desloc.core.averaging import Drift, Mean
    from flower_desloc.core.client_info import ClientInfo
    from flower_desloc.core.kinds import Kind
    from flower_desloc.core.lr_schedule import constant, cosine, wsd
    from flower_desloc.core.outer import OuterOptimizer
    from flower_desloc.core.schedule import NEVER, PARAMS, RESET, SyncSchedule, Window
    from flower_desloc.core.states import State, kinds_of
    from flower_desloc.core.streams import (
        check_optimizer,
        prime,
        put,
        set_step,
        stream_names,
        take,
    )
    from flower_desloc.core.worker import Clipping, StepMetrics, Worker
    from flower_desloc.flower.arrays import from_record, to_record
    from flower_desloc.flower.baselines.data_parallel import DataParallel
    from flower_desloc.flower.checkpoint import (
        Checkpoint,
        CheckpointError,
        Checkpoints,
        last_checkpoint,
    )
    from flower_desloc.flower.client import DesLocClient, client_app
    from flower_desloc.flower.failures import DivergedError, FederationError
    from flower_desloc.flower.inprocess import InProcessGrid
    from flower_desloc.flower.log_lines import LogLines
    from flower_desloc.flower.observer import Observer, RunInfo, WindowRecord
    from flower_desloc.flower.policy import Policy
    from flower_desloc.flower.rounds import RoundHook
    from flower_desloc.flower.secure.at_server import SecureDesLoc
    from flower_desloc.flower.strategy import DesLoc
    from flower_desloc.optim import ADOPT, SGDM, MultiOptimizer, PaperAdam

__version__ = "0.1.0"

__all__ = [
    "ADOPT",
    "NEVER",
    "PARAMS",
    "RESET",
    "SGDM",
    "Checkpoint",
    "CheckpointError",
    "Checkpoints",
    "ClientInfo",
    "Clipping",
    "DataParallel",
    "DesLoc",
    "DesLocClient",
    "DivergedError",
    "Drift",
    "FederationError",
    "InProcessGrid",
    "Kind",
    "LogLines",
    "Mean",
    "MultiOptimizer",
    "Observer",
    "OuterOptimizer",
    "PaperAdam",
    "Policy",
    "RoundHook",
    "RunInfo",
    "SecureDesLoc",
    "State",
    "StepMetrics",
    "SyncSchedule",
    "Window",
    "WindowRecord",
    "Worker",
    "check_optimizer",
    "client_app",
    "constant",
    "cosine",
    "from_record",
    "kinds_of",
    "last_checkpoint",
    "prime",
    "put",
    "set_step",
    "stream_names",
    "take",
    "to_record",
    "wsd",
]

_HOMES = {
    "core.averaging": ["Drift", "Mean"],
    "core.client_info": ["ClientInfo"],
    "core.lr_schedule": ["constant", "cosine", "wsd"],
    "core.kinds": ["Kind"],
    "core.states": ["State", "kinds_of"],
    "core.worker": ["Clipping", "StepMetrics", "Worker"],
    "core.outer": ["OuterOptimizer"],
    "core.schedule": ["NEVER", "PARAMS", "RESET", "SyncSchedule", "Window"],
    "core.streams": ["check_optimizer", "prime", "put", "set_step", "stream_names", "take"],
    "flower.baselines.data_parallel": ["DataParallel"],
    "flower.checkpoint": ["Checkpoint", "CheckpointError", "Checkpoints", "last_checkpoint"],
    "flower.client": ["DesLocClient", "client_app"],
    "flower.failures": ["DivergedError", "FederationError"],
    "flower.inprocess": ["InProcessGrid"],
    "flower.log_lines": ["LogLines"],
    "flower.observer": ["Observer", "RunInfo", "WindowRecord"],
    "flower.policy": ["Policy"],
    "flower.arrays": ["from_record", "to_record"],
    "flower.rounds": ["RoundHook"],
    "flower.secure.at_server": ["SecureDesLoc"],
    "flower.strategy": ["DesLoc"],
    "optim": ["ADOPT", "SGDM", "MultiOptimizer", "PaperAdam"],
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
