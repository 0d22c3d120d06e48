"""The memory and disk space that a run needs, and whether they are there before it starts.

A closed formula of the parameters: weights, gradients, optimizer states, averages and messages.
Activations are not part of it; ``measured_step`` finds them on the device that is there.
"""

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from logging import WARNING
from pathlib import Path

import torch
from torch import nn

from flower_desloc.app.config import Config, ConfigError
from flower_desloc.app.config.units import bytes_text
from flower_desloc.app.setup.build import build_outer
from flower_desloc.app.setup.machine import clients_at_once, device_memory, gpu_share, memory
from flower_desloc.app.setup.meta_model import meta_model, on_meta, task_errors
from flower_desloc.app.setup.streams import RunStreams
from flower_desloc.core.client_info import ClientInfo
from flower_desloc.core.robust import AVERAGES
from flower_desloc.core.schedule import BUFFERS, GRADIENTS, PARAMS, SyncSchedule
from flower_desloc.core.streams import STEP, buffers, parts
from flower_desloc.core.traffic import compressed_bytes, stream_bytes, window_bytes
from flower_desloc.core.types import Stream
from flower_desloc.flower.checkpoint import KEEP
from flower_desloc.flower.internals import log
from flower_desloc.flower.observer import RunInfo
from flower_desloc.flower.rounds import RoundHook

ByPurpose = dict[str, int]
"""Bytes by purpose; they add up."""

OVERRIDE = "run.preflight=warn starts the run anyway"

# Bytes of processes after their imports, measured on Linux; the others are the sums of Flower's
# and Ray's own processes in a simulation, and of Flower's own for a deployment and for each site.
_CLIENT, _SERVER, _SIMULATION = 500_000_000, 600_000_000, 1_100_000_000
_SUPERLINK, _SUPERNODE = 700_000_000, 400_000_000
_CLIENT_FILES = KEEP + 2  # of the checkpoints, the current one, and one being written
_CHECKPOINTS = KEEP + 1  # and one being written
_FOR_STATES = 0.75
_DISK_MARGIN = 1.5  # not all of these files are there at all times
_SMALLER = "set a smaller model, such as model.hidden_size, or an optimizer.name with fewer states"


@dataclass(frozen=True)
class Needs:
    """The memory, without activations, and the disk space that a run needs, in bytes.

    Every attribute raises ``ValueError`` if the model cannot be built.
    """

    config: Config

    @cached_property
    def model(self) -> nn.Module:
        """The model, without memory for its parameters."""
        return meta_model(self.config)

    @cached_property
    def num_params(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.model.parameters())

    @cached_property
    def streams(self) -> RunStreams:
        """The streams of the configuration."""
        return RunStreams(self.config)

    @cached_property
    def schedule(self) -> SyncSchedule:
        """When each stream of the model is averaged; raises ``ConfigError`` as ``check``."""
        saved = [BUFFERS] if buffers(self.model) else []
        return self.streams.schedule_of([*self._by_stream, *saved])

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of parameters and buffers."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        return sum(part.nbytes for tensor in tensors for part in parts(tensor))

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients."""
        return sum(p.nbytes for p in self.model.parameters() if p.requires_grad)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the optimizer states."""
        states = (stream for name, stream in self._by_stream.items() if name != PARAMS)
        return sum(p.nbytes for stream in states for p in stream.values())

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of every stream."""
        return stream_bytes(self._streams)

    @cached_property
    def compressed(self) -> dict[str, int]:
        """Bytes of every stream as it is sent."""
        return compressed_bytes(self._streams, self.config.compression, self.streams.kinds)

    @cached_property
    def sent_up(self) -> dict[str, int]:
        """Bytes of every stream in a client's reply."""
        return self.streams.sent_bytes(self._streams)

    @cached_property
    def _streams(self) -> dict[str, Stream]:
        trained = {key: on_meta(p) for key, p in self._by_stream[PARAMS].items()}
        saved = {key: on_meta(b) for key, b in buffers(self.model).items()}
        names = dict.fromkeys([*self.schedule.periods, PARAMS])
        by_name = {**self._by_stream, BUFFERS: saved, GRADIENTS: trained}
        return {
            name: saved if name == BUFFERS else {key: trained[key] for key in by_name.get(name, {})}
            for name in names
        }

    def check(self) -> None:
        """Raise ``ConfigError`` unless ``sync`` states a period for each stream of the model.

        And as ``param_groups``.
        """
        _ = self.schedule

    @cached_property
    def _by_stream(self) -> dict[str, Stream]:
        model = self.model  # its own errors are not the optimizer's
        with task_errors("the optimizer takes no step"):
            try:
                return self.streams.params_of(model)
            except ConfigError as error:
                refused = error
        raise refused

    def client_bytes(self, device: torch.device) -> ByPurpose:
        """Return the memory of ``device`` that one client needs."""
        return {
            "weights": self.weight_bytes,
            "gradients": self.gradient_bytes,
            "optimizer states": self.state_bytes,
        } | (self.host_bytes() if device.type == "cpu" else {})

    def host_bytes(self) -> ByPurpose:
        """Return the host memory that a client needs on any device."""
        return {
            "Python": _CLIENT,
            # The request is freed before the reply is made.
            "streams received or sent": max(self._averaged, self._due(self.sent_up)),
        }

    def server_bytes(self) -> ByPurpose:
        """Return the host memory that the ServerApp needs."""
        policy, clients = self.config.federation, self.config.simulation.num_clients
        due = self._due(self.sizes)
        # Under a bound, two more are held until there are three to compare.
        compared = min(2, clients - 1) if policy.norm_bound is not None else 0
        replies = clients if AVERAGES[policy.average].keeps_replies else 1 + compared
        by_gradients = GRADIENTS in self.sizes
        return {
            "Python": _SERVER,
            "averages": self._averaged,
            "the next averages": due,
            "replies": replies * due,  # decoded
            "its own optimizer": self.state_bytes if by_gradients else self._outer_states(),
        }

    def _outer_states(self) -> int:
        """Return the bytes of the states of DiLoCo's outer optimizer."""
        outer = build_outer(self.config, self.model)
        if outer is None:
            return 0
        one = {"": torch.zeros(1)}
        outer.begin(one)
        outer.step(one, 0)
        return len(outer.state.keys() - {STEP}) * self.gradient_bytes

    def machine_bytes(self, device: torch.device, at_once: int) -> int:
        """Return the memory that a simulation of all clients needs on one machine.

        Flower's link holds the replies that the server has not pulled yet.
        """
        client = self.client_bytes(device) if device.type == "cpu" else self.host_bytes()
        waiting = self.config.simulation.num_clients * self._due(self.sent_up)
        return (
            sum(self.server_bytes().values())
            + waiting
            + at_once * sum(client.values())
            + _SIMULATION
        )

    def federation_bytes(self, devices: Sequence[torch.device]) -> int:
        """Return the memory that a server and sites, with a device each, need on one machine."""
        on_cpu, on_gpu = self.client_bytes(torch.device("cpu")), self.host_bytes()
        sites = sum(sum((on_cpu if d.type == "cpu" else on_gpu).values()) for d in devices)
        return sum(self.server_bytes().values()) + _SUPERLINK + len(devices) * _SUPERNODE + sites

    def client_disk_bytes(self) -> int:
        """Return the disk space of one client's state."""
        return 0 if GRADIENTS in self.sizes else _CLIENT_FILES * self._kept

    def server_disk_bytes(self) -> int:
        """Return the disk space of the run's folder."""
        checkpoints = _CHECKPOINTS if self.config.run.checkpoint_every else 0
        return checkpoints * self._averaged + self.weight_bytes

    def waiting_disk_bytes(self, clients: int) -> int:
        """Return the disk space of replies that came by Arrow Flight and are not averaged yet."""
        by_flight = self.config.federation.data_address is not None and not self.config.sync_delay
        return clients * self._due(self.sent_up) if by_flight else 0

    @property
    def _kept(self) -> int:
        return sum(size for name, size in self.sizes.items() if name != GRADIENTS)

    @property
    def _averaged(self) -> int:
        """Return the bytes of what the server has an average of, sooner or later."""
        averaged = self.schedule.num_events(self.config.run.steps)
        names = (PARAMS, BUFFERS, *(name for name, number in averaged.items() if number))
        return sum(self.sizes.get(name, 0) for name in {*names} - {GRADIENTS})

    def _due(self, sizes: dict[str, int]) -> int:
        """Return the largest number of bytes due after one window."""
        return max(window_bytes(self.schedule, sizes, self.config.run.steps))


@dataclass(frozen=True)
class Finding:
    """A problem found before a run."""

    what: str
    stops: bool = False
    """True if the run cannot fit."""
    estimated: bool = True
    """True if it follows from the formula, which the user may override."""


@dataclass(frozen=True)
class Hardware:
    """Device and number of clients that are simulated at once."""

    device: torch.device
    at_once: int

    @classmethod
    def of(cls, config: Config, *, in_process: bool, workers: int | None) -> "Hardware":
        """Return the hardware that the settings select on this machine."""
        gpu = torch.cuda.is_available() if in_process else config.simulation.client_gpus > 0
        at_once = 1 if in_process else workers or clients_at_once(config)
        return cls(torch.device("cuda" if gpu else "cpu"), at_once)

    @property
    def exists(self) -> bool:
        """True if this machine has the device."""
        return self.device.type == "cpu" or torch.cuda.is_available()


def on_this_machine(needs: Needs, hardware: Hardware, folder: Path) -> Iterator[Finding]:
    """Yield the problems of simulating the run on this machine, with its files in ``folder``."""
    config, device = needs.config, hardware.device
    if not hardware.exists:
        yield Finding(
            f"simulation.client_gpus={config.simulation.client_gpus:g}, and this machine has no "
            "GPU that PyTorch can use; set simulation.client_gpus=0 to train on the CPU",
            stops=True,
            estimated=False,
        )
    elif device.type != "cpu":
        total, free = device_memory(device)
        wanted = sum(needs.client_bytes(device).values()) / gpu_share(config)
        yield from _memory("clients on one GPU", wanted, total, _SMALLER, free=free)
    elif torch.cuda.is_available():
        yield Finding(
            "this machine has a GPU that no client uses; set simulation.client_gpus=1, or a share"
        )
    who, change = "the server and a client at a time", _SMALLER
    if hardware.at_once > 1:
        who = f"the server and {hardware.at_once} clients at a time"
        change = f"simulate fewer clients at once (--workers 1), or {_SMALLER}"
    yield from _host(needs, who, needs.machine_bytes(device, hardware.at_once), change, folder)


def memory_for_states(needs: Needs, hardware: Hardware) -> int:
    """Return the bytes of this machine's memory that the states of simulated clients may take.

    It is a part of what the run leaves; the rest is for activations.
    """
    left = memory()[1] - needs.machine_bytes(hardware.device, hardware.at_once)
    return max(0, int(left * _FOR_STATES))


def federation_on_this_machine(
    needs: Needs, devices: Sequence[torch.device], folder: Path
) -> Iterator[Finding]:
    """Yield the problems of a server and sites, with a device each, on this machine."""
    for device, number in Counter(devices).items():
        if device.type == "cuda" and torch.cuda.is_available():
            total, free = device_memory(device)
            wanted = number * sum(needs.client_bytes(device).values())
            yield from _memory(f"{number} sites on {device}", wanted, total, _SMALLER, free=free)
    who, change = f"the server and {len(devices)} sites", f"use fewer --nodes, or {_SMALLER}"
    yield from _host(needs, who, needs.federation_bytes(devices), change, folder)


def _host(needs: Needs, who: str, wanted: int, change: str, folder: Path) -> Iterator[Finding]:
    """Yield what this machine's memory and disk lack for all clients of a run."""
    total, free = memory()
    yield from _memory(who, wanted, total, change, free=free)
    number = needs.config.simulation.num_clients
    states = number * needs.client_disk_bytes()
    yield from _disk(
        needs.server_disk_bytes() + states,
        folder,
        f"give another --output-dir, or fewer clients: the state of {number} is "
        f"{bytes_text(states)} of it",
    )


def on_the_server(
    needs: Needs, clients: Mapping[str, ClientInfo], folder: Path
) -> Iterator[Finding]:
    """Yield the problems of a run, given what each client says of its device.

    Each client is assumed to have its device for itself. The server writes to ``folder``.
    """
    for name, info in clients.items():
        try:
            device = torch.device(info.device or "")
        except (ValueError, RuntimeError):
            continue  # an unusable report must not stop a run
        if info.memory_total is None:
            continue
        wanted = sum(needs.client_bytes(device).values())
        for found in _memory(name, wanted, info.memory_total, _SMALLER):
            # A run that continues without failed clients can continue without this one.
            yield replace(found, stops=needs.config.federation.on_failure == "stop")
    total, _ = memory()
    yield from _memory(
        "the server", sum(needs.server_bytes().values()), total, "use a larger machine"
    )
    change = "give another --output-dir, or set run.checkpoint_every=0"
    waiting = needs.waiting_disk_bytes(len(clients))
    if waiting:
        change += (
            f", or federation.data_address=null: {bytes_text(waiting)} of it are replies that wait"
        )
    yield from _disk(needs.server_disk_bytes() + waiting, folder, change)


def _memory(
    who: str, wanted: float, total: int, change: str, *, free: int | None = None
) -> Iterator[Finding]:
    needs = f"{who}: needed are {bytes_text(wanted)} of memory without activations, and there are"
    if wanted > total:
        yield Finding(f"{needs} {bytes_text(total)}; {change}", stops=True)
    elif free is not None and wanted > free:
        yield Finding(f"{needs} {bytes_text(free)} free; {change}")


def _disk(wanted: int, folder: Path, change: str) -> Iterator[Finding]:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if wanted > free:
        yield Finding(
            f"files take up to {bytes_text(wanted)}, and the disk of {folder} has "
            f"{bytes_text(free)} free; {change}",
            stops=wanted > _DISK_MARGIN * free,
        )


class Preflight(RoundHook):
    """Round hook that stops a run which cannot fit.

    When training starts, the clients have reported their devices.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._folder = folder

    def started(self, run: RunInfo) -> None:
        """Compare what is needed with the clients' memory; if that is unknown, nothing is stopped.

        Raises ``ConfigError`` if the memory is too small.
        """
        try:
            findings = list(on_the_server(Needs(self._config), run.clients, self._folder))
        except ValueError as error:
            log(WARNING, "the memory of this run cannot be estimated: %s", error)
            return
        for finding in findings:
            if finding.stops and self._config.run.preflight == "stop":
                raise ConfigError(f"{finding.what} ({OVERRIDE})")
            log(WARNING, "%s", finding.what)
