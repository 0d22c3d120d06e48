"""The smallest whole runs, for tests of what is around them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flower_desloc.app.engines.in_process import run_in_process
from flower_desloc.app.runs import RunFolder

TINY = [
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_hidden_layers=1",
    "data.max_bytes=60000",
    "data.seq_len=32",
    "data.batch_size=2",
    "evaluation.sequences=4",
]


def train(output_dir: Path, *overrides: str, config: str = "quickstart", clients: int = 2) -> Path:
    """Train in this process; return the folder of the run, which has no report."""
    words = " ".join(overrides)
    run_in_process({"config": config, "overrides": words, "output-dir": str(output_dir)}, clients)
    written = output_dir.glob("*/summary.json")
    return max(written, key=lambda path: path.stat().st_mtime_ns).parent


@contextmanager
def failing_at(number: int) -> Iterator[None]:
    """Let the run in the block fail: its server cannot write the record of a window."""
    append = RunFolder.append_metrics

    def until_full(self: RunFolder, line: dict[str, Any]) -> None:
        if line["round"] == number:
            raise OSError(28, "No space left on device")
        append(self, line)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "append_metrics", until_full)
        with pytest.raises(OSError, match="No space"):
            yield


def summary(folder: Path) -> dict[str, Any]:
    """Return the summary of a run."""
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found
