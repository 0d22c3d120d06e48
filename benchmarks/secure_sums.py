"""CPU time and bytes of secure sums, by themselves and in a whole window of a run.

    python benchmarks/secure_sums.py [--parameters 1000000] [--sites 3,10,20] [--json FILE]

**A sum of one stream**, without Flower: the two ends of the protocol, one site after the other in
one process and thread: keys, shares, codes, masks and packing at a site, adding and unmasking at
the server, without sites that drop out and with as many as are tolerated. Beyond two million
parameters only the first site computes its masks, the server adds its codes in the place of the
others', and the sum is not checked. Bytes are what a site sends up, compared with float32.

**A window**, with secure sums and without: Adam's local steps of a small perceptron at every site,
one after the other in one process and thread, and an average of all three streams at the end. CPU
seconds are those of the whole run of one window, sites and server; ``--steps 0`` leaves it out. A
batch has 8 rows, so that steps are cheap and the masks' share is large. Bytes are those of whole
messages; ``desynced`` is the payload at the periods 256, 768 and 1536.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time

import numpy as np
import torch
import typer
from common import report
from numpy.typing import NDArray
from torch import nn

from flower_desloc import DesLoc, Policy, SyncSchedule, Worker, prime, stream_names, take
from flower_desloc.core.kinds import Kind
from flower_desloc.core.schedule import PARAMS
from flower_desloc.flower.arrays import to_record
from flower_desloc.flower.client import client_app
from flower_desloc.flower.inprocess import InProcessGrid
from flower_desloc.flower.observer import Observer, Traffic, WindowRecord
from flower_desloc.flower.secure.at_server import SecureDesLoc
from flower_desloc.secure.agreement import SumTerms, least_threshold
from flower_desloc.secure.codes import Codes, encode, packed, scale_for, signed, unpacked, width_of
from flower_desloc.secure.identity import Identity, introduce
from flower_desloc.secure.server import ServerSum
from flower_desloc.secure.site import SiteSum

TENSOR = 4_000_000
"""Values of the largest tensor."""
CHECKED = 2_000_000
"""Parameters up to which every site computes its masks, and the sum is checked."""
KINDS = {PARAMS: Kind.PARAMS, "exp_avg": Kind.FIRST_MOMENT, "exp_avg_sq": Kind.SECOND_MOMENT}


class Clock:
    """Adds up the CPU seconds of what is done, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = process_time()

    def note(self, what: str) -> None:
        """Count the time since the last note as that of ``what``."""
        now = process_time()
        self.seconds[what] = self.seconds.get(what, 0.0) + now - self._last
        self._last = now


def tensors(parameters: int, m: int) -> list[torch.Tensor]:
    """Return the values of site m, not negative, as second moments are."""
    noise = torch.Generator().manual_seed(m)
    sizes = [min(TENSOR, parameters - start) for start in range(0, parameters, TENSOR)]
    return [torch.rand(size, generator=noise) for size in sizes]


def measured(kind: Kind, parameters: int, number: int, gone: int) -> dict[str, float]:
    """Return CPU seconds and bytes of one sum; ``gone`` sites send shares and no codes."""
    width, is_checked = width_of(kind), parameters <= CHECKED
    scale, up = scale_for(1.0, number, width), not kind.is_signed
    terms = SumTerms(
        run="run", attempt="one", start=0, stop=16, threshold=least_threshold(number),
        shapes={"stream": ""}, scales={"stream": scale}, widths={"stream": width},
        most=number, averages={}, fresh=False, request="",
    )  # fmt: skip
    names = [f"site-{m:02}" for m in range(number)]
    values = {names[m]: tensors(parameters, m) for m in range(number if is_checked else 1)}
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        introduce(folder, names)
        sites = {n: SiteSum(Identity.read(folder, n), folder / f"{n}.json", "run") for n in names}
        server, clock, sent = ServerSum(terms), Clock(), dict[str, list[NDArray[np.uint8]]]()
        for name, site in sites.items():
            server.add_keys(name, site.keys(terms, None))
        keys = server.keys
        for name, site in sites.items():
            server.add_shares(name, site.shares(keys))
        for name, site in sites.items():
            site.receive(server.sealed_for(name), {}, None, ())
        clock.note("agree")

        def coded(name: str) -> Iterator[Codes]:
            for tensor in values.get(name, []):
                codes = encode(tensor, scale, number, width, up=up)
                yield codes
                sent[name].append(packed(codes, width))

        present = names[: number - gone]
        for name in present:
            sent[name] = []
            clock.note("")
            sites[name].mask(coded(name))
            clock.note("mask" if name == names[0] else "")
        for name in present:
            arrays = sent[name] or sent[names[0]]
            server.add_masked(name, (unpacked(each, width) for each in arrays))
        clock.note("add")
        for name in present:
            server.add_signature(name, sites[name].confirm(server.survivors))
        for name in present:
            server.add_unmasking(name, sites[name].unmask(server.signatures))
        clock.note("agree")
        total = server.total()
        clock.note("unmask")
    if is_checked:
        plain = [
            sum(encode(each, scale, number, width, up=up) for each in of_all)
            for of_all in zip(*(values[name] for name in present), strict=True)
        ]
        for codes, expected in zip(total, plain, strict=True):
            assert np.array_equal(signed(codes, width), expected), "the sum is wrong"
    return {
        "sent_up_megabytes": sum(each.nbytes for each in sent[names[0]]) / 1e6,
        "in_float32_megabytes": 4 * parameters / 1e6,
        "site_cpu_seconds": clock.seconds["mask"] + clock.seconds["agree"] / number,
        "server_cpu_seconds_adding": clock.seconds["add"],
        "server_cpu_seconds_unmasking": clock.seconds["unmask"],
    }


PERIODS = {PARAMS: 1, "exp_avg": 3, "exp_avg_sq": 6}
"""Those of the paper, in multiples of that of params."""


class Last(Observer):
    """Keeps the traffic of the last window."""

    traffic = Traffic()

    def window(self, record: WindowRecord) -> None:
        assert not record.events, record.events
        self.traffic = record.traffic


def worker(parameters: int) -> Worker:
    """Return the worker of all sites; its batches depend on the step alone."""
    width = round((parameters / 2) ** 0.5)
    module = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def loss_at(step: int) -> torch.Tensor:
        rows = torch.randn(8, width, generator=torch.Generator().manual_seed(step))
        loss: torch.Tensor = (module(rows) - rows.square()).square().mean()
        return loss

    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    return Worker(module=module, optimizer=optimizer, loss_at=loss_at, num_examples=1)


def window(parameters: int, number: int, steps: int, *, is_secure: bool) -> dict[str, float]:
    """Return CPU seconds and bytes of a run of one window, all streams due at its end."""
    of_all = worker(parameters)
    prime(of_all.optimizer)
    states = take(of_all.module, of_all.optimizer, stream_names(of_all.module, of_all.optimizer))
    initial, seen = to_record(states.pop(PARAMS)), Last()
    with TemporaryDirectory() as folder:
        introduce(Path(folder), [f"client-{m}" for m in range(number)])
        keys = {"secure-keys": folder} if is_secure else {}
        node = {"num-partitions": number, "state-dir": folder, **keys}
        nodes = [{**node, "partition-id": m} for m in range(number)]
        grid = InProcessGrid(client_app(lambda *_: of_all), nodes)
        make: Callable[..., DesLoc] = SecureDesLoc if is_secure else DesLoc
        strategy = make(
            SyncSchedule(dict.fromkeys(PERIODS, steps)), steps, policy=Policy(min_clients=number),
            templates=states, evaluate_clients=False,
        )  # fmt: skip
        clock = Clock()
        strategy.start(grid, initial, observer=seen)
        clock.note("window")
    up, down = seen.traffic.up, 4 * parameters * number
    return {
        "cpu_seconds": clock.seconds["window"],
        "megabytes_up": seen.traffic.framed_up / 1e6,
        "megabytes_down": seen.traffic.framed_down / 1e6,
        "desynced_megabytes_up": sum(up[name] / k for name, k in PERIODS.items()) / 1e6,
        "desynced_megabytes_down": sum(down / k for k in PERIODS.values()) / 1e6,
    }


def compared(parameters: int, number: int, steps: int) -> dict[str, object]:
    """Return a window with and without secure sums, and their ratios."""
    plain, secure = (
        window(parameters, number, steps, is_secure=is_secure) for is_secure in (False, True)
    )
    ratios = {name: secure[name] / plain[name] for name in ("cpu_seconds", "megabytes_up")}
    for name in ("", "desynced_"):
        ratios[f"{name}megabytes"] = sum(
            secure[f"{name}megabytes_{way}"] for way in ("up", "down")
        ) / sum(plain[f"{name}megabytes_{way}"] for way in ("up", "down"))
    return {"plain": plain, "secure": secure, "secure compared with plain": ratios}


def main(
    parameters: int = 1_000_000, sites: str = "3,10,20", steps: int = 64, json: Path | None = None
) -> None:
    """CPU time and bytes of secure sums, by themselves and in a whole window of a run."""
    torch.set_num_threads(1)
    result: dict[str, object] = {"parameters": parameters}
    for number in map(int, sites.split(",")) if steps else ():
        key = f"a window of {steps} steps, {number} sites"
        result[key] = compared(parameters, number, steps)
    for name, kind in KINDS.items():
        for number in map(int, sites.split(",")):
            tolerated = number - least_threshold(number)
            for gone in sorted({0, tolerated}):
                key = f"{name} of {number} sites, {gone} gone"
                result[key] = measured(kind, parameters, number, gone)
    report(result, json)


if __name__ == "__main__":
    typer.run(main)
