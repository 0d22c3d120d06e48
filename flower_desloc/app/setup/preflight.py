"""Estimate the memory and disk space of a run, and check that it fits before it starts."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from logging import WARNING
from pathlib import Path

import torch
from torch import nn

from flower_desloc.app.config import Config, ConfigError
from flower_desloc.app.config.schema import AUTO
from flower_desloc.app.config.units import bytes_text
from flower_desloc.app.setup.build import build_optimizer, build_schedule, stream_kinds
from flower_desloc.app.setup.machine import clients_at_once, default_device, device_memory, memory
from flower_desloc.app.setup.sketch import Sketch, estimating
from flower_desloc.core.schedule import GRADIENTS
from flower_desloc.core.streams import prime, stream_names
from flower_desloc.core.traffic import stream_bytes, window_bytes, wire_bytes
from flower_desloc.flower.internals import log
from flower_desloc.flower.observer import (
    MEMORY_TOTAL,
    MICRO_BATCH,
    Observer,
    Plan,
    WindowRecord,
)

Parts = dict[str, int]
"""Bytes by purpose; they add up."""

MARGIN = 1.5
"""A run is stopped if it needs this many times the available memory: estimates are inexact."""
OVERRIDE = "run.preflight=warn starts the run anyway"

# Bytes of processes after their imports, measured on Linux; the last is the sum of Flower's and
# Ray's own processes in a simulation.
_CLIENT, _SERVER, _SIMULATION = 500_000_000, 600_000_000, 1_100_000_000
_CLIENT_FILES = 4  # the current one, one being written, and those of the last two checkpoints
_CHECKPOINTS = 3  # the last two, and one being written
_AUTO_SHARE = 0.7  # fraction of a device that `auto` may fill: estimates are inexact
_NO_STEP = "the memory of a step cannot be estimated"
_SMALLER = "set data.micro_batch_size=auto or less, or a smaller model"


@dataclass(frozen=True)
class Needs:
    """The memory and disk space that a run needs, in bytes.

    Every attribute raises ``ValueError`` if the model cannot be built without its values.
    """

    config: Config

    @cached_property
    def sketch(self) -> Sketch:
        """The model, without allocated tensors."""
        return Sketch(self.config)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of every stream."""
        return stream_bytes(self.sketch.streams)

    @cached_property
    def wire(self) -> dict[str, int]:
        """Bytes of every stream on the wire."""
        return wire_bytes(self.sketch.streams, self.config.wire, stream_kinds(self.config))

    @cached_property
    def states(self) -> int:
        """Bytes of the optimizer states, each as large as the parameters."""
        module = nn.Linear(2, 2, bias=False)
        with estimating("the optimizer takes no step"):
            optimizer = build_optimizer(self.config, module.parameters())
            prime(optimizer)
        return (len(stream_names(module, optimizer)) - 1) * self.sketch.gradients

    def micro_batch_size(self, device: torch.device) -> int:
        """Return the size of a micro-batch on ``device``.

        Under ``auto`` it is the largest divisor of the batch whose step is estimated to leave 30 %
        of the device's memory, or of a client's share of it in a simulation; 1 if there is no
        estimate. It depends on the total and not on the free memory, because other processes must
        not change the last bits of a run.
        """
        size, whole = self.config.data.micro_batch_size, self.config.data.batch_size
        if size != AUTO:
            return whole if size is None else int(size)
        try:
            one = self.sketch.step_bytes(1)
            gradients = self.sketch.gradients if whole > 1 else 0
            rest = sum(self.client(device, 1).values()) - one + gradients
        except ValueError:
            return 1
        share = _share(self.config, device)
        available = _AUTO_SHARE * device_memory(device)[0] * share - rest
        divisors = (n for n in range(1, whole + 1) if whole % n == 0)
        return max((n for n in divisors if n * (one - gradients) <= available), default=1)

    def client(self, device: torch.device, micro_batch: int) -> Parts:
        """Return the memory of ``device`` that one client needs.

        Raises ``ValueError`` if the size of the activations cannot be estimated.
        """
        step = self.sketch.step_bytes(micro_batch)
        evaluation = self._evaluation(micro_batch) if self.config.evaluation.federated else 0
        return {
            "weights": self.sketch.weights,
            "optimizer states": self.states,
            "gradients and activations": max(step, evaluation),
        } | (self.host_memory() if device.type == "cpu" else {})

    def host_memory(self) -> Parts:
        """Return the host memory that a client needs on any device."""
        return {
            "Python": _CLIENT,
            # The request is freed before the reply is made.
            "streams received or sent": max(self._kept, self._due(self.wire)),
        }

    def server(self) -> Parts:
        """Return the host memory that the ServerApp needs."""
        policy, clients = self.config.federation, self.config.simulation.num_clients
        due = self._due(self.sizes)
        # Under a bound, two more are held until there are three to compare.
        held = min(2, clients - 1) if policy.norm_bound is not None else 0
        replies = 1 + held if policy.average == "mean" else clients
        return {
            "Python": _SERVER,
            "weights": self.sketch.weights,
            "averages": self._kept,
            "the next averages": due,
            "replies": replies * due,  # decoded
            "its own optimizer": self._outer(),
            "evaluation": self._central(),
        }

    def machine(self, device: torch.device, micro_batch: int, at_once: int) -> int:
        """Return the memory that a simulation of all clients needs on one machine.

        Flower's link holds the replies that the server has not pulled yet.
        """
        client = self.client(device, micro_batch) if device.type == "cpu" else self.host_memory()
        waiting = self.config.simulation.num_clients * self._due(self.wire)
        return sum(self.server().values()) + waiting + at_once * sum(client.values()) + _SIMULATION

    def client_disk(self) -> int:
        """Return the disk space of one client's state."""
        return 0 if GRADIENTS in self.sizes else _CLIENT_FILES * self._kept

    def server_disk(self) -> int:
        """Return the disk space of the run's folder."""
        checkpoints = _CHECKPOINTS if self.config.run.checkpoint_every else 0
        return checkpoints * self._kept + self.sketch.weights

    def _outer(self) -> int:
        if GRADIENTS in self.sizes:
            return self.states
        return {"none": 0, "sgd": 1, "adam": 2}[self.config.outer.name] * self.sketch.gradients

    def _central(self) -> int:
        """Return the host memory of the server's evaluations, which are on a GPU if it has one."""
        device = default_device()
        if device.type != "cpu" or not self.config.evaluation.central:
            return 0
        return self._evaluation(self.micro_batch_size(device))

    def _evaluation(self, micro_batch: int) -> int:
        """Return the memory of an evaluation, 0 if it cannot be estimated."""
        with suppress(ValueError):
            return self.sketch.evaluation_bytes(micro_batch)
        return 0

    @property
    def _kept(self) -> int:
        return sum(size for name, size in self.sizes.items() if name != GRADIENTS)

    def _due(self, sizes: dict[str, int]) -> int:
        """Return the largest number of bytes due after one window."""
        return max(window_bytes(build_schedule(self.config), sizes, self.config.run.steps))


def sized(config: Config, device: torch.device) -> Config:
    """Return ``config`` with the number that ``data.micro_batch_size=auto`` is on ``device``."""
    if config.data.micro_batch_size != AUTO:
        return config
    data = replace(config.data, micro_batch_size=micro_batch_size(config, device))
    return replace(config, data=data)


def micro_batch_size(config: Config, device: torch.device) -> int:
    """Return the size of a micro-batch on ``device``."""
    return Needs(config).micro_batch_size(device)


def _share(config: Config, device: torch.device) -> float:
    if device.type == "cpu":
        return 1 / clients_at_once(config)
    gpus = config.simulation.client_gpus
    return gpus if 0 < gpus < 1 else 1.0


@dataclass(frozen=True)
class Finding:
    """A problem found before a run."""

    what: str
    stops: bool = False
    """True if the run clearly cannot fit."""
    estimated: bool = True
    """True if it is based on an estimate, which the user may override."""


@dataclass(frozen=True)
class Hardware:
    """Device, number and micro-batch of clients that are simulated at once."""

    device: torch.device
    at_once: int
    micro_batch: int

    @classmethod
    def of(cls, config: Config, *, in_process: bool, workers: int | None) -> "Hardware":
        """Return the hardware that the settings select on this machine.

        If they require a GPU and there is none, its memory is unknown.
        """
        gpu = torch.cuda.is_available() if in_process else config.simulation.client_gpus > 0
        device = torch.device("cuda" if gpu else "cpu")
        at_once = 1 if in_process else workers or clients_at_once(config)
        if gpu and not torch.cuda.is_available():
            size = config.data.micro_batch_size
            return cls(device, at_once, 1 if size == AUTO else int(size or config.data.batch_size))
        return cls(device, at_once, micro_batch_size(config, device))

    @property
    def exists(self) -> bool:
        """True if this machine has the device."""
        return self.device.type == "cpu" or torch.cuda.is_available()


def on_this_machine(needs: Needs, hardware: Hardware, folder: Path) -> Iterator[Finding]:
    """Yield the problems of simulating the run on this machine, with its files in ``folder``."""
    config = needs.config
    gpus = config.simulation.client_gpus
    if not hardware.exists:
        yield Finding(
            f"simulation.client_gpus={gpus:g}, and this machine has no GPU that PyTorch can use; "
            "set simulation.client_gpus=0 to train on the CPU",
            stops=True,
            estimated=False,
        )
    elif hardware.device.type == "cpu" and torch.cuda.is_available():
        yield Finding(
            "this machine has a GPU that no client uses; set simulation.client_gpus=1, or a share"
        )
    try:
        if hardware.exists and hardware.device.type != "cpu":
            client = sum(needs.client(hardware.device, hardware.micro_batch).values())
            wanted = client / _share(config, hardware.device)
            total, free = device_memory(hardware.device)
            yield from _memory("clients on one GPU", wanted, total, _SMALLER, free=free)
        wanted = needs.machine(hardware.device, hardware.micro_batch, hardware.at_once)
    except ValueError as error:
        yield Finding(f"{_NO_STEP}: {error}")
    else:
        total, free = memory()
        who, change = "the server and a client at a time", _SMALLER
        if hardware.at_once > 1:
            who = f"the server and {hardware.at_once} clients at a time"
            change += ", or fewer clients at once (--workers 1)"
        yield from _memory(who, wanted, total, change, free=free)
    number = config.simulation.num_clients
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
    """Yield the problems of a run, given what each client reported about its device.

    Each client is assumed to have its device for itself. The server writes to ``folder``.
    """
    wanted: dict[tuple[str, int], int] = {}
    for name, about in clients.items():
        try:
            device, total, micro_batch = _reported(about, needs.config.data.batch_size)
        except (KeyError, ValueError, RuntimeError):
            continue  # an unusable report must not stop a run
        key = device.type, micro_batch
        try:
            if key not in wanted:
                wanted[key] = sum(needs.client(device, micro_batch).values())
        except ValueError as error:
            yield Finding(f"{_NO_STEP}: {error}")
            break
        for found in _memory(name, wanted[key], total, _SMALLER):
            # A run that continues without failed clients can continue without this one.
            yield replace(found, stops=needs.config.federation.on_failure == "stop")
    total, _ = memory()
    yield from _memory("the server", sum(needs.server().values()), total, "use a larger machine")
    change = "give another --output-dir, or set run.checkpoint_every=0"
    yield from _disk(needs.server_disk(), folder, change)


def _reported(about: Mapping[str, str], batch_size: int) -> tuple[torch.device, int, int]:
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


class Preflight(Observer):
    """Observer that stops a run which clearly cannot fit, and forwards everything to another.

    When training starts, the clients have reported their devices.
    """

    def __init__(self, config: Config, folder: Path, observer: Observer) -> None:
        self._config = config
        self._folder = folder
        self._observer = observer

    def started(self, plan: Plan) -> None:
        """Compare the estimate with the clients' memory; without an estimate nothing is stopped.

        Raises ``ConfigError`` if the memory is clearly too small.
        """
        self._observer.started(plan)
        try:
            findings = list(on_the_server(Needs(self._config), plan.clients, self._folder))
        except ValueError as error:
            log(WARNING, "the memory of this run cannot be estimated: %s", error)
            return
        for finding in findings:
            if finding.stops and self._config.run.preflight == "stop":
                raise ConfigError(f"{finding.what} ({OVERRIDE})")
            log(WARNING, "%s", finding.what)

    def joined(self, client: str, about: Mapping[str, str]) -> None:
        """Forward it."""
        self._observer.joined(client, about)

    def window(self, record: WindowRecord) -> None:
        """Forward it."""
        self._observer.window(record)
