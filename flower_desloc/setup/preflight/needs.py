"""How much memory and disk a run takes at most, in bytes, by what they are for."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import nn

from flower_desloc.config import Config, dump, parse
from flower_desloc.config.schema import AUTO
from flower_desloc.core.compression import wire_bytes
from flower_desloc.core.schedule import GRADIENTS
from flower_desloc.core.streams import prime, stream_names
from flower_desloc.core.traffic import stream_bytes
from flower_desloc.flower.together import held_together
from flower_desloc.setup.build import build_optimizer, build_schedule
from flower_desloc.setup.preflight.machine import clients_at_once, device_memory
from flower_desloc.setup.preflight.sketch import Sketch

Parts = dict[str, int]
"""What for -> bytes; they add up."""

# Of a process that has imported what it needs, as measured on Linux; the rest are Flower's and
# Ray's own processes in a simulation.
_CLIENT, _SERVER, _REST = 500_000_000, 600_000_000, 1_100_000_000
_FILES = 4  # of a client: now, being written, and as at the last two checkpoints
_CHECKPOINTS = 3  # the last two, and one being written
_SHARE = 0.7  # of a device, which `auto` may fill: no estimate is exact, and others are there too


@dataclass(frozen=True)
class Needs:
    """What the run of a configuration takes.

    Each raises ``ValueError`` when the model cannot be built without training it.
    """

    config: Config

    @cached_property
    def sketch(self) -> Sketch:
        """The model."""
        return Sketch(self.config)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Every stream."""
        return stream_bytes(self.sketch.streams)

    @cached_property
    def wire(self) -> dict[str, int]:
        """Every stream as it travels."""
        return wire_bytes(self.sketch.streams, self.config.wire)

    @cached_property
    def states(self) -> int:
        """The optimizer's states, as large as what they are of."""
        module = nn.Linear(2, 2, bias=False)
        optimizer = build_optimizer(self.config, module.parameters())
        prime(optimizer)
        return (len(stream_names(module, optimizer)) - 1) * self.sketch.gradients

    def client(self, device: torch.device, micro_batch: int) -> Parts:
        """Return the memory of ``device`` that one client fills.

        Raises ``ValueError`` where activations cannot be known.
        """
        return {
            "weights": self.sketch.weights,
            "optimizer states": self.states,
            "gradients and activations": self.sketch.step_bytes(micro_batch),
        } | (self.beside() if device.type == "cpu" else {})

    def beside(self) -> Parts:
        """Return the machine's own memory that a client fills wherever it computes."""
        return {
            "Python": _CLIENT,
            # What came is let go before what is sent is made.
            "streams that came, or go": max(self._kept, self._due(self.wire)),
        }

    def server(self) -> Parts:
        """Return the memory of the ServerApp."""
        f = self.config.federation
        due = self._due(self.sizes)
        is_mean = f.average == "mean" and f.norm_bound is None
        replies = min(f.num_clients, held_together(due)) if is_mean else f.num_clients
        return {
            "Python": _SERVER,
            "weights": self.sketch.weights,
            "averages": self._kept,
            "the next averages": due,
            "replies": replies * due,  # decoded
            "its own optimizer": self._outer(),
        }

    def machine(self, device: torch.device, micro_batch: int, at_once: int) -> int:
        """Return the memory of a machine that simulates everybody.

        Flower's link holds the replies that wait for their turn.
        """
        client = self.client(device, micro_batch) if device.type == "cpu" else self.beside()
        waiting = self.config.federation.num_clients * self._due(self.wire)
        return sum(self.server().values()) + waiting + at_once * sum(client.values()) + _REST

    def client_disk(self) -> int:
        """Return the disk of one client's state."""
        return 0 if GRADIENTS in self.sizes else _FILES * self._kept

    def server_disk(self) -> int:
        """Return the disk of the run's folder."""
        checkpoints = _CHECKPOINTS if self.config.run.checkpoint_every else 0
        return checkpoints * self._kept + self.sketch.weights

    def _outer(self) -> int:
        if GRADIENTS in self.sizes:
            return self.states
        return {"none": 0, "sgd": 1, "adam": 2}[self.config.outer.name] * self.sketch.gradients

    @property
    def _kept(self) -> int:
        return sum(size for name, size in self.sizes.items() if name != GRADIENTS)

    def _due(self, sizes: dict[str, int]) -> int:
        """Return the most that is due after one window."""
        windows = build_schedule(self.config).windows(self.config.run.steps)
        return max(sum(sizes[name] for name in window.due) for window in windows)


def micro_batch_size(config: Config, device: torch.device) -> int:
    """Return how many examples go through the model at once on ``device``.

    Under ``auto`` the largest divisor of the batch whose step, by the estimate, leaves 30 % of the
    device's memory, or of its part where simulated clients share it; 1 where nothing can be
    estimated. Of all its memory, not of what is free: what else goes on there must not be in the
    last bits of a run.
    """
    size, whole = config.data.micro_batch_size, config.data.batch_size
    if size != AUTO:
        return whole if size is None else int(size)
    return _fitting(dump(config), str(device))


@lru_cache(maxsize=8)  # asked for by every client of a process
def _fitting(settings: str, where: str) -> int:
    config, device = parse(settings), torch.device(where)
    needs, whole = Needs(config), config.data.batch_size
    try:
        one = needs.sketch.step_bytes(1)
    except ValueError:
        return 1
    gradients = needs.sketch.gradients if whole > 1 else 0
    rest = sum(needs.client(device, 1).values()) - one + gradients
    room = _SHARE * device_memory(device)[0] * _share(config, device) - rest
    fitting = (n for n in range(1, whole + 1) if whole % n == 0 and n * (one - gradients) <= room)
    return max(fitting, default=1)


def _share(config: Config, device: torch.device) -> float:
    if device.type == "cpu":
        return 1 / clients_at_once(config)
    gpus = config.federation.client_gpus
    return gpus if 0 < gpus < 1 else 1.0
