"""The process of a rank other than 0: joins the process group and makes the calls rank 0 sends.

``ranks`` starts it. It ends with rank 0, even in the middle of a collective.
"""

import itertools
import json
import os
import socket
import sys
import traceback
from datetime import timedelta
from pkgutil import resolve_name
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed's, which mypy cannot see

from flower_desloc.app.sites.multiprocess.parallelism import Parallelism
from flower_desloc.app.sites.supervisor import on_exit

LOOPBACK = "127.0.0.1"
_JOIN_TIMEOUT = timedelta(seconds=60)  # every rank has imported what it needs by then
_WORK_TIMEOUT = timedelta(minutes=30)  # one may compile or read its data while others wait
_IDLE_TIMEOUT = timedelta(days=365)
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def open_store(world: int, port: int, listener: socket.socket | None = None) -> TCPStore:
    """Connect to the store at a port of the loopback device; rank 0 serves it on ``listener``."""
    return TCPStore(
        LOOPBACK,
        port,
        world,
        is_master=listener is not None,
        timeout=_IDLE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def join(store: TCPStore, rank: int, world: int, kind: str) -> torch.device:
    """Join PyTorch's default process group as ``rank``; return the rank's device."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if loopback else ():
        os.environ.setdefault(variable, loopback[0])
    if kind not in _BACKENDS:
        raise ValueError(f"device={kind}: several processes need cpu or cuda")
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        _BACKENDS[kind], store=store, rank=rank, world_size=world, timeout=_JOIN_TIMEOUT
    )
    dist.distributed_c10d._set_pg_timeout(_WORK_TIMEOUT)
    return device


def main(arguments: list[str]) -> NoReturn:
    """Run as ``python -m flower_desloc.app.sites.multiprocess.rank RANK WORLD PORT PARENT``."""
    rank, world, port, parent = map(int, arguments)
    on_exit(parent, lambda: os._exit(1))
    store = open_store(world, port)
    settings = json.loads(store.get("settings"))
    try:
        torch.set_num_threads(settings["threads"])
        build = resolve_name(settings["reference"])
        store.set(f"ready/{rank}", "")
        device = join(store, rank, world, settings["device"])
        worker = build(device, Parallelism(*settings["parallelism"]), settings["argument"])
        dist.barrier()
        for number in itertools.count():
            method, call_arguments = json.loads(store.get(f"call/{number}"))
            getattr(worker, method)(*call_arguments)
            dist.barrier()
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        sys.stderr.flush()
        store.set(f"error/{rank}", f"{type(error).__name__}: {error}")
    # Not sys.exit: the others wait in a collective until this process has ended.
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
