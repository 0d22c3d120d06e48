"""Network namespaces joined by a bridge, shaped, delayed, and measured before use."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import psutil

from flower_desloc.app.sites.deployment.environment import Host

PREFIX = "thin-links-"
SUPERLINK, PROBE, TENSORS = 8000, 8001, 8002  # ports
SERVER, RELAY_OF_TENSORS = "10.99.0.1", "10.99.1.1"
TRANSFER = 3.0  # seconds of a measurement
QUEUE = 0.1  # seconds that a packet may wait in a shaper
ETHERNET, HEADERS = 14, 66  # bytes: Ethernet; and with it IP, and TCP with timestamps
FAST = 500  # Mbit/s from which packets are of 9000 bytes: one core cannot move 80,000 a second
TOLERANCE = 0.1  # of a measured rate; of a round trip twice that, and 5 ms
RELAY = Path(__file__).with_name("relay.py")


class NotAllowedError(RuntimeError):
    """Network namespaces are not allowed here."""


class CalibrationError(RuntimeError):
    """The links are not what they are said to be."""


@dataclass(frozen=True)
class Network:
    """A server and its sites; namespaces ``prefix + name`` of `server`, `switch`, `site0`, ..."""

    prefix: str
    sites: int
    mbit: float
    round_trip: float
    netem: bool

    @property
    def hosts(self) -> list[Host]:
        """Where the SuperLink runs, and every SuperNode."""
        # A site reaches the relay at its own address, and the relay reaches the server.
        seen = "127.0.0.1" if self.has_relays else SERVER
        sites = [Host(self.enter(site), f"{seen}:{SUPERLINK}") for site in self.site_names]
        return [Host(self.enter("server"), f"{SERVER}:{SUPERLINK}"), *sites]

    @property
    def data_address(self) -> str:
        """Where every site reaches the server for tensors, and the server listens."""
        # Not 127.0.0.1, where the server would not listen for others.
        return f"{RELAY_OF_TENSORS if self.has_relays else SERVER}:{TENSORS}"

    @property
    def delay(self) -> str:
        """What makes the round trip."""
        return "relay" if self.has_relays else "netem" if self.round_trip else "none"

    @property
    def has_relays(self) -> bool:
        """Whether relays delay what the sites send and receive."""
        return self.round_trip > 0 and not self.netem

    @property
    def site_names(self) -> list[str]:
        return [f"site{number}" for number in range(self.sites)]

    @property
    def mtu(self) -> int:
        """The largest packet in bytes, without Ethernet's header."""
        return 1500 if self.mbit < FAST else 9000

    def enter(self, name: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.prefix + name)

    def calibrate(self) -> dict[str, float]:
        """Measure both directions, of one site and of all at once, and a round trip."""
        one, every = self.site_names[:1], self.site_names
        round_trip, up = self._measure(one, up=True)
        found = {
            "round_trip_ms": 1000 * round_trip,
            "one_site_up_mbit": up,
            "one_site_down_mbit": self._measure(one, up=False)[1],
            "all_sites_up_mbit": self._measure(every, up=True)[1],
            "all_sites_down_mbit": self._measure(every, up=False)[1],
        }
        for what, value in found.items():
            if what == "round_trip_ms":
                good = 1000 * self.round_trip
                near = abs(value - good) <= 2 * TOLERANCE * good + 5
            else:
                good = self.mbit * (1 - HEADERS / (self.mtu + ETHERNET))
                near = abs(value - good) <= TOLERANCE * good
            if not near:
                raise CalibrationError(
                    f"{what} is {value:.1f} where {good:.1f} is expected at {self.mbit:g} Mbit/s"
                )
        return found

    def _measure(self, sites: Sequence[str], *, up: bool) -> tuple[float, float]:
        """Return a round trip in seconds, and the payload of all ``sites`` together in Mbit/s."""
        size = int(self.mbit / 8 * 1e6 * TRANSFER / len(sites))
        address = self.hosts[1].superlink.rpartition(":")[0]
        sizes = (size, 0) if up else (0, size)
        words = ["measure", address, PROBE, *sizes, time.time() + 2]
        with ExitStack() as stack:
            stack.enter_context(tool(self.enter("server"), "serve", SERVER, PROBE))
            started = [stack.enter_context(tool(self.enter(site), *words)) for site in sites]
            found = [json.loads(each.stdout.readline()) for each in started if each.stdout]
        seconds = max(f["ended"] for f in found) - min(f["began"] for f in found)
        return found[0]["round_trip"], 8e-6 * size * len(sites) / seconds

    def _shape(self, name: str, device: str, *, delayed: bool) -> None:
        """Shape what leaves through a device."""
        rate, parent = self.mbit * 1e6, ["root"]
        if delayed and self.netem:
            half = f"{500 * self.round_trip:g}ms"
            ip_tc("tc", self.prefix + name, "qdisc", "add", "dev", device, "root", "handle", "1:",
                  "netem", "delay", half, "limit", "100000")  # fmt: skip
            parent = ["parent", "1:1"]
        ip_tc("tc", self.prefix + name, "qdisc", "add", "dev", device, *parent,
              "tbf", "rate", f"{rate:.0f}bit", "burst", str(max(10_000, int(rate / 8 / 500))),
              "limit", str(max(50_000, int(rate / 8 * QUEUE))))  # fmt: skip

    def build(self) -> None:
        """Join the namespaces: a cable from every host to the switch, shaped at both ends."""
        hosts = ["server", *self.site_names]
        switch = self.prefix + "switch"
        for name in ["switch", *hosts]:
            command("ip", "netns", "add", self.prefix + name)
        ip_tc("ip", switch, "link", "add", "bridge", "type", "bridge")
        ip_tc("ip", switch, "link", "set", "bridge", "up")
        for number, host in enumerate(hosts, start=1):
            inside = self.prefix + host
            command("ip", "link", "add", "eth0", "netns", inside, "type", "veth",
                    "peer", "name", host, "netns", switch)  # fmt: skip
            # One packet at a time, so that headers are counted and shaped as on a wire.
            sizes = ("mtu", str(self.mtu), "gso_max_size", str(self.mtu + ETHERNET))
            ip_tc("ip", inside, "link", "set", "eth0", "gso_max_segs", "1", *sizes)
            ip_tc("ip", switch, "link", "set", host, "mtu", str(self.mtu))
            ip_tc("ip", inside, "addr", "add", f"10.99.0.{number}/24", "dev", "eth0")
            ip_tc("ip", inside, "link", "set", "lo", "up")
            ip_tc("ip", inside, "addr", "add", f"{RELAY_OF_TENSORS}/32", "dev", "lo")
            ip_tc("ip", inside, "link", "set", "eth0", "up")
            ip_tc("ip", switch, "link", "set", host, "master", "bridge")
            ip_tc("ip", switch, "link", "set", host, "up")
            # The delay is between switch and site.
            self._shape(host, "eth0", delayed=host != "server")
            self._shape("switch", host, delayed=host != "server")


@contextmanager
def tool(enter: Sequence[str], *words: object) -> Iterator[subprocess.Popen[str]]:
    """Run relay.py behind the words ``enter``; it ends with this process."""
    with subprocess.Popen(
        [*enter, sys.executable, "-I", str(RELAY), *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if words[0] != "measure":
                process.stdout.readline()  # "ready"
            yield process
        finally:
            process.stdin.close()


@contextmanager
def network(sites: int, mbit: float, round_trip: float) -> Iterator[Network]:
    """Build a network and take it down on exit, with every process inside.

    ``round_trip`` is in seconds. Raises ``NotAllowedError`` where that cannot be done.
    """
    require_allowed()
    clean()
    made = Network(
        f"{PREFIX}{os.getpid()}-", sites, mbit, round_trip, not _refused("netem", "delay", "1ms")
    )
    try:
        made.build()
        with ExitStack() as stack:
            if made.has_relays:
                where = {"127.0.0.1": (SUPERLINK, PROBE), RELAY_OF_TENSORS: (TENSORS,)}
                for site, (here, ports) in product(made.site_names, where.items()):
                    words = ("relay", here, SERVER, round_trip / 2, *ports)
                    stack.enter_context(tool(made.enter(site), *words))
            yield made
    finally:
        remove(name for name in namespaces() if name.startswith(made.prefix))


def require_allowed() -> None:
    """Raise ``NotAllowedError`` with the reason if namespaces cannot be made here."""
    reason = ""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        reason = "it needs Linux and root"
    elif not (shutil.which("ip") and shutil.which("tc")):
        reason = "it needs the commands ip and tc (iproute2)"
    elif error := _refused("tbf", "rate", "1mbit", "burst", "10000", "limit", "10000"):
        reason = f"it may not make a network namespace with a tbf shaper: {error}"
    if reason:
        raise NotAllowedError(f"thin_links cannot run here: {reason}")


def _refused(*shaper: str) -> str:
    """Return why a network namespace with a shaper cannot be made; empty if it can."""
    name = f"{PREFIX}{os.getpid()}-probe"
    try:
        command("ip", "netns", "add", name)
        try:
            ip_tc("tc", name, "qdisc", "add", "dev", "lo", "root", *shaper)
        finally:
            remove([name])
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip() or "refused"
    return ""


def clean() -> list[str]:
    """Remove what runs that were killed have left; return the names of the namespaces."""
    left = [name for name in namespaces() if not psutil.pid_exists(int(name.split("-")[2]))]
    remove(left)
    return left


def namespaces() -> list[str]:
    """Return the namespaces of all runs of this benchmark."""
    listed = command("ip", "netns", "list").splitlines()
    return [line.split()[0] for line in listed if line.startswith(PREFIX)]


def remove(names: Iterable[str]) -> None:
    """Kill the processes in the namespaces and delete them, with their links."""
    for name in names:
        for pid in command("ip", "netns", "pids", name).split():
            psutil.Process(int(pid)).kill() if psutil.pid_exists(int(pid)) else None
        command("ip", "netns", "delete", name)


def ip_tc(program: str, namespace: str, *words: str) -> None:
    command(program, "-n", namespace, *words)


def command(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def about_machine() -> dict[str, Any]:
    """Return what a transfer depends on besides the links."""
    kernel = Path("/proc/sys")
    return {
        "kernel": os.uname().release,
        "cores": os.cpu_count(),
        "congestion_control": (kernel / "net/ipv4/tcp_congestion_control").read_text().strip(),
        "boot": (kernel / "kernel/random/boot_id").read_text().strip(),
    }
