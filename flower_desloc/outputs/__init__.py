"""What a run leaves behind and what it tells while it goes: files, curves, terminal, picture."""

from flower_desloc.outputs.folder import RunFolder
from flower_desloc.outputs.recorder import RunRecorder

__all__ = ["RunFolder", "RunRecorder"]
