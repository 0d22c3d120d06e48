"""Curves for TensorBoard; the x axis is the global step."""

from pathlib import Path

from flower_desloc.app.runs.folder import Line
from flower_desloc.app.runs.record import RunRecord
from flower_desloc.app.runs.scalars import Scalars
from flower_desloc.core.client_info import ClientInfo
from flower_desloc.flower.observer import RunInfo


class TensorBoard:
    """View that writes the ``Scalars`` of a run into ``folder``."""

    def __init__(self, folder: Path, resumed_at: int | None) -> None:
        # Imported here: it takes a second.
        from torch.utils.tensorboard.writer import SummaryWriter

        # Hides what was written after the checkpoint that the run resumes from.
        purge_step = None if resumed_at is None else resumed_at + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)
        self._scalars = Scalars()

    def started(self, run: RunInfo) -> None:
        """Do nothing: there is nothing to draw yet."""

    def joined(self, client: str, info: ClientInfo) -> None:
        """Do nothing: the curves of a new client begin with its first window."""

    def replay(self, line: Line) -> None:
        """Count a window that was written before the run was resumed."""
        self._scalars.replay(line)

    def window(self, line: Line) -> None:
        """Write the window, and flush."""
        for tag, step, value in self._scalars.window(line):
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def finish(self, record: RunRecord) -> None:  # noqa: ARG002
        """Close the file."""
        self._writer.close()
