"""Memory of each process while a stream of several gigabytes is sent to a client and back.

    python benchmarks/large_payload.py [--gigabytes 3.2] [--tensors 16] [--json FILE]

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

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from flower_desloc.flower.client import STATE_DIR
from flower_desloc.sites.deployment.environment import as_argument
from flower_desloc.tools.engines.deployment import deployment
from flower_desloc.tools.engines.superlink import SuperLink, private_superlink

APP = Path(__file__).with_name("large_payload_app")
ENGINES = ("simulation", "deployment")
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


@dataclass(eq=False)
class Memory(threading.Thread):
    """Samples the anonymous memory of all processes that inherited ``mark`` in a variable."""

    mark: str
    peaks: dict[str, int] = field(default_factory=dict)
    together: int = 0
    """Peak of the sum, Ray's store included."""
    then: dict[str, int] = field(default_factory=dict)
    """Memory by role at that peak."""

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()
        self._others: set[int] = set()

    def run(self) -> None:
        while not self.over.wait(0.2):
            now: dict[str, int] = {}
            for pid in psutil.pids():
                if role := self._role(pid):
                    now[role] = now.get(role, 0) + anonymous(pid)
                if role == RAYLET:
                    now[STORE] = now.get(STORE, 0) + shared(pid)
            for role, size in now.items():
                self.peaks[role] = max(self.peaks.get(role, 0), size)
            if sum(now.values()) > self.together:
                self.together, self.then = sum(now.values()), now

    def _role(self, pid: int) -> str:
        """Return the role of a process; empty for other processes and for small helpers."""
        if pid in self._others:
            return ""
        try:
            process = psutil.Process(pid)
            if self.mark not in process.environ().values():
                self._others.add(pid)
                return ""
            command = " ".join(process.cmdline())
        except psutil.Error:
            return ""
        return next((role for words, role in ROLES.items() if words in command), "")


def anonymous(pid: int) -> int:
    """Return the bytes of a process's anonymous memory."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has just ended
        return 0
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("RssAnon:")), 0)


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
    with ExitStack() as stack:
        if name == "simulation":
            yield (
                stack.enter_context(private_superlink()),
                [*("--federation-config", "num-supernodes=1 client-resources-num-cpus=1")],
            )
            return
        site = {"partition-id": 0, "num-partitions": 1, "state-dir": str(folder / "state")}
        superlink, _ = stack.enter_context(deployment([site], threads=1))
        yield superlink, []


def measure(name: str, values: int, tensors: int, *, bundles: bool = True) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="desloc-bench-") as temporary:
        folder = Path(temporary)
        os.environ[STATE_DIR] = temporary
        output = folder / "result.json"
        settings = {"values": values, "tensors": tensors, "output": str(output)}
        settings["bundles"] = int(bundles)
        memory = Memory(temporary)
        memory.start()
        with engine(name, folder) as (superlink, options):
            run = superlink.submit(
                [
                    *("flwr", "run", str(APP), "local", "--format", "json"),
                    *("--run-config", as_argument(settings), *options),
                ]
            )
            while not (status := superlink.status(run)).finished:
                time.sleep(1)
            log = "\n".join(superlink.log(run))
        memory.over.set()
        memory.join()
        found = json.loads(output.read_text()) if output.exists() else {"error": log}
    if "error" in found or not status.completed:
        raise RuntimeError(f"{status}\n{found.get('error', log)}")
    payload = 4 * values * tensors
    peaks = {role: size / payload for role, size in memory.peaks.items()}
    return {
        "seconds": found["window"],
        "peak_bytes": memory.peaks,
        "payloads": peaks,
        "together_bytes": memory.together,
        "together_payloads": memory.together / payload,
        "then_bytes": memory.then,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=3.2, help="of the stream")
    parser.add_argument("--tensors", type=int, default=16, help="of which it consists")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args()
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1048576")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # ends processes
    values = int(args.gigabytes * 1e9 / 4 / args.tensors)
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, "
        f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        "glibc": os.environ["GLIBC_TUNABLES"],
        "versions": {name: version(name) for name in ("flwr", "torch", "ray")},
        "payload_bytes": 4 * values * args.tensors,
        "tensors": args.tensors,
    }
    for name in args.engines:
        result[name] = measure(name, values, args.tensors)
        show(name, result[name])
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def show(name: str, found: dict[str, Any]) -> None:
    print(f"{name}: {found['seconds']['total']:.1f} s")
    for role, payloads in found["payloads"].items():
        print(f"  {role:27} {payloads:5.2f} payloads  {found['peak_bytes'][role] / 1e9:6.2f} GB")
    then = ", ".join(f"{role} {size / 1e9:.2f}" for role, size in found["then_bytes"].items())
    print(f"  {'together':27} {found['together_payloads']:5.2f} payloads  ({then} GB)", flush=True)


if __name__ == "__main__":
    main()
