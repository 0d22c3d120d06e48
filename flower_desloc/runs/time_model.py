"""How long a run would take over slow links: compute as measured, communication as modelled."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from flower_desloc.core.schedule import GRADIENTS, PARAMS
from flower_desloc.plan.wall_clock import Link, star_seconds
from flower_desloc.runs.folder import Line
from flower_desloc.runs.record import RunRecord

MBIT = 125_000
"""Bytes per second in a Mbit/s."""

DEFAULT_LINK = Link(bandwidth=100 * MBIT, latency=0.05)


@dataclass(frozen=True)
class ModelledTime:
    """Seconds of compute and of communication."""

    steps: list[float]
    seconds: list[float]
    """Seconds since the start, after each of ``steps``."""
    compute: float
    communication: float

    @property
    def total(self) -> float:
        """The sum of both."""
        return self.compute + self.communication


def seconds_per_step(run: RunRecord) -> float | None:
    """Return the median over windows of the slowest client's measured seconds per step."""
    paces = [
        max(seconds) / (line["step"] - line["start"])
        for line in run.windows
        if line["step"] > line["start"]
        and (seconds := [c["seconds"] for c in line["clients"].values() if c["seconds"]])
    ]
    return median(paces) if paces else None


def modelled(run: RunRecord, link: Link) -> dict[str, ModelledTime]:
    """Return the modelled time of the run, and of Local Adam and DDP for the same steps.

    Empty if no step was measured. Every average moves its bytes through the server's link, up and
    down again (:func:`~flower_desloc.plan.wall_clock.star_seconds`), with no overlap with compute.
    """
    pace = seconds_per_step(run)
    if pace is None:
        return {}
    uploads, size = run.uploads(), run.summary["stream_bytes"].get(PARAMS, 0)

    def star(line: Line, sent: float) -> float:
        workers = max(1, len(line["clients"]))
        return star_seconds(sent / workers, workers, link) if sent else 0.0

    def local_adam(line: Line) -> float:
        before = sum(uploads.local_adam.values())
        uploads.add(line["start"], line["step"], len(line["clients"]))
        return star(line, sum(uploads.local_adam.values()) - before)

    def ddp(line: Line) -> float:
        a_step = star(line, max(1, len(line["clients"])) * size)
        return float((line["step"] - line["start"]) * a_step)

    methods = {
        "this run": _time(run, pace, lambda line: star(line, sum(line["bytes_up"].values())))
    }
    if GRADIENTS not in run.periods:
        methods["Local Adam"] = _time(run, pace, local_adam)
    return methods | {"DDP": _time(run, pace, ddp)}


def _time(run: RunRecord, pace: float, communication: Callable[[Line], float]) -> ModelledTime:
    steps, seconds, compute, sent = [0.0], [0.0], 0.0, 0.0
    for line in run.windows:
        compute += pace * (line["step"] - line["start"])
        sent += communication(line)
        steps.append(line["step"])
        seconds.append(compute + sent)
    return ModelledTime(steps, seconds, compute, sent)
