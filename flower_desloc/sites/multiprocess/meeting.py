"""Where the ranks of a group meet: a store on the loopback device, and a process group."""

import importlib
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed's, which mypy cannot see

LOOPBACK = "127.0.0.1"
_JOINING = timedelta(seconds=60)  # all have imported what they need
_WORKING = timedelta(minutes=30)  # one may compile, or read its data, while others wait
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Meeting:
    """So many ranks, at a port of the loopback device, on one kind of device."""

    world: int
    port: int
    kind: str

    def join(self, rank: int, listener: socket.socket | None = None) -> None:
        """Become that rank of PyTorch's default process group; rank 0 brings the ``listener``."""
        interface = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        for variable in _INTERFACES if interface else ():
            os.environ.setdefault(variable, interface[0])
        if self.kind == "cuda":
            torch.cuda.set_device(rank)
        store = TCPStore(
            LOOPBACK,
            self.port,
            self.world,
            is_master=listener is not None,
            timeout=_JOINING,
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        backend = _BACKENDS.get(self.kind)
        if backend is None:
            raise ValueError(f"device={self.kind}: several processes need cpu or cuda")
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=self.world, timeout=_JOINING
        )
        dist.distributed_c10d._set_pg_timeout(_WORKING)

    def device(self, rank: int) -> torch.device:
        """Return where that rank computes."""
        return torch.device("cuda", rank) if self.kind == "cuda" else torch.device(self.kind)

    def environment(self, rank: int) -> dict[str, str]:
        """Return the environment variables that torchrun gives to a rank."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.world),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self.port),
        }


def load(reference: str) -> Any:
    """Return what ``module:name`` names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
