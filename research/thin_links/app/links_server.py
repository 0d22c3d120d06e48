"""The app's own ServerApp, which also records when a window was over, and the interface then."""

import json
import time
from pathlib import Path
from typing import Any

import server_app
from flower_desloc.app.config import Config
from flower_desloc.app.runs import RunFolder, RunRecorder
from flower_desloc.flower.observer import WindowRecord

STATISTICS = Path("/sys/class/net/eth0/statistics")  # of the server's namespace
COUNTERS = ("rx_bytes", "rx_packets", "tx_bytes", "tx_packets")


class LinkRecorder(RunRecorder):
    """Adds a line to ``links.jsonl`` for every window, and for round 0."""

    def __init__(self, config: Config, folder: RunFolder, **options: Any) -> None:
        super().__init__(config, folder, **options)
        self._links = folder.path / "links.jsonl"

    def window(self, record: WindowRecord) -> None:
        counted = {name: int((STATISTICS / name).read_text()) for name in COUNTERS}
        line = {"round": record.round, "time": time.monotonic(), **counted}
        with self._links.open("a") as file:
            file.write(json.dumps(line) + "\n")
        super().window(record)


# The app has no option for another recorder, and only this benchmark needs one.
server_app.RunRecorder = LinkRecorder  # type: ignore[attr-defined]
app = server_app.app
