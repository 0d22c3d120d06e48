"""What a run leaves behind and what it tells while it goes: files, curves, terminal, picture."""

from flower_desloc.runs.folder import RunFolder
from flower_desloc.runs.recorder import RunRecorder

__all__ = ["RunFolder", "RunRecorder"]
