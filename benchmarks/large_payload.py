"""Memory of each process while a stream of several gigabytes is sent to a client and back.

    python benchmarks/large_payload.py [--gigabytes 3.2] [--tensors 16] [--engines simulation]

One window of DesLoc with one client, which receives one stream and returns it changed: in Flower's
simulation (`desloc run`'s private SuperLink, Ray) and in a deployment (`desloc federate`'s
SuperLink and SuperNode, over TLS on loopback). The values are random, and checked at the end.

Memory is anonymous memory, sampled five times a second from /proc. Memory mapped from files, such
as a client's state, is not counted, because the kernel can evict it. Ray's object store in shared
memory is counted once, separately. ``payloads`` are peaks divided by the bytes of the stream,
including programs and libraries: a process that must hold the stream needs at least 1.

The benchmark needs about 4 payloads of disk and 6 of memory at the same time: for 3.2 GB, an idle
machine with 24 GB. In the deployment glibc by default keeps much of the memory that Flower frees,
so GLIBC_TUNABLES=glibc.malloc.mmap_threshold=1048576 is set unless GLIBC_TUNABLES has a value.
"""

import os
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import typer
from common import report
from flower_runs import run_app

from flower_desloc.app.engines.deployment import NodeConfig, deployment
from flower_desloc.app.engines.superlink import SuperLink, private_superlink
from flower_desloc.flower.client_state import STATE_DIR

APP = Path(__file__).with_name("large_payload_app")
RAYLET = "raylet"
ROLES = {  # part of a command line -> role of the process
    "warm.trainer": "trainer",
    "flower-superlink": "SuperLink",
    "flower-supernode": "SuperNode",
    "deployment.node": "SuperNode",
    "flwr-serverapp": "ServerApp",
    "flwr-clientapp": "ClientApp",
    "flwr-simulation": "ServerApp and Ray's driver",
    "ray::ClientAppActor": "Ray's actor",
    "raylet": RAYLET,
}
STORE = "Ray's store"
ENGINES = "simulation,deployment"


class Memory(threading.Thread):
    """Samples the anonymous memory of all processes that inherited ``mark`` in a variable."""

    def __init__(self, mark: str) -> None:
        super().__init__(daemon=True)
        self.mark, self.over = mark, threading.Event()
        self.peaks: Counter[str] = Counter()
        """Peak memory by role."""
        self.then: Counter[str] = Counter()
        """Memory by role, Ray's store included, when the sum was largest."""

    def run(self) -> None:
        while not self.over.wait(0.2):
            now: Counter[str] = Counter()
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    now.update(self._sizes(process))
            self.peaks |= now
            self.then = max(self.then, now, key=Counter.total)

    def _sizes(self, process: psutil.Process) -> dict[str, int]:
        """Return a process's memory by role; empty for other processes and for small helpers."""
        if self.mark not in process.environ().values():
            return {}
        command = " ".join(process.cmdline())
        role = next((role for words, role in ROLES.items() if words in command), None)
        if role is None:
            return {}
        memory = process.memory_info()
        sizes = {role: memory.rss - memory.shared}
        return sizes | ({STORE: shared(process.pid)} if role == RAYLET else {})


def shared(pid: int) -> int:
    """Return the bytes of the files in shared memory that a process has open."""
    size = 0
    for handle in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            if str(handle.readlink()).startswith("/dev/shm/"):
                size += handle.stat().st_blocks * 512
        except OSError:
            continue
    return size


@contextmanager
def engine(name: str, folder: Path) -> Iterator[tuple[SuperLink, list[str]]]:
    """Yield a SuperLink with one client, and further arguments for `flwr run`."""
    if name == "simulation":
        with private_superlink() as superlink:
            config = "num-supernodes=1 client-resources-num-cpus=1"
            yield superlink, ["--federation-config", config]
    else:
        site: NodeConfig = {
            "partition-id": 0,
            "num-partitions": 1,
            "state-dir": str(folder / "state"),
        }
        with deployment([site], threads=1) as (superlink, _):
            yield superlink, []


def measure(name: str, values: int, tensors: int, *, bundles: bool = True) -> dict[str, Any]:
    """Return the seconds of the window, and the memory by role."""
    with tempfile.TemporaryDirectory(prefix="desloc-bench-") as folder:
        os.environ[STATE_DIR] = folder
        settings: dict[str, Any] = {"values": values, "tensors": tensors, "bundles": int(bundles)}
        memory = Memory(folder)
        memory.start()
        with engine(name, Path(folder)) as (superlink, options):
            settings["output"] = f"{folder}/result.json"
            seconds = run_app(superlink, APP, settings, *options)
        memory.over.set()
        memory.join()
    payload = 4 * values * tensors
    return {
        "seconds": seconds,
        "peak_bytes": dict(memory.peaks),
        "payloads": {role: size / payload for role, size in memory.peaks.items()},
        "together_bytes": memory.then.total(),
        "together_payloads": memory.then.total() / payload,
        "then_bytes": dict(memory.then),
    }


def main(
    gigabytes: float = 3.2, tensors: int = 16, engines: str = ENGINES, json: Path | None = None
) -> None:
    """Memory of each process while a stream of several gigabytes is sent and returned."""
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1048576")
    values = int(gigabytes * 1e9 / 4 / tensors)
    about = {"glibc": os.environ["GLIBC_TUNABLES"], "payload_bytes": 4 * values * tensors}
    found = {name: measure(name, values, tensors) for name in engines.split(",")}
    report({**about, "tensors": tensors, **found}, json)


if __name__ == "__main__":
    typer.run(main)
