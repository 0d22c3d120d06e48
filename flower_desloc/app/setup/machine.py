"""The memory, cores and devices of this machine."""

import os
from pathlib import Path

import psutil
import torch

from flower_desloc.app.config import Config
from flower_desloc.core.client_info import ClientInfo

_LIMIT, _USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def default_device() -> torch.device:
    """Return a GPU if there is one, otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_info(device: torch.device) -> ClientInfo:
    """Return what a client says of the device it computes on."""
    total, free = device_memory(device) if device.type in ("cpu", "cuda") else (None, None)
    return ClientInfo(
        device=str(device),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        memory_total=total,
        memory_free=free,
    )


def device_memory(device: torch.device) -> tuple[int, int]:
    """Return the total and the free memory of ``device`` in bytes.

    All devices but CUDA are taken to compute in the machine's memory.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, free
    return memory()


def memory() -> tuple[int, int]:
    """Return the total and the free memory of this process in bytes.

    That of the machine, or less if a container limits it.
    """
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    limit = _number(_LIMIT)
    if limit is not None and limit < total:
        total, free = limit, min(free, limit - (_number(_USED) or 0))
    return total, free


def clients_at_once(config: Config) -> int:
    """Return how many simulated clients train at the same time on this machine."""
    clients = config.simulation
    at_once = max(1, cores() // clients.client_cpus)
    if clients.client_gpus > 0:
        at_once = min(at_once, max(1, int(torch.cuda.device_count() / clients.client_gpus)))
    return min(clients.num_clients, at_once)


def gpu_share(config: Config) -> float:
    """Return the part of a GPU's memory that a client may fill."""
    gpus = config.simulation.client_gpus
    return gpus if 0 < gpus < 1 else 1.0


def cores() -> int:
    """Return the CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # there is no limit, or it is "max"
        return None
