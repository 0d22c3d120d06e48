"""Modelled wall-clock over slow links: compute as measured, communication as modelled."""

from dataclasses import dataclass, field
from statistics import median

from flower_desloc.app.plan.wall_clock import Link, star_seconds
from flower_desloc.app.runs.record import RunRecord
from flower_desloc.core.schedule import GRADIENTS, PARAMS
from flower_desloc.core.traffic import Uploads


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


def seconds_per_step(run: RunRecord, *, lock_step: bool = False) -> float | None:
    """Return the median over windows of the slowest client's measured seconds per step.

    A step is one of the federation's, of which sites of unequal speed take a part; with
    ``lock_step`` it is one of the client's own.
    """
    paces = []
    for line in run.windows:
        steps = line["step"] - line["start"]
        found = [
            client["seconds"] / ((lock_step and client.get("steps")) or steps)
            for client in line["clients"].values()
            if steps and client["seconds"]
        ]
        paces += [max(found)] if found else []
    return median(paces) if paces else None


def modelled(run: RunRecord, link: Link) -> dict[str, ModelledTime]:
    """Return the modelled time of the run, and of Local Adam and DDP for the same steps.

    Empty if no step was measured. Both are in lock-step, also where this run has sites of unequal
    speed. Every average moves its bytes through the server's link, up and
    down again (``star_seconds``). The steps that the clients of
    this run take before they merge an average pass meanwhile; nothing else overlaps.
    """
    pace, lock_step = seconds_per_step(run), seconds_per_step(run, lock_step=True)
    if pace is None or lock_step is None:
        return {}
    config, sizes = run.summary["config"], run.summary["stream_bytes"]
    delay = config.get("sync_delay", 0)
    uploads = Uploads(run.schedule, sizes, sizes, config["steps"])
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
            time.compute += steps * (pace if name == "this run" else lock_step)
            time.communication += seconds * (steps if name == "DDP" else 1)
            time.steps.append(line["step"])
            time.seconds.append(time.total)
    if GRADIENTS in run.periods:
        del methods["Local Adam"]
    return methods
