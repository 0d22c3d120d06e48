"""How long a run would take over thin links: compute as measured, exchange as modelled."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from flower_desloc.runs.methods import Uploads
from flower_desloc.runs.metrics import Line
from flower_desloc.runs.loaded import Run
from flower_desloc.runs.figures.series import Curve
from flower_desloc.core.schedule import GRADIENTS, PARAMS, SyncSchedule
from flower_desloc.plan.wall_clock import Link, star_seconds

MBIT = 125_000
"""Bytes per second in a Mbit/s."""

DEFAULT_LINK = Link(bandwidth=100 * MBIT, latency=0.05)


@dataclass(frozen=True)
class Modelled:
    """Seconds since the start after each window, and what they are spent on."""

    course: Curve
    compute: float
    exchange: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.compute + self.exchange


def seconds_per_step(run: Run) -> float | None:
    """Return the median over windows of the slowest client's seconds per step, as measured."""
    paces = [
        max(seconds) / (line["step"] - line["start"])
        for line in run.windows
        if line["step"] > line["start"]
        and (seconds := [c["seconds"] for c in line["clients"].values() if c["seconds"]])
    ]
    return median(paces) if paces else None


def modelled(run: Run, link: Link) -> dict[str, Modelled]:
    """Return the modelled time of the run, and of Local Adam and DDP for the same steps.

    Empty where the run has no step. What a client sent up counts as a star moves it
    (:func:`~flower_desloc.plan.wall_clock.star_seconds`): up to the server and, as a mean, down
    again, through the server's one link, nothing of it hidden behind compute.
    """
    pace = seconds_per_step(run)
    if pace is None:
        return {}

    def measured(line: Line) -> float:
        workers = max(1, len(line["clients"]))
        return _star(sum(line["bytes_up"].values()) / workers, workers, link)

    methods = {"this run": _course(run, pace, measured)}
    if GRADIENTS not in run.summary["config"]["periods"]:
        methods["Local Adam"] = _course(run, pace, _local_adam(run, link))
    size = run.summary["stream_bytes"].get(PARAMS, 0)
    methods["DDP"] = _course(
        run,
        pace,
        lambda line: (
            (line["step"] - line["start"]) * _star(size, max(1, len(line["clients"])), link)
        ),
    )
    return methods


def _course(run: Run, pace: float, exchange: Callable[[Line], float]) -> Modelled:
    compute, sent = 0.0, 0.0
    points: list[tuple[float, float]] = [(0, 0.0)]
    for line in run.windows:
        compute += pace * (line["step"] - line["start"])
        sent += exchange(line)
        points.append((line["step"], compute + sent))
    return Modelled(Curve.of(points), compute, sent)


def _local_adam(run: Run, link: Link) -> Callable[[Line], float]:
    config = run.summary["config"]
    schedule = SyncSchedule(
        config["periods"], config["coin_seed"], frozenset(config.get("once_at", ()))
    )
    uploads = Uploads(
        schedule, run.summary["stream_bytes"], run.summary["stream_bytes"], config["steps"]
    )

    def exchange(line: Line) -> float:
        before = sum(uploads.local_adam.values())
        uploads.add_lines([line])
        workers = max(1, len(line["clients"]))
        return _star((sum(uploads.local_adam.values()) - before) / workers, workers, link)

    return exchange


def _star(num_bytes: float, workers: int, link: Link) -> float:
    # Where nothing is averaged nobody waits for the link.
    return star_seconds(num_bytes, workers, link) if num_bytes else 0.0
