"""Lines in Flower's log: what will be done, and by the observer of an app that gives none."""

from logging import INFO

from flower_desloc.core.client_info import ClientInfo
from flower_desloc.core.schedule import SyncSchedule
from flower_desloc.flower.internals import log
from flower_desloc.flower.observer import EvaluationRecord, Observer, RunInfo, WindowRecord


def log_schedule(title: str, schedule: SyncSchedule, num_steps: int, run_key: str) -> None:
    """Log what a strategy of that title will do."""
    averaged = ", ".join(f"{name} {schedule.period_text(name)}" for name in schedule.periods)
    log(INFO, "%s, %d local steps; averaged: %s", title, num_steps, averaged)
    log(INFO, "the clients keep their state of this run under %s", run_key)


class LogLines(Observer):
    """Logs what was averaged after every window, and the losses."""

    def started(self, run: RunInfo) -> None:
        """Log who takes part."""
        self._steps = run.num_steps
        log(INFO, "%d clients: %s", len(run.clients), ", ".join(run.clients))

    def joined(self, client: str, info: ClientInfo) -> None:
        """Log a client that joined after the start."""
        del info
        log(INFO, "%s has joined", client)

    def window(self, record: WindowRecord) -> None:
        """Log a window."""
        parts = [f"averaged {', '.join(record.streams)}"] if record.streams else []
        if record.train_loss is not None:
            parts.append(f"train loss {record.train_loss:.4g}")
        parts += _metrics("on the clients", record.federated)
        parts += _metrics("on the server", record.central)
        if parts:
            log(INFO, "step %d of %d: %s", record.step, self._steps, "; ".join(parts))


def _metrics(where: str, record: EvaluationRecord | None) -> list[str]:
    if record is None:
        return []
    values = ", ".join(f"{name} {value:.4g}" for name, value in record.overall.items())
    return [f"{values} {where}"]
