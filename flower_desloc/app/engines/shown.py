"""The output of a run as Python shows it: its lines; in a notebook a bar stands for windows."""

import io
import re
import sys
from typing import Any, TextIO

_STEP = re.compile(r"step +(\d+)/(\d+)  ")
_WINDOW = re.compile(r"step +\d+/\d+  window ")


class Shown(io.TextIOBase):
    """A stream that passes lines on to ``stream``, and shows their steps as a bar in a notebook."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rest = ""
        self._bar: Any = None  # IPython.display.ProgressBar
        self.has_bar = "IPython" in sys.modules and _in_a_notebook()

    def write(self, text: str) -> int:
        """Pass on the lines that are whole."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            step = _STEP.match(line)
            if step is not None and self.has_bar:
                self._move(*map(int, step.groups()))
            if not (self.has_bar and _WINDOW.match(line)):
                self._stream.write(line + "\n")
        return len(text)

    def flush(self) -> None:
        """Pass on what is no whole line, and cannot become one of a step."""
        if self._rest and not self._rest.startswith("step "[: len(self._rest)]):
            self._stream.write(self._rest)
            self._rest = ""
        self._stream.flush()

    def _move(self, step: int, steps: int) -> None:
        from IPython.display import ProgressBar

        if self._bar is None:
            untyped: Any = ProgressBar
            self._bar = untyped(steps)
            self._bar.display()
        self._bar.progress = step


def _in_a_notebook() -> bool:
    from IPython import get_ipython

    return hasattr(get_ipython(), "kernel")
