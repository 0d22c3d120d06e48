"""Training time over slow links: the paper's appendix "Wall-Clock Time Modeling".

A step takes its compute and the communication that is not hidden behind it:

    t_total = t_compute + alpha t_comms
    t_compute = 6 d D / (MFU S M)
    t_comms = 2 P / B (1 - 1 / M) + l        (a ring all-reduce)

with d parameters, D tokens, M workers of S FLOP/s peak, a payload of P, bandwidth B and latency
l. The paper writes P = d; here payloads and bandwidth are in bytes. Besides the paper's ring there
is the star, a server and its clients, which is what Flower runs on.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from flower_desloc.core.traffic import MethodRates

MBIT = 125_000
"""Bytes per second in a Mbit/s."""


class Topology(StrEnum):
    """Network topology of the workers."""

    STAR = "star"
    RING = "ring"


@dataclass(frozen=True, kw_only=True)
class Link:
    """The network link of each worker, and of the server of a star."""

    bandwidth: float = 1000 * MBIT
    """Bytes per second, B."""
    latency: float = 0.05
    """Seconds per message, l."""


REPORTED: Final = Link(bandwidth=100 * MBIT)
"""The link of reports; a plan has the default."""


def ring_seconds(num_bytes: float, workers: int, link: Link) -> float:
    """Return the seconds of one ring all-reduce of a payload among ``workers``.

    The latency counts once, as in the paper; a ring of 2 (M - 1) hops pays more.
    """
    return 2 * num_bytes / link.bandwidth * (1 - 1 / workers) + link.latency


def star_seconds(num_bytes: float, workers: int, link: Link) -> float:
    """Return the seconds of one average through a server, up and down.

    M payloads go up through the server's link, then the mean goes down to each worker. No mean is
    sent before the last payload has arrived, so the times of the two directions add up.
    """
    return 2 * workers * num_bytes / link.bandwidth + 2 * link.latency


H100: Final = {"bf16": 989e12, "float32": 67e12, "float64": 67e12}
"""Peak of an H100 SXM in FLOP per second, dense and without TF32, as PyTorch computes by default;
NVIDIA's data sheet."""


def compute_seconds(
    num_params: float, tokens: float, *, workers: int, flops: float, mfu: float
) -> float:
    """Return the seconds of compute for ``tokens``, shared by ``workers``.

    ``flops`` is one worker's peak in FLOP per second, S; ``mfu`` is the share of it that training
    reaches.
    """
    return 6 * num_params * tokens / (mfu * flops * workers)


def communication_seconds(
    method: MethodRates, workers: int, link: Link, topology: Topology
) -> float:
    """Return the mean seconds of communication per step."""
    if topology is Topology.RING:
        times, exchange = method.exchanges, ring_seconds
    else:
        times, exchange = method.windows, star_seconds
    return times * exchange(method.num_bytes / times, workers, link) if times else 0.0


def balance(
    method: MethodRates, workers: int, latency: float, topology: Topology, seconds: float
) -> float | None:
    """Return the bandwidth in bytes per second at which communication takes ``seconds`` a step.

    None if latency alone takes longer.
    """
    # Both models are linear in 1 / B and in l: each part is found with the other one at zero.
    instant = Link(bandwidth=math.inf, latency=latency)
    without_latency = Link(bandwidth=1, latency=0)
    waiting = communication_seconds(method, workers, instant, topology)
    num_bytes = communication_seconds(method, workers, without_latency, topology)
    return num_bytes / (seconds - waiting) if seconds > waiting else None
