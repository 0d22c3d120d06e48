"""Whether a run fits, before it starts."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flower_desloc.config import Config
from flower_desloc.config.schema import AUTO
from flower_desloc.flower.observer import MEMORY_TOTAL, MICRO_BATCH
from flower_desloc.runs.units import bytes_text
from flower_desloc.setup.preflight.machine import clients_at_once, device_memory, memory
from flower_desloc.setup.preflight.needs import Needs, micro_batch_size

MARGIN = 1.5
"""An estimate must be so many times what there is for a run to be stopped: it may be wrong."""
WAY_PAST = "run.preflight=warn goes on all the same"

_SMALLER = "set data.micro_batch_size=auto or less, or a smaller model"


@dataclass(frozen=True)
class Finding:
    """Something to be said before a run."""

    what: str
    stops: bool = False
    """Whether it cannot be that the run fits."""
    estimated: bool = True
    """Whether that may be wrong all the same."""


@dataclass(frozen=True)
class Place:
    """Where simulated clients compute."""

    device: torch.device
    at_once: int
    micro_batch: int

    @classmethod
    def of(cls, config: Config, *, in_process: bool, workers: int | None) -> "Place":
        """Return where they do on this machine, by the settings.

        Where a GPU is asked for and there is none, it is one of unknown memory.
        """
        gpu = torch.cuda.is_available() if in_process else config.federation.client_gpus > 0
        device = torch.device("cuda" if gpu else "cpu")
        at_once = 1 if in_process else workers or clients_at_once(config)
        if gpu and not torch.cuda.is_available():
            size = config.data.micro_batch_size
            return cls(device, at_once, 1 if size == AUTO else int(size or config.data.batch_size))
        return cls(device, at_once, micro_batch_size(config, device))

    @property
    def exists(self) -> bool:
        """Whether this machine has that device."""
        return self.device.type == "cpu" or torch.cuda.is_available()


def on_this_machine(needs: Needs, place: Place, folder: Path) -> Iterator[Finding]:
    """Yield what speaks against simulating the run here, with its files in ``folder``."""
    config = needs.config
    gpus = config.federation.client_gpus
    if not place.exists:
        yield Finding(
            f"federation.client_gpus={gpus:g}, and this machine has no GPU that PyTorch can use; "
            "set federation.client_gpus=0 to train on the CPU",
            stops=True,
            estimated=False,
        )
    elif place.device.type == "cpu" and torch.cuda.is_available():
        yield Finding(
            "this machine has a GPU that no client gets; set federation.client_gpus=1, or a share"
        )
    try:
        if place.exists and place.device.type != "cpu":
            share = gpus if 0 < gpus < 1 else 1.0
            wanted = sum(needs.client(place.device, place.micro_batch).values()) / share
            total, free = device_memory(place.device)
            yield from _memory("clients on one GPU", wanted, total, _SMALLER, free=free)
        wanted = needs.machine(place.device, place.micro_batch, place.at_once)
    except ValueError as error:
        yield Finding(f"what a step takes cannot be known before it is taken: {error}")
    else:
        total, free = memory()
        fewer = f"{_SMALLER}, or fewer clients at once (--workers 1)"
        clients = "a client" if place.at_once == 1 else f"{place.at_once} clients"
        who = f"the server and {clients} at a time"
        yield from _memory(who, wanted, total, fewer, free=free)
    number = config.federation.num_clients
    states = number * needs.client_disk()
    yield from _disk(
        needs.server_disk() + states,
        folder,
        f"give another --output-dir, or fewer clients: the state of {number} is "
        f"{bytes_text(states)} of it",
    )


def on_the_server(
    needs: Needs, clients: Mapping[str, Mapping[str, str]], folder: Path
) -> Iterator[Finding]:
    """Yield what speaks against a run of ``clients``, by what they said of their devices.

    Each is taken to have its device for itself. ``folder`` is where the server writes.
    """
    wanted: dict[tuple[str, int], int] = {}
    for name, about in clients.items():
        try:
            device, total, micro_batch = _told(about, needs.config.data.batch_size)
        except (KeyError, ValueError, RuntimeError):
            continue  # nothing that one could go by, and no reason to end a run
        key = device.type, micro_batch
        try:
            if key not in wanted:
                wanted[key] = sum(needs.client(device, micro_batch).values())
        except ValueError:
            break
        for found in _memory(name, wanted[key], total, _SMALLER):
            # If the run goes on without those that fail, it may go on without this one.
            yield replace(found, stops=needs.config.federation.on_failure == "stop")
    total, _ = memory()
    yield from _memory("the server", sum(needs.server().values()), total, "use a larger machine")
    checkpoints = "give another --output-dir, or set run.checkpoint_every=0"
    yield from _disk(needs.server_disk(), folder, checkpoints)


def _told(about: Mapping[str, str], batch_size: int) -> tuple[torch.device, int, int]:
    """Return a client's device, the bytes of its memory, and the size of its micro-batches."""
    micro_batch = int(about.get(MICRO_BATCH, batch_size))
    if not 1 <= micro_batch <= batch_size:
        raise ValueError(f"micro-batches of {micro_batch}")
    return torch.device(about["device"]), int(about[MEMORY_TOTAL]), micro_batch


def _memory(
    who: str, wanted: float, total: int, change: str, *, free: int | None = None
) -> Iterator[Finding]:
    has = f"by estimate {bytes_text(wanted)} of memory, and there are"
    if wanted > MARGIN * total:
        yield Finding(f"{who}: {has} {bytes_text(total)}; {change}", stops=True)
    elif free is not None and wanted > free:
        yield Finding(f"{who}: {has} {bytes_text(free)} free; {change}")


def _disk(wanted: int, folder: Path, change: str) -> Iterator[Finding]:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if wanted > free:
        yield Finding(
            f"files take up to {bytes_text(wanted)}, and the disk of {folder} has "
            f"{bytes_text(free)} free; {change}",
            stops=wanted > MARGIN * free,
        )
