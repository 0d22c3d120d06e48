"""Output of a run: its folder, records, terminal output, figures and report."""

from flower_desloc.app.runs.folder import RunFolder
from flower_desloc.app.runs.recorder import RunRecorder

__all__ = ["RunFolder", "RunRecorder"]
