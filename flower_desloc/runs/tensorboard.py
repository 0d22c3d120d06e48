"""Curves for TensorBoard; the x axis is the global step."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from flower_desloc.flower.observer import EvaluationRecord, Plan, Traffic, WindowRecord

_METRICS = ("loss", "accuracy", "perplexity", "bits_per_byte")


class TensorBoard:
    """Observer that writes scalars into ``folder``.

    Tags: ``loss/mean``, ``loss/CLIENT`` and ``grad_norm/CLIENT`` at every step, ``learning_rate``;
    ``update_norm/CLIENT`` and ``param_norm/CLIENT`` at every window's end;
    ``heldout_METRIC/{central,federated}`` and the same with a domain's, label's or client's name
    behind it; ``bytes_{up,down}/STREAM`` since the start;
    ``drift/STREAM`` (spread / norm) and ``change/STREAM`` (moved / former norm) at every sync.
    """

    def __init__(self, folder: Path, resumed_at: int | None = None) -> None:
        # Imported when wanted: it takes a second.
        from torch.utils.tensorboard.writer import SummaryWriter

        # What another attempt wrote of the steps to come is not shown any more.
        purge_step = None if resumed_at is None else resumed_at + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)
        self._traffic = Traffic()
        self._norms: dict[str, float] = {}

    def started(self, plan: Plan) -> None:
        """Nothing to draw yet."""

    def joined(self, client: str, about: Mapping[str, str]) -> None:
        """A new client's curves begin by themselves."""

    def replay(self, record: WindowRecord) -> None:
        """Count a window that is drawn already."""
        self._traffic += record.traffic
        self._norms |= {stream: drift.norm for stream, drift in record.drift.items()}

    def window(self, record: WindowRecord) -> None:
        """Write the window, and have it on disk when this returns."""
        self._steps(record)
        for name, client in record.clients.items():
            self._add(f"update_norm/{name}", client.update_norm, record.step)
            self._add(f"param_norm/{name}", client.param_norm, record.step)
        for where, evaluation in (("central", record.central), ("federated", record.federated)):
            if evaluation:
                self._evaluation(where, evaluation, record.step)
        self._traffic += record.traffic
        for way, sent in (("up", self._traffic.up), ("down", self._traffic.down)):
            for stream, count in {**sent, "total": sum(sent.values())}.items():
                self._add(f"bytes_{way}/{stream}", count, record.step)
        self._drift(record)
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Close the file."""
        self._writer.close()

    def _steps(self, record: WindowRecord) -> None:
        clients = record.clients
        for name, client in clients.items():
            for step, loss in enumerate(client.losses, record.start + 1):
                self._add(f"loss/{name}", loss, step)
            for step, norm in enumerate(client.grad_norms, record.start + 1):
                self._add(f"grad_norm/{name}", norm, step)
        by_step = zip(*(client.losses for client in clients.values()), strict=False)
        for step, losses in enumerate(by_step, record.start + 1):
            self._add("loss/mean", fmean(losses), step)
        # A function of the global step, so the same on every client.
        for client in list(clients.values())[:1]:
            for step, rate in enumerate(client.learning_rates, record.start + 1):
                self._add("learning_rate", rate, step)

    def _evaluation(self, where: str, evaluation: EvaluationRecord, step: int) -> None:
        for metric in _METRICS:
            tag = f"heldout_{metric}/{where}"
            if metric in evaluation.overall:
                self._add(tag, evaluation.overall[metric], step)
            for part, values in evaluation.parts.items():
                if metric in values:
                    self._add(f"{tag}/{part}", values[metric], step)

    def _drift(self, record: WindowRecord) -> None:
        for stream, drift in record.drift.items():
            if drift.norm:
                self._add(f"drift/{stream}", drift.spread / drift.norm, record.step)
            if former := self._norms.get(stream):
                self._add(f"change/{stream}", drift.moved / former, record.step)
            self._norms[stream] = drift.norm

    def _add(self, tag: str, value: float, step: int) -> None:
        self._writer.add_scalar(tag, value, step)
