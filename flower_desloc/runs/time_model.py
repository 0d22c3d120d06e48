"""Modelled wall-clock over slow links: compute as measured, communication as modelled."""

from dataclasses import dataclass, field
from statistics import median

from flower_desloc.core.schedule import GRADIENTS, PARAMS, SyncSchedule
from flower_desloc.core.traffic import Uploads
from flower_desloc.plan.wall_clock import MBIT, Link, star_seconds
from flower_desloc.runs.record import RunRecord

DEFAULT_LINK = Link(bandwidth=100 * MBIT, latency=0.05)


@dataclass
class ModelledTime:
    """Seconds of compute and of communication, counted window by window."""

    steps: list[float] = field(default_factory=lambda: [0.0])
    seconds: list[float] = field(default_factory=lambda: [0.0])
    """Seconds since the start, after each of ``steps``."""
    compute: float = 0.0
    communication: float = 0.0

    @property
    def total(self) -> float:
        """The sum of both."""
        return self.compute + self.communication

    def add(self, step: int, compute: float, communication: float) -> None:
        """Count a window that ends after ``step``."""
        self.compute += compute
        self.communication += communication
        self.steps.append(step)
        self.seconds.append(self.total)


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
    down again (``star_seconds``). The steps that the clients of
    this run take before they merge an average pass meanwhile; nothing else overlaps.
    """
    pace = seconds_per_step(run)
    if pace is None:
        return {}
    config, sizes = run.summary["config"], run.summary["stream_bytes"]
    # From the summary: an older version's configuration may no longer be valid.
    once_at = frozenset(config.get("once_at", ()))
    phases, delay = config.get("phases", {}), config.get("sync_delay", 0)
    schedule = SyncSchedule(config["periods"], config["coin_seed"], once_at, phases)
    uploads = Uploads(schedule, sizes, sizes, config["steps"])
    methods = {name: ModelledTime() for name in ("this run", "Local Adam", "DDP")}
    ends = [line["step"] for line in run.windows]
    for line, following in zip(run.windows, [*ends[1:], ends[-1]], strict=True):
        steps, workers = line["step"] - line["start"], max(1, len(line["clients"]))
        before = sum(uploads.local_adam.values())
        uploads.add(line["start"], line["step"], len(line["clients"]))
        sent = {
            "this run": sum(line["bytes_up"].values()),
            "Local Adam": sum(uploads.local_adam.values()) - before,
            "DDP": workers * sizes.get(PARAMS, 0),
        }
        for name, time in methods.items():
            seconds = star_seconds(sent[name] / workers, workers, link) if sent[name] else 0.0
            if name == "this run":
                hidden = min(delay, following - line["step"])
                seconds = max(0.0, seconds - pace * hidden)
            time.add(line["step"], pace * steps, seconds * (steps if name == "DDP" else 1))
    if GRADIENTS in run.periods:
        del methods["Local Adam"]
    return methods
