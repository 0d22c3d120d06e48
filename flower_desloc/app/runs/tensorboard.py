"""Curves for TensorBoard; the x axis is the global step."""

import math
from collections import Counter
from itertools import zip_longest
from pathlib import Path
from statistics import fmean

from flower_desloc.app.runs.folder import Line
from flower_desloc.app.runs.metric import ordered
from flower_desloc.app.runs.record import RunRecord
from flower_desloc.core.client_info import ClientInfo
from flower_desloc.flower.observer import RunInfo


class TensorBoard:
    """View that writes scalars into ``folder``.

    Tags: ``loss/mean``, ``loss/CLIENT`` and ``grad_norm/CLIENT`` at every step, ``learning_rate``;
    ``update_norm/CLIENT`` and ``param_norm/CLIENT`` at the end of every window;
    ``heldout_METRIC/{central,federated}``, also followed by a domain, label or client;
    ``bytes_{up,down}/STREAM`` since the start;
    ``drift/STREAM`` (spread / norm) and ``change/STREAM`` (moved / last norm) at every sync.
    """

    def __init__(self, folder: Path, resumed_at: int | None) -> None:
        # Imported here: it takes a second.
        from torch.utils.tensorboard.writer import SummaryWriter

        # Hides what was written after the checkpoint that the run resumes from.
        purge_step = None if resumed_at is None else resumed_at + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)
        self._sent: Counter[str] = Counter()
        self._norms: dict[str, float | None] = {}

    def started(self, run: RunInfo) -> None:
        """Do nothing: there is nothing to draw yet."""

    def joined(self, client: str, info: ClientInfo) -> None:
        """Do nothing: the curves of a new client begin with its first window."""

    def replay(self, line: Line) -> None:
        """Count a window that was written before the run was resumed."""
        for way in ("up", "down"):
            for stream, count in line[f"bytes_{way}"].items():
                self._sent[f"bytes_{way}/{stream}"] += count
                self._sent[f"bytes_{way}/total"] += count
        self._norms |= {stream: drift["norm"] for stream, drift in line["drift"].items()}

    def window(self, line: Line) -> None:
        """Write the window, and flush."""
        step, clients = line["step"], line["clients"]
        for name, client in clients.items():
            self._curve(f"loss/{name}", client["losses"], line)
            self._curve(f"grad_norm/{name}", client["grad_norms"], line)
            self._writer.add_scalar(f"update_norm/{name}", client["update_norm"], step)
            self._writer.add_scalar(f"param_norm/{name}", client["param_norm"], step)
        # A site may have sent fewer, or none that is finite.
        losses = zip_longest(*(c["losses"] for c in clients.values()), fillvalue=math.nan)
        finite = ([loss for loss in each if math.isfinite(loss)] for each in losses)
        self._curve("loss/mean", [fmean(each) if each else math.nan for each in finite], line)
        for client in list(clients.values())[:1]:  # all clients have the same learning rate
            self._curve("learning_rate", client["learning_rates"], line)
        for where, evaluation in line["evaluation"].items():
            parts = {f"{where}/{part}": values for part, values in evaluation["parts"].items()}
            for tag, metrics in {where: evaluation["overall"], **parts}.items():
                for metric in ordered(metrics):
                    self._writer.add_scalar(f"heldout_{metric}/{tag}", metrics[metric], step)
        for stream, drift in line["drift"].items():
            if drift["norm"]:
                self._writer.add_scalar(f"drift/{stream}", drift["spread"] / drift["norm"], step)
            if last := self._norms.get(stream):
                self._writer.add_scalar(f"change/{stream}", drift["moved"] / last, step)
        self.replay(line)
        for tag, count in self._sent.items():
            self._writer.add_scalar(tag, count, step)
        self._writer.flush()

    def finish(self, record: RunRecord) -> None:  # noqa: ARG002
        """Close the file."""
        self._writer.close()

    def _curve(self, tag: str, values: list[float], line: Line) -> None:
        for step, value in enumerate(values, line["start"] + 1):
            self._writer.add_scalar(tag, value, step)
